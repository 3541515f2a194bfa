"""The cost model behind `auto`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.plan.paths import CPU_COSTS, GPU_COSTS, PathCosts

pytestmark = pytest.mark.unit
MODELS = st.sampled_from([GPU_COSTS, CPU_COSTS, PathCosts(1e-3, 1e-6, 1e9, 1e-3, 1e-4, 1e9)])


@given(MODELS, st.integers(1, 10**6), st.integers(1, 10**11))
def test_more_runs_cost_more(costs: PathCosts, runs: int, num_bytes: int) -> None:
    assert costs.direct(runs, num_bytes) < costs.direct(runs + 1, num_bytes)
    assert costs.direct(runs, num_bytes) >= num_bytes / costs.direct_bytes_per_s


@given(MODELS, st.integers(1, 10**11), st.integers(1, 1000), st.integers(0, 10**11))
def test_what_waits_in_front_costs_as_much_as_what_is_to_go(
    costs: PathCosts, num_bytes: int, parts: int, queued: int
) -> None:
    assert costs.staged(num_bytes, parts, queued) >= costs.staged(num_bytes, parts, 0)
    assert costs.staged(num_bytes, parts, queued) == pytest.approx(costs.staged(num_bytes + queued, parts, 0))


def test_on_gpus_long_runs_go_directly_and_many_short_ones_are_packed() -> None:
    """16,000 tokens of the 8B shape in 36 regions: one run each, as an aged pool leaves them, and page by page."""
    num_bytes, parts = 2_359_296_000, 37
    staged_s = GPU_COSTS.staged(num_bytes, parts, 0)
    assert GPU_COSTS.direct(36, num_bytes) < staged_s
    assert GPU_COSTS.direct(36_000, num_bytes) > staged_s


def test_processors_copy_anything_directly() -> None:
    assert CPU_COSTS.direct(36_000, 2_359_296_000) < CPU_COSTS.staged(2_359_296_000, 300, 0)
