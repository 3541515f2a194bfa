"""Several measurements of one cell, and goodput."""

from __future__ import annotations

import pytest
from bench_fakes import cell, record, serve_raw

from kvpush.bench.raw import Slo
from kvpush.bench.repeats import Spread, cell_figures, complete_cells, spreads, unit_of

pytestmark = pytest.mark.unit


def test_the_median_of_repeats_and_how_far_they_lie_apart() -> None:
    cells = [cell([record(ttft_ms=value)], repeat=place) for place, value in enumerate((30.0, 10.0, 11.0))]
    assert spreads(cells, None)["ttft_mean_ms"] == Spread(11.0, 10.0, 30.0, 3)


def test_cells_are_grouped_and_cut_ones_left_out() -> None:
    raw = serve_raw(
        "vllm-push",
        [cell([record()], repeat=1), cell([record()], repeat=0), cell([record()], isl=9, complete=False, n=5)],
    )
    assert {key: [each.repeat for each in cells] for key, cells in complete_cells(raw).items()} == {
        ("fresh", 64, 2.0): [0, 1]
    }


def test_goodput_counts_what_was_answered_within_every_bound() -> None:
    requests = [
        record(0),
        record(1, ttft_ms=101.0),
        record(2, tpot_ms=5.1),
        record(3, error="boom", ttft_ms=1.0),
        record(4, tpot_ms=None, ttft_ms=100.0),
    ]
    found = cell_figures(cell(requests, wall_s=4.0), Slo(ttft_ms=100.0, tpot_ms=5.0))
    assert found["goodput_qps"] == 0.5
    assert found["slo_met_share"] == pytest.approx(0.4)
    assert cell_figures(cell(requests, wall_s=4.0), Slo(ttft_ms=100.0))["goodput_qps"] == 0.75
    assert "goodput_qps" not in cell_figures(cell(requests), None)
    assert Slo(ttft_ms=100.0, tpot_ms=5.0).text() == "TTFT at most 100 ms, TPOT at most 5 ms"


@pytest.mark.parametrize(("metric", "unit"), [("ttft_mean_ms", "ms"), ("goodput_qps", "1/s"), ("slo_met_share", "1")])
def test_a_metric_ends_in_its_unit(metric: str, unit: str) -> None:
    assert unit_of(metric) == unit
