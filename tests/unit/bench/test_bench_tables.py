"""Block tables for raw transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.bench import plan
from kvpush.bench.tables import AGES, TABLES, tables

pytestmark = pytest.mark.unit


def pieces(table: np.ndarray) -> int:
    """Number of stretches that run up by one."""
    return 1 + int((np.diff(table) != 1).sum())


def shared_pieces(src: np.ndarray, dst: np.ndarray) -> int:
    """Number of stretches that are contiguous at both sides once sorted by source."""
    order = np.argsort(src)
    return 1 + int(((np.diff(src[order]) != 1) | (np.diff(dst[order]) != 1)).sum())


@given(
    kind=st.sampled_from(["contiguous", "random"]),
    num_blocks=st.integers(1, 400),
    share=st.floats(0.01, 1),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_tables_name_blocks_of_the_pool_once(kind: str, num_blocks: int, share: float, seed: int) -> None:
    n = max(1, int(num_blocks * share))
    for table in tables(kind, n, num_blocks, seed):
        assert table.dtype == np.int64
        assert len(set(table.tolist())) == n == len(table)
        assert table.min() >= 0
        assert table.max() < num_blocks


@pytest.mark.parametrize("n", [1, 2, 64, 1000])
def test_an_aged_table_keeps_its_pieces_in_a_small_pool(n: int) -> None:
    for small, large in zip(tables("aged", n, 2 * n, 5), plan_tables(n), strict=True):
        assert small.min() >= 0
        assert small.max() < 2 * n
        assert len(set(small.tolist())) == n
        assert np.array_equal(np.argsort(small), np.argsort(large))
        assert np.array_equal(np.diff(small) == 1, np.diff(large) == 1)
        assert np.array_equal(np.diff(small) == -1, np.diff(large) == -1)


def plan_tables(n: int) -> tuple[np.ndarray, np.ndarray]:
    """What `tables("aged", n, 2 * n, 5)` starts from."""
    seed = int(np.random.default_rng([5, n, 2 * n]).integers(AGES))
    return plan.tables("aged", n, seed)


def test_an_aged_table_that_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a pool of"):
        tables("aged", 1000, 1001, 4)


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_the_same_seed_gives_the_same_tables(kind: str) -> None:
    first, again, other = (tables(kind, 50, 5000, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_kinds_differ_in_how_scattered_they_are() -> None:
    def scatter(kind: str) -> float:
        return float(np.mean([shared_pieces(*tables(kind, 1000, 43_000, seed)) for seed in range(8)]))

    assert [pieces(table) for table in tables("contiguous", 1000, 43_000, 1)] == [1, 1]
    assert scatter("contiguous") == 1
    assert 1 < scatter("aged") < 500
    assert scatter("random") > 990


def test_an_aged_table_runs_downwards_in_places() -> None:
    steps = np.concatenate([np.diff(table) for seed in range(8) for table in tables("aged", 1000, 43_000, seed)])
    assert (steps == -1).sum() > 100


@pytest.mark.parametrize(("kind", "n"), [("tidy", 3), ("random", 0), ("random", 11), ("aged", 11)])
def test_impossible_tables_are_refused(kind: str, n: int) -> None:
    with pytest.raises(ValueError, match="tidy" if kind == "tidy" else f"{n} blocks"):
        tables(kind, n, 10, 1)
