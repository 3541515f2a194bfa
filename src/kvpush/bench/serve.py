"""The serving benchmark: the same requests at the same times through one engine pair per connector.

    kvpush bench serve --preset cpu --out bench/results/raw
    kvpush bench serve --shape 0.6b --connectors vllm-push,kvpush-push --pools fresh,aged \\
        --cells 1024:8:60,4096:8:60 --repeats 3 --out bench/results/raw

Exit status: 0 all measured without an error; 1 something could not be measured, failed or was stopped by the time
limit; 2 wrong arguments. What was measured is written in every case, after each cell; `--resume` goes on from there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvpush.bench.engines import EngineError
from kvpush.bench.environment import environment
from kvpush.bench.handoffs import HandoffRecord, legs_table
from kvpush.bench.options import Plan, parse, plan
from kvpush.bench.pairrun import PairRun, give_up
from kvpush.bench.repeats import complete_cells
from kvpush.bench.session import TimeIsUp
from kvpush.bench.workload import Cell
from kvpush.launch.errors import LaunchError
from kvpush.launch.fleet import Fleet

# An engine pair needs about this long to come up; less time than this left is not worth a start.
LEAST_START_S = 30.0
ENDS = (EngineError, LaunchError, TimeIsUp)


def _check_time(asked: Plan) -> None:
    """Raises TimeIsUp if no engines can come up any more."""
    if asked.deadline_s - time.monotonic() < (0.0 if asked.attached is not None else LEAST_START_S):
        raise TimeIsUp


def measure_by_runs(asked: Plan, runs: Sequence[PairRun]) -> None:
    """One connector's engines at a time: all its cells of a repeat, then the next connector's, then the next repeat."""
    for repeat in range(asked.repeats):
        for run in runs:
            todo = [each for each in run.missing() if each[1] == repeat]
            if not todo or run.raw.problem is not None:
                continue
            try:
                _check_time(asked)
                with Fleet(run.log_dir) as fleet:
                    run.start(fleet)
                    for pool, _, cell in todo:
                        run.measure(pool, repeat, cell)
            except ENDS as error:
                give_up(run, error)
            finally:
                run.stop()
                print(f"{run.connector.name}: {run.save()}", flush=True)


def measure_by_cells(asked: Plan, runs: Sequence[PairRun]) -> None:
    """All engines at once; the connectors take turns cell by cell, and another one begins each time."""
    with ExitStack() as stack:
        try:
            for run in runs:
                if run.missing():
                    _start(asked, run, stack)
            for turn, (pool, repeat, cell) in enumerate(asked.wanted()):
                for run in (*runs[turn % len(runs) :], *runs[: turn % len(runs)]):
                    if run.running and (pool, repeat, cell) in run.missing():
                        _measure(run, pool, repeat, cell)
        finally:
            for run in runs:
                run.stop()
                print(f"{run.connector.name}: {run.save()}", flush=True)


def _start(asked: Plan, run: PairRun, stack: ExitStack) -> None:
    try:
        _check_time(asked)
        run.start(stack.enter_context(Fleet(run.log_dir)))
    except ENDS as error:
        give_up(run, error)


def _measure(run: PairRun, pool: str, repeat: int, cell: Cell) -> None:
    try:
        run.measure(pool, repeat, cell)
    except ENDS as error:
        give_up(run, error)
        run.stop()


def breakdown(runs: Sequence[PairRun]) -> str:
    """The legs of the hand-off by connector and cell, over all repeats; empty if nobody has told them."""
    rows: dict[str, list[HandoffRecord]] = {}
    for run in runs:
        for (pool, isl, qps), cells in complete_cells(run.raw).items():
            rows[f"{run.connector.name} {pool}/{isl}/{qps:g}"] = [each for cell in cells for each in cell.handoffs]
    table = legs_table(rows)
    return f"hand-off, from the end of P's last kernel to the client's first token\n{table}" if table else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    began_s = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpush-bench-")))
        try:
            asked = plan(parse(argv), scratch, began_s)
            facts = environment()
            runs = [PairRun(asked, connector, facts) for connector in asked.connectors]
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        (measure_by_cells if asked.interleave == "cells" else measure_by_runs)(asked, runs)
        print(breakdown(runs), flush=True)
        return 0 if all(run.good and not run.missing() for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
