"""The CUDA stream that copies are launched on."""

from __future__ import annotations

from typing import Any

import torch


def low_priority_stream(device: int) -> torch.cuda.Stream:
    """A stream of its own that gives way to the engine's kernels."""
    kind: Any = torch.cuda.Stream
    least, _ = kind.priority_range()
    stream: torch.cuda.Stream = kind(device=device, priority=least)
    return stream
