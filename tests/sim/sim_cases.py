"""The simulator with the real scheduler half, and broken parts for it to find."""

from __future__ import annotations

from kvpush.sim.engine import EngineSpec
from kvpush.sim.request import BLOCK
from kvpush.sim.runs import Outcome, run_worlds
from kvpush.sim.step import Half
from kvpush.vllm.halves import SchedulerHalves


def make_half(spec: EngineSpec) -> Half:
    return SchedulerHalves(
        BLOCK,
        spec.recompute_below_tokens,
        prefix_caching=spec.prefix_caching,
        quarantine_max_blocks=spec.quarantine_max_blocks,
    )


def run_batch(first: int, count: int) -> Outcome:
    return run_worlds(range(first, first + count), make_half)


def broken_by(worlds: int, first: int = 0) -> str:
    """The rule that the first world breaks that breaks one; "" if none does."""
    outcome = run_worlds(range(first, first + worlds), make_half, stop_at_first=True)
    return next(iter(outcome.broken.values()), "")
