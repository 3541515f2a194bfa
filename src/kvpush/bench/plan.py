"""How long the planner takes: `python -m kvpush.bench.plan [--json PATH]`.

The cache is that of the raw transfers in the documentation: regions of 32 KiB pages, block size 16, 8 heads, HND.

contiguous: both tables ascend. descending: both run downwards, as a fresh pool hands blocks out the second time.
aged: two pools like vLLM's (taken from the front, given back in reverse) after many mixed requests, which P gives back
after the transfer and D when they end. random: both tables shuffled, the worst case.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.runs import Ints, plan_runs

POOL_BLOCKS = 43_000
BLOCK_SIZE = 16
PAGE_BYTES = 32 << 10
# An aged pool hands out ascending or descending stretches, depending on its age, so several ages are measured.
TABLES = 5
CASES = ("contiguous", "descending", "aged", "random")


class BlockPool:
    """The order in which vLLM's pool hands out blocks: from the front; a request's blocks go back in reverse."""

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(num_blocks))

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        return [self._free.popleft() for _ in range(count)]

    def give(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))


def aged_pools(random: Random, requests: int, most_blocks: int, alive: int) -> tuple[BlockPool, BlockPool]:
    """The pools of P and D after requests of mixed lengths; D decodes `alive` at a time, which end in any order."""
    producer, consumer = BlockPool(POOL_BLOCKS), BlockPool(POOL_BLOCKS)
    decoding: list[list[int]] = []
    for _ in range(requests):
        count = random.randint(1, most_blocks)
        if len(decoding) == alive:
            consumer.give(decoding.pop(random.randrange(alive)))
        prefilled = producer.take(count)
        decoding.append(consumer.take(count))
        producer.give(prefilled)
    for blocks in decoding:
        consumer.give(blocks)
    return producer, consumer


def tables(case: str, blocks: int, seed: int = 0) -> tuple[Ints, Ints]:
    """The block tables of source and target, int64 of shape [blocks] each. Raises ValueError for an unknown case."""
    if case == "contiguous":
        return np.arange(blocks), np.arange(blocks) + 17
    if case == "descending":
        return np.arange(blocks)[::-1], np.arange(blocks)[::-1] + 17
    if case == "random":
        rng = np.random.default_rng(seed)
        return rng.permutation(POOL_BLOCKS)[:blocks], rng.permutation(POOL_BLOCKS)[:blocks]
    if case == "aged":
        pools = aged_pools(Random(seed), requests=700 + 11 * seed, most_blocks=2000, alive=4)
        return np.array(pools[0].take(blocks)), np.array(pools[1].take(blocks))
    raise ValueError(f"unknown case {case!r}, known are {', '.join(CASES)}")


def runs_as_listed(src: Ints, dst: Ints) -> int:
    """Runs of one region if pairs are merged in the order of the tables, ascending neighbours only."""
    return 1 + int(((np.diff(src) != 1) | (np.diff(dst) != 1)).sum())


def measure(case: str, blocks: int, bases: int, repeats: int) -> dict[str, Any]:
    """One row: times in milliseconds, and the number of runs. Repeats go over several tables of the case in turn."""
    src, dst = _cache(bases, 1 << 40), _cache(bases, 1 << 45)
    pairs = [tables(case, blocks, seed) for seed in range(TABLES)]
    took_ms, runs = [], []
    for i in range(repeats):
        src_blocks, dst_blocks = pairs[i % TABLES]
        start_s = time.perf_counter()
        planned = plan_runs(src, src_blocks, dst, dst_blocks, 0, blocks * BLOCK_SIZE)
        took_ms.append((time.perf_counter() - start_s) * 1e3)
        runs.append(len(planned))
    return {
        "case": case,
        "blocks": blocks,
        "bases": bases,
        "ms": round(median(took_ms), 3),
        "best_ms": round(min(took_ms), 3),
        "repeats": repeats,
        "runs": int(median(runs[:TABLES])),
        "runs_per_base": int(median(runs[:TABLES])) // bases,
        "runs_per_base_as_listed": int(median(runs_as_listed(*pair) for pair in pairs)),
        "bytes": blocks * bases * PAGE_BYTES,
    }


def _cache(bases: int, origin: int) -> CacheGeometry:
    heads = 8
    content = PAGE_BYTES // heads // BLOCK_SIZE
    return CacheGeometry(
        bases=tuple(origin + i * POOL_BLOCKS * PAGE_BYTES for i in range(bases)),
        block_stride=PAGE_BYTES,
        head_stride=content * BLOCK_SIZE,
        token_stride=content,
        content_bytes=content,
        num_blocks=POOL_BLOCKS,
        num_heads=heads,
        block_size=BLOCK_SIZE,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvpush.bench.plan", description="Times the planner.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there")
    parser.add_argument("--blocks", type=int, default=10_000, help="entries of the block tables (default 10000)")
    parser.add_argument("--bases", type=int, default=72, help="layers times planes (default 72)")
    parser.add_argument("--repeats", type=int, default=21, help="at least 15 (default 21)")
    args = parser.parse_args(argv)
    if not 1 <= args.blocks <= POOL_BLOCKS - 17:
        parser.error(f"--blocks is {args.blocks}, must be 1 to {POOL_BLOCKS - 17}")
    if args.repeats < 15:
        parser.error(f"--repeats is {args.repeats}, must be at least 15")
    if not 1 <= args.bases <= 512:
        parser.error(f"--bases is {args.bases}, must be 1 to 512")
    print(f"{args.blocks} blocks, {args.bases} bases, median of {args.repeats}")
    print(f"{'case':<12}{'ms':>9}{'best':>9}{'runs':>10}{'per base':>10}{'as listed':>11}")
    rows = []
    for case in CASES:
        row = measure(case, args.blocks, args.bases, args.repeats)
        rows.append(row)
        print(
            f"{case:<12}{row['ms']:>9.2f}{row['best_ms']:>9.2f}{row['runs']:>10}"
            f"{row['runs_per_base']:>10}{row['runs_per_base_as_listed']:>11}"
        )
    if args.json is not None:
        result = {
            "what": "plan",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "kvpush.bench.plan", *(sys.argv[1:] if argv is None else argv)]),
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
