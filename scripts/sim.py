"""Runs simulated worlds (docs/simulator.md): `python scripts/sim.py --worlds 1000`, or `--seed 42` for the story of one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, os.environ.get("KVPUSH_SRC", str(Path(__file__).parents[1] / "src")))

from kvpush.sim.engine import EngineSpec
from kvpush.sim.request import BLOCK
from kvpush.sim.runs import Outcome, run_worlds, story
from kvpush.sim.scheduler import Half
from kvpush.vllm.halves import SchedulerHalves

BATCH = 100


def make_half(spec: EngineSpec) -> Half:
    """The real scheduler half."""
    return SchedulerHalves(BLOCK, spec.recompute_below_tokens, prefix_caching=spec.prefix_caching)


def run_batch(first: int, count: int) -> Outcome:
    return run_worlds(range(first, first + count), make_half)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="tell the story of this world")
    parser.add_argument("--lines", type=int, default=120, help="lines of the story")
    parser.add_argument("--worlds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        text = story(options.seed, make_half, options.lines)
        print(text)
        return 0 if text.endswith("every rule was kept") else 1
    start_s, total = time.monotonic(), Outcome()
    ends = options.first + options.worlds
    batches = [(first, min(BATCH, ends - first)) for first in range(options.first, ends, BATCH)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run_batch, *zip(*batches, strict=True)):
            total.num_worlds += outcome.num_worlds
            total.broken |= outcome.broken
            total.seen.update(outcome.seen)
    for name, count in sorted(total.seen.items()):
        print(f"{count:9d}  {name}")
    for seed, rule in list(total.broken.items())[:20]:
        print(f"world {seed}: {rule}")
    took_s = time.monotonic() - start_s
    print(f"{total.num_worlds} worlds in {took_s:.1f} s, {len(total.broken)} broke a rule")
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
