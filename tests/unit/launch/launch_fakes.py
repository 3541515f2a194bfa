"""Fake engines for tests, and questions about processes."""

import os
import time
from collections.abc import Callable
from pathlib import Path

FAKE_SITE = Path(__file__).parent / "fake_site"


def fake_environment(pids: Path | None = None, **what_goes_wrong: str) -> dict[str, str]:
    """An environment in which `python -m vllm...` starts the fake engine, and kvpush finds its distribution."""
    path = os.pathsep.join(filter(None, [str(FAKE_SITE), os.environ.get("PYTHONPATH", "")]))
    env = {"PYTHONPATH": path, **what_goes_wrong}
    if pids is not None:
        pids.mkdir(parents=True, exist_ok=True)
        env["FAKE_PIDS"] = str(pids)
    return env


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def wait_for_tree(folder: Path, processes: int, timeout_s: float = 30.0) -> list[int]:
    """The ids of a fake tree once all of it has started (server, child, grandchild in a session of its own)."""
    wait_until(lambda: len(pids_in(folder)) >= processes, f"{processes} processes", timeout_s)
    return pids_in(folder)
