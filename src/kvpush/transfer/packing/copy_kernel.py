"""One compiled kernel that copies pages, on a stream of its own: what packing and the copy to a peer have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpush.transfer.packing.base import PackingError
from kvpush.transfer.packing.block_ids import IdSlots
from kvpush.transfer.packing.kernels import copy_pages
from kvpush.transfer.packing.pages import VECTOR_BYTES, PageLayout
from kvpush.transfer.packing.streams import low_priority_stream
from kvpush.transfer.sources import Event

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a copy spreads over the GPU.

    num_programs: at most so many multiprocessors are taken from the engine's own kernels; a few dozen saturate memory
    and NVLink. num_warps: of each program. chunk_bytes: what one program has under way at once, a power of two.
    """

    num_programs: int = 64
    num_warps: int = 8
    chunk_bytes: int = 32 * 1024

    def __post_init__(self) -> None:
        for name, least, most in (("num_warps", 1, 32), ("chunk_bytes", VECTOR_BYTES, 1 << 20)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name} is {value}, must be a power of two from {least} to {most}")
        if not 1 <= self.num_programs <= 65535:
            raise ValueError(f"num_programs is {self.num_programs}, must be 1 to 65535")


@dataclass(frozen=True, slots=True)
class Side:
    """table: int64 base addresses of a paged side; None if the side is packed. block_stride in bytes."""

    table: torch.Tensor | None
    block_stride: int = 0


PACKED = Side(None)


class CopyStream:
    """Where copies are launched: beside the engine's kernels, and behind them."""

    def __init__(self, device: int) -> None:
        self.device = torch.device("cuda", device)
        self.stream = low_priority_stream(device)

    def wait(self) -> None:
        """Until everything launched here is done."""
        self.stream.synchronize()

    def event(self) -> torch.cuda.Event:
        """Passes when all that was launched so far is done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


class PageCopy:
    """Copies pages from one side to the other. Compiled, and launched once, when it is made.

    capacity: the most blocks of one call. Raises PackingError with the reason if there is no kernel for these pages, or
    if it cannot be compiled or launched here.
    """

    def __init__(
        self,
        stream: CopyStream,
        source: Side,
        target: Side,
        layout: PageLayout,
        num_bases: int,
        capacity: int,
        shape: LaunchShape,
    ) -> None:
        reason = unsuitable(layout)
        if reason is not None:
            raise PackingError(reason)
        self._stream = stream
        self._num_bases = num_bases
        self._source, self._target = source, target
        self._chunks = -(-layout.page_bytes // chunk_bytes(layout, shape))
        self._constants = constants(source, target, layout, shape)
        self._shape = shape
        self._paged = [side.table is not None for side in (source, target)]
        self._launch: Callable[..., Any] | None = None
        try:
            self._ids = IdSlots(sum(self._paged), capacity, stream.device)
            nothing = np.empty(0, dtype=np.int64)
            probe = torch.zeros(VECTOR_BYTES // _WORD_BYTES, dtype=torch.int64, device=stream.device)
            stream.stream.wait_stream(torch.cuda.current_stream(stream.device))  # tables and ids are being filled there
            for _ in range(2):  # the first compiles, the second goes the way of all later ones
                self([nothing] * sum(self._paged), probe)
            stream.wait()
        except PackingError:
            raise
        except Exception as error:  # the compiler raises what it likes
            raise PackingError(f"the copy kernel does not work here: {type(error).__name__}: {error}") from error

    def __call__(self, lists: Sequence[npt.NDArray[np.int64]], packed: torch.Tensor | None = None) -> Event:
        """Launches one copy. lists: checked block ids of each paged side, equally long. packed: the packed side, int64.

        Raises PackingError if the launch failed.
        """
        count = len(lists[0])
        if self._num_bases * count * self._chunks >= 2**31:
            raise PackingError(f"{count} blocks are too many for one launch")
        try:
            slot = self._ids.take()
        except Exception as error:  # what was launched before has failed
            raise PackingError(f"the copy kernel failed: {type(error).__name__}: {error}") from error
        try:
            with torch.cuda.stream(self._stream.stream):
                sent = iter(slot.send(lists))
                sides: list[torch.Tensor] = []
                for side in (self._source, self._target):
                    if side.table is not None:
                        sides += [side.table, next(sent)]
                    else:
                        assert packed is not None
                        sides += [packed, slot.device]  # ids of a packed side are not looked at
                self._run(*sides, count, self._num_bases)
                event = self._stream.event()
        except Exception as error:
            self._ids.drop(slot)
            raise PackingError(f"the copy kernel failed: {type(error).__name__}: {error}") from error
        slot.event = event
        return event

    def _run(self, *arguments: Any) -> None:
        if self._launch is not None:
            self._launch(*arguments, *self._constants.values())
            return
        grid = (self._shape.num_programs, 1, 1)
        compiled = copy_pages[grid](*arguments, **self._constants, num_warps=self._shape.num_warps)
        # From now on without the search for a compiled variant: types and alignment are the same at every call.
        if hasattr(compiled, "__getitem__"):
            self._launch = compiled[grid]


def unsuitable(layout: PageLayout) -> str | None:
    """Why the kernel cannot copy such pages; None if it can."""
    if layout.alignment % VECTOR_BYTES:
        return (
            f"contents of {layout.content_bytes} bytes, their strides and addresses are multiples of "
            f"{layout.alignment} bytes only, the kernel moves {VECTOR_BYTES}"
        )
    return None


def chunk_bytes(layout: PageLayout, shape: LaunchShape) -> int:
    """What one program moves at once: a power of two, not much more than a page."""
    return min(shape.chunk_bytes, max(VECTOR_BYTES, 1 << (layout.page_bytes - 1).bit_length()))


def constants(source: Side, target: Side, layout: PageLayout, shape: LaunchShape) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    return {
        "SOURCE_PAGED": source.table is not None,
        "TARGET_PAGED": target.table is not None,
        "SOURCE_STRIDE": source.block_stride,
        "TARGET_STRIDE": target.block_stride,
        "CONTIGUOUS": layout.contiguous,
        "TOKENS": layout.block_size,
        "CONTENT_WORDS": layout.content_bytes // _WORD_BYTES,
        "HEAD_STRIDE": layout.head_stride // _WORD_BYTES,
        "TOKEN_STRIDE": layout.token_stride // _WORD_BYTES,
        "PAGE_WORDS": layout.page_bytes // _WORD_BYTES,
        "CHUNK": chunk_bytes(layout, shape) // _WORD_BYTES,
        "NUM_PROGRAMS": shape.num_programs,
    }
