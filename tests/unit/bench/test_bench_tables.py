"""Block tables for raw transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.bench.tables import TABLES, BlockPool, tables

pytestmark = pytest.mark.unit


def pieces(table: np.ndarray) -> int:
    """Number of stretches that run up by one."""
    return 1 + int((np.diff(table) != 1).sum())


@given(
    kind=st.sampled_from(sorted(TABLES)),
    num_blocks=st.integers(2, 400),
    share=st.floats(0.01, 1),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_tables_name_blocks_of_the_pool_once(kind: str, num_blocks: int, share: float, seed: int) -> None:
    n = max(1, int((num_blocks - 1) * share))
    for table in tables(kind, n, num_blocks, 16, seed):
        assert table.dtype == np.int64
        assert len(set(table.tolist())) == n == len(table)
        assert table.min() >= 1
        assert table.max() < num_blocks


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_the_same_seed_gives_the_same_tables(kind: str) -> None:
    first, again, other = (tables(kind, 50, 5000, 16, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_kinds_differ_in_how_scattered_they_are() -> None:
    contiguous, aged, random = (tables(kind, 1000, 43_000, 16, 1) for kind in ("contiguous", "aged", "random"))
    assert [pieces(table) for table in contiguous] == [1, 1]
    for table in random:
        assert pieces(table) > 950
    for table in aged:
        # Freed in reverse, an old request's blocks run downwards, which is still a stretch once sorted.
        assert 1 < pieces(np.sort(table)) < 200
    assert not np.array_equal(aged[0], aged[1])


def test_a_pool_takes_from_the_front_and_returns_reversed_to_the_end() -> None:
    pool = BlockPool(6)
    first = pool.allocate(3)
    assert first == [1, 2, 3]
    pool.free(first)
    assert pool.allocate(5) == [4, 5, 3, 2, 1]
    with pytest.raises(ValueError, match="1 blocks asked, 0 of the pool are free"):
        pool.allocate(1)


@pytest.mark.parametrize(("kind", "n"), [("tidy", 3), ("random", 0), ("random", 10), ("aged", 11)])
def test_impossible_tables_are_refused(kind: str, n: int) -> None:
    with pytest.raises(ValueError, match="tidy" if kind == "tidy" else f"{n} blocks"):
        tables(kind, n, 10, 16, 1)
