"""Block tables as engines come to have them: contiguous, random, and out of a pool that has aged.

vLLM's block pool takes from the front of its free list and puts a request's blocks back at the end in reverse, so after
a while a new request gets pieces of old ones, running downwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpush.bench.workload import AGEING_ISLS

Blocks = npt.NDArray[np.int64]

# How many requests each side holds at once while ageing: P frees after each transfer, D when it has decoded.
ALIVE_AT_PRODUCER = 4
ALIVE_AT_CONSUMER = 48
# How often every block has been handed out by then.
TURNOVERS = 3


class BlockPool:
    """vLLM's free list. Block 0 is its null block and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """The next n blocks. Raises ValueError if there are fewer."""
        if n > len(self._free):
            raise ValueError(f"{n} blocks asked, {len(self._free)} of the pool are free")
        return [self._free.popleft() for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        """Takes back the blocks of one request."""
        self._free.extend(reversed(blocks))


def _aged(n: int, num_blocks: int, block_size: int, alive_at_once: int, rng: np.random.Generator) -> Blocks:
    """A table of n blocks out of a pool through which mixed requests have gone, ending in random order."""
    pool = BlockPool(num_blocks)
    alive: list[list[int]] = []
    handed_out = 0
    while handed_out < TURNOVERS * num_blocks:
        need = min(-(-int(rng.choice(AGEING_ISLS)) // block_size), num_blocks - 1)
        while alive and (len(alive) >= alive_at_once or pool.num_free < need):
            pool.free(alive.pop(int(rng.integers(len(alive)))))
        alive.append(pool.allocate(need))
        handed_out += need
    while alive:
        pool.free(alive.pop(int(rng.integers(len(alive)))))
    return np.array(pool.allocate(n), dtype=np.int64)


def _contiguous(n: int, num_blocks: int, _block_size: int, rng: np.random.Generator) -> tuple[Blocks, Blocks]:
    first = rng.integers(1, num_blocks - n + 1, size=2)
    return np.arange(n, dtype=np.int64) + first[0], np.arange(n, dtype=np.int64) + first[1]


def _random(n: int, num_blocks: int, _block_size: int, rng: np.random.Generator) -> tuple[Blocks, Blocks]:
    src, dst = (rng.permutation(num_blocks - 1)[:n].astype(np.int64) + 1 for _ in range(2))
    return src, dst


def _aged_pair(n: int, num_blocks: int, block_size: int, rng: np.random.Generator) -> tuple[Blocks, Blocks]:
    return (
        _aged(n, num_blocks, block_size, ALIVE_AT_PRODUCER, rng),
        _aged(n, num_blocks, block_size, ALIVE_AT_CONSUMER, rng),
    )


TABLES: dict[str, Callable[[int, int, int, np.random.Generator], tuple[Blocks, Blocks]]] = {
    "contiguous": _contiguous,
    "aged": _aged_pair,
    "random": _random,
}


def tables(kind: str, n: int, num_blocks: int, block_size: int, seed: int) -> tuple[Blocks, Blocks]:
    """(source's, target's) table of n blocks each out of pools of num_blocks. int64 [n], no block twice, never block 0.

    Raises ValueError for an unknown kind or if the pool is too small.
    """
    if kind not in TABLES:
        raise ValueError(f"unknown block table {kind!r}; known: {', '.join(TABLES)}")
    if not 1 <= n < num_blocks:
        raise ValueError(f"{n} blocks do not fit into a pool of {num_blocks}, one of which is the null block")
    return TABLES[kind](n, num_blocks, block_size, np.random.default_rng([seed, n, num_blocks]))
