"""Hashes of KV blocks where they lie: one 64-bit word for each (layer, block), equal on every device.

The words x_i of a block's page, in logical order, give

    sum over i of (x_i ^ (x_i >> 32)) * a_i    (64 bits, unsigned, wrapping around)

with a fixed odd a_i for every place. Each term is a bijection of its word, so a word that has changed is always seen
unless others hide it. Words that have changed places are seen, because no two places have the same factor; the shift is
for the high bits, which a product alone would push out at the top: now each has 33 bits of the factor behind it. Sums
may be taken in any order, so a GPU finds what numpy finds. This is made to find faults: whoever can choose the bytes
can make two pages that look alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
"""Hashes, shape [layers, blocks]."""

WORD_BYTES = 8
CHUNK_BYTES = 256 * 1024
"""Bytes hashed at once on the CPU: two buffers of this size stay in the processor's cache."""

Cancelled = Callable[[], bool]
HashBlocks = Callable[[Sequence[int], Cancelled], Words]
"""(block ids, whether nobody wants the result any more) -> hashes. May return early, with anything, if cancelled."""


class Hashing(Protocol):
    """Hashes that are being computed. All calls return at once."""

    def done(self) -> bool: ...

    def result(self) -> Words:
        """The hashes of what was in memory between the start and now; call it when done. Raises what went wrong."""
        ...

    def cancel(self) -> None:
        """Nobody wants the result: stops soon. Memory may still be read for a moment."""
        ...


class BlockHasher(Protocol):
    """Hashes blocks of one KV cache."""

    def start(self, blocks: Sequence[int]) -> Hashing: ...

    def close(self) -> None: ...


class InlineHasher:
    """Hashes at once, in the caller's thread."""

    def __init__(self, hash_blocks: HashBlocks) -> None:
        self._hash_blocks = hash_blocks

    def start(self, blocks: Sequence[int]) -> Hashing:
        return _Done(self._hash_blocks(blocks, lambda: False))

    def close(self) -> None:
        """Nothing is open."""


class BackgroundHasher:
    """Hashes in a thread of its own, one after the other, so that neither the engine nor its transfers wait.

    on_start: called first in that thread (selects the CUDA device).
    """

    def __init__(self, hash_blocks: HashBlocks, on_start: Callable[[], None] = lambda: None) -> None:
        self._hash_blocks = hash_blocks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvpush-digest", initializer=on_start)

    def start(self, blocks: Sequence[int]) -> Hashing:
        cancelled = threading.Event()
        return _Background(self._pool.submit(self._hash_blocks, blocks, cancelled.is_set), cancelled)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Done:
    def __init__(self, words: Words) -> None:
        self._words = words

    def done(self) -> bool:
        return True

    def result(self) -> Words:
        return self._words

    def cancel(self) -> None:
        """It is over."""


class _Background:
    def __init__(self, future: Future[Words], cancelled: threading.Event) -> None:
        self._future = future
        self._cancelled = cancelled

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Words:
        return self._future.result(0)

    def cancel(self) -> None:
        self._cancelled.set()
        self._future.cancel()


@lru_cache(maxsize=8)
def factors(num_words: int) -> npt.NDArray[np.int64]:
    """The odd factor of each place of a page, int64 of shape [num_words]; the output of splitmix64, read-only."""
    z = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found = ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    found.flags.writeable = False
    return found


def hash_memory(layers: Sequence[npt.NDArray[Any]], blocks: Sequence[int], cancelled: Cancelled) -> Words:
    """Hashes blocks of a cache in host memory; holds the interpreter lock for microseconds at a time.

    layers: one array of uint8 each, shape [num_blocks, ...] in logical order, the last axis contiguous; all alike.
    """
    words = np.zeros((len(layers), len(blocks)), np.int64)
    if not len(blocks):
        return words
    table = np.asarray(blocks, np.intp)
    if table.min() < 0 or table.max() >= len(layers[0]):
        raise IndexError(f"blocks {table.min()} to {table.max()}, the cache has {len(layers[0])}")
    page_bytes = layers[0][0].size
    num_words = -(-page_bytes // WORD_BYTES)
    at_once = max(1, min(len(blocks), CHUNK_BYTES // (num_words * WORD_BYTES)))
    pages = np.zeros((at_once, num_words), np.uint64)
    shifted = np.empty_like(pages)
    ragged = np.empty((at_once, page_bytes), np.uint8) if page_bytes % WORD_BYTES else None
    by = factors(num_words).view(np.uint64)
    for layer, row in zip(map(_widest, layers), words, strict=True):
        for start in range(0, len(table), at_once):
            if cancelled():
                return words
            used = table[start : start + at_once]
            some, scratch = pages[: len(used)], shifted[: len(used)]
            gathered = some if ragged is None else ragged[: len(used)]
            # mode: the default one copies through a buffer of its own.
            np.take(layer, used, axis=0, out=gathered.view(layer.dtype).reshape(-1, *layer.shape[1:]), mode="clip")
            if ragged is not None:
                some.view(np.uint8)[:, :page_bytes] = gathered
            np.right_shift(some, np.uint64(32), out=scratch)
            np.bitwise_xor(some, scratch, out=some)
            np.multiply(some, by, out=some)
            np.sum(some, axis=1, out=row[start : start + len(used)].view(np.uint64))
            if ragged is not None:
                some[:] = 0
    return words


def _widest(layer: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The same memory as words, if its axes allow it."""
    aligned = layer.ctypes.data % WORD_BYTES == 0 and all(step % WORD_BYTES == 0 for step in layer.strides[:-1])
    return layer.view(np.int64) if aligned and layer.shape[-1] % WORD_BYTES == 0 else layer
