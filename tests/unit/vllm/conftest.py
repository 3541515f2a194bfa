"""The fabric of the transfer tests serves here too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))


class NoSideChannel:
    """The fake dialer answers in its place."""

    def __init__(self, *args: object) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture
def no_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpush.vllm import scheduler

    monkeypatch.setattr(scheduler, "SideChannelServer", NoSideChannel)
