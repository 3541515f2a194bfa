"""Statistics over requests."""

from __future__ import annotations

import numpy as np
import pytest
from bench_fakes import record
from hypothesis import given
from hypothesis import strategies as st

from kvpush.bench.record import SERVE_METRICS, figures, percentile, values_of

pytestmark = pytest.mark.unit


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_there_is_no_percentile_of_nothing_or_outside(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


def test_figures_are_taken_over_good_requests_only() -> None:
    records = [
        record(0, ttft_ms=20.0, handoff_ms=10.0, tpot_ms=1.0),
        record(1, ttft_ms=40.0, handoff_ms=30.0, tpot_ms=3.0),
        record(2, ttft_ms=9000.0, handoff_ms=8990.0, tpot_ms=900.0, error="decode: HTTP 500"),
    ]
    assert figures(records) == {
        "ttft_mean_ms": 30.0,
        "ttft_p99_ms": pytest.approx(39.8),
        "handoff_p50_ms": 20.0,
        "prefill_response_mean_ms": 10.0,
        "tpot_mean_ms": 2.0,
        "tpot_p99_ms": pytest.approx(2.98),
    }


def test_one_token_has_no_tpot_and_no_figure_of_it() -> None:
    got = figures([record(0, tpot_ms=None, itl_ms=[], tokens=1, osl=1)])
    assert "tpot_mean_ms" not in got
    assert got["ttft_mean_ms"] == 25.0


def test_without_good_requests_there_is_no_figure() -> None:
    assert figures([record(0, error="x")]) == {}
    assert figures([]) == {}


def test_every_metric_reads_a_field_that_exists() -> None:
    for field, _ in SERVE_METRICS.values():
        assert values_of([record()], field) != []


def test_lateness_is_arrival_against_schedule() -> None:
    assert record(0, scheduled_s=1.0, arrival_s=1.25).late_ms == pytest.approx(250)
