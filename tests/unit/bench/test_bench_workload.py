"""Cells, arrival times and prompts."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.bench.workload import Cell, ageing, arrival_times, open_loop, parse_cells, warm_up

pytestmark = pytest.mark.unit


def test_cells_are_read() -> None:
    assert parse_cells("1024:8:60, 16000:0.9:18") == [Cell(1024, 8.0, 60), Cell(16000, 0.9, 18)]


@pytest.mark.parametrize(
    "text", ["", "1024", "1024:8", "1024:8:60:1", "a:8:60", "0:8:60", "9:0:60", "9:8:0", "9:-1:3", "9:inf:3", "9:nan:3"]
)
def test_a_malformed_cell_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"cell {text!r}"):
        parse_cells(text)


def test_one_point_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_cells("64:2:6,64:2:8")


@given(seed=st.integers(0, 2**31), isl=st.integers(1, 200), qps=st.floats(0.1, 100), n=st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_arrivals_ascend_from_zero(seed: int, isl: int, qps: float, n: int) -> None:
    times = arrival_times(seed, Cell(isl, qps, n))
    assert len(times) == n
    assert times[0] == 0.0
    assert times == sorted(times)


def test_gaps_are_exponential_with_the_asked_rate() -> None:
    times = arrival_times(3, Cell(64, 5.0, 4001))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # Mean and standard deviation of an exponential are equal; 4000 samples put both within a few per cent.
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.08)


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    cell = Cell(300, 4.0, 8)
    assert open_loop(1, cell, 16, 1000) == open_loop(1, cell, 16, 1000)
    other = open_loop(2, cell, 16, 1000)
    assert [r.prompt_json for r in other] != [r.prompt_json for r in open_loop(1, cell, 16, 1000)]
    assert [r.at_s for r in other] != [r.at_s for r in open_loop(1, cell, 16, 1000)]


def test_a_longer_cell_begins_like_a_shorter_one() -> None:
    assert open_loop(1, Cell(64, 4.0, 20), 16, 1000)[:8] == open_loop(1, Cell(64, 4.0, 8), 16, 1000)


@given(isl=st.integers(1, 300), vocabulary=st.integers(16, 200_000))
@settings(max_examples=40, deadline=None)
def test_prompts_have_the_asked_length_and_ordinary_tokens(isl: int, vocabulary: int) -> None:
    for planned in open_loop(1, Cell(isl, 1.0, 2), 16, vocabulary):
        tokens = json.loads(planned.prompt_json)
        assert len(tokens) == isl == planned.isl
        assert all(10 <= token < vocabulary for token in tokens)


def test_prompts_of_one_cell_differ() -> None:
    prompts = [planned.prompt_json for planned in open_loop(1, Cell(64, 1.0, 30), 16, 1000)]
    assert len(set(prompts)) == 30


def test_warm_up_follows_the_given_lengths() -> None:
    assert [(p.isl, p.osl) for p in warm_up(1, [512, 40], 8, 1000)] == [(512, 8), (40, 8)]


def test_ageing_mixes_lengths_that_fit() -> None:
    requests = ageing(1, 200, 1_000, 1000)
    assert len(requests) == 200
    assert {planned.isl for planned in requests} == {40, 100, 300, 700}
    assert {planned.osl for planned in requests} == {4, 16, 64}
    assert max(planned.isl + planned.osl for planned in requests) <= 1_000
    assert requests == ageing(1, 200, 1_000, 1000)


def test_ageing_needs_room() -> None:
    with pytest.raises(ValueError, match="fits into 20 tokens"):
        ageing(1, 5, 20, 1000)
