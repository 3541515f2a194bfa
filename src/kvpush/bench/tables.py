"""Block tables for raw transfers: contiguous, random, and out of two pools that have aged.

vLLM's block pool takes from the front of its free list and puts a request's blocks back at the end in reverse, so after
a while a new request gets pieces of old ones, running downwards.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpush.bench import plan

# Ages of the pools in `plan.tables`: its seed also says how many requests have gone through.
AGES = 20

Blocks = npt.NDArray[np.int64]


def _contiguous(n: int, num_blocks: int, rng: np.random.Generator) -> tuple[Blocks, Blocks]:
    first = rng.integers(0, num_blocks - n + 1, size=2)
    return np.arange(n, dtype=np.int64) + first[0], np.arange(n, dtype=np.int64) + first[1]


def _random(n: int, num_blocks: int, rng: np.random.Generator) -> tuple[Blocks, Blocks]:
    src, dst = (rng.permutation(num_blocks)[:n].astype(np.int64) for _ in range(2))
    return src, dst


def _aged(n: int, num_blocks: int, rng: np.random.Generator) -> tuple[Blocks, Blocks]:
    """From pools of the size that a GPU holds, whatever fits here: a small pool would age faster than a real one."""
    src, dst = plan.tables("aged", n, int(rng.integers(AGES)))
    return _fitted(src, num_blocks), _fitted(dst, num_blocks)


def _fitted(table: Blocks, num_blocks: int) -> Blocks:
    """The table with its blocks moved together into [0, num_blocks); neighbours stay so, and no others become it."""
    if table.max() < num_blocks:
        return table
    order = np.argsort(table)
    steps = np.minimum(np.diff(table[order]), 2)
    if steps.sum() >= num_blocks:
        raise ValueError(f"an aged table of {len(table)} blocks in pieces needs a pool of {steps.sum() + 1} blocks")
    fitted = np.empty_like(table)
    fitted[order] = np.concatenate([[0], np.cumsum(steps)])
    return fitted


TABLES: dict[str, Callable[[int, int, np.random.Generator], tuple[Blocks, Blocks]]] = {
    "contiguous": _contiguous,
    "aged": _aged,
    "random": _random,
}


def tables(kind: str, n: int, num_blocks: int, seed: int) -> tuple[Blocks, Blocks]:
    """(source's, target's) table of n blocks each out of pools of num_blocks. int64 [n], no block twice.

    Raises ValueError for an unknown kind or if the pool is too small.
    """
    if kind not in TABLES:
        raise ValueError(f"unknown block table {kind!r}; known: {', '.join(TABLES)}")
    if not 1 <= n <= num_blocks:
        raise ValueError(f"{n} blocks do not fit into a pool of {num_blocks}")
    return TABLES[kind](n, num_blocks, np.random.default_rng([seed, n, num_blocks]))
