"""What the GPU tests share: whether there is a GPU, and waiting with a deadline."""

from __future__ import annotations

import time

import pytest
import torch

from kvpush.transfer.sources import Event

WAIT_S = 30.0

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is False)"),
]


def wait(event: Event) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not event.query():
        assert time.monotonic() < deadline_s, f"the copy has not ended within {WAIT_S} s"
        time.sleep(0.0002)
