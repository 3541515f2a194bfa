"""Runs simulated worlds (docs/simulator.md): many with `--worlds 1000`, or one, with its story, with `--seed 42`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, os.environ.get("KVPUSH_SRC", str(Path(__file__).parents[1] / "src")))

from kvpush.sim.engine import EngineSpec
from kvpush.sim.request import BLOCK
from kvpush.sim.runs import KEPT, Outcome, run_worlds, story
from kvpush.sim.step import Half
from kvpush.vllm.halves import SchedulerHalves

BATCH = 100


def make_half(spec: EngineSpec) -> Half:
    """The real scheduler half."""
    return SchedulerHalves(
        BLOCK,
        spec.recompute_below_tokens,
        prefix_caching=spec.prefix_caching,
        quarantine_max_blocks=spec.quarantine_max_blocks,
    )


def run_batch(first: int, count: int, stop: bool) -> Outcome:
    return run_worlds(range(first, first + count), make_half, stop_at_first=stop)


def run_many(first: int, count: int, jobs: int, *, stop: bool) -> Outcome:
    """Runs worlds over several processes, in order; with `stop` up to the first one that breaks a rule."""
    total, end = Outcome(), first + count
    batches = [(at, min(BATCH, end - at)) for at in range(first, end, BATCH)]
    with ProcessPoolExecutor(jobs) as pool:
        window = deque(pool.submit(run_batch, *batch, stop) for batch in batches[: 2 * jobs])
        left = deque(batches[2 * jobs :])
        while window:
            total.add(window.popleft().result())
            if stop and total.broken:
                pool.shutdown(cancel_futures=True)
                break
            if left:
                window.append(pool.submit(run_batch, *left.popleft(), stop))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="tell the story of this world")
    parser.add_argument("--lines", type=int, default=120, help="lines of the story")
    parser.add_argument("--worlds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--stop", action="store_true", help="stop at the first world that breaks a rule")
    options = parser.parse_args()
    if options.seed is not None:
        text = story(options.seed, make_half, options.lines)
        print(text)
        return 0 if text.endswith(KEPT) else 1
    start_s = time.monotonic()
    total = run_many(options.first, options.worlds, options.jobs, stop=options.stop)
    for name, number in sorted(total.seen.items()):
        print(f"{number:9d}  {name}")
    for seed, rule in list(total.broken.items())[:20]:
        print(f"world {seed}: {rule}")
    took_s = time.monotonic() - start_s
    print(f"{total.num_worlds} worlds in {took_s:.1f} s, {len(total.broken)} broke a rule")
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
