"""The wire form of block tables: round trips, size, and what hostile bytes get."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpush.plan.block_table import decode_blocks, encode_blocks

pytestmark = pytest.mark.unit

LARGEST = 2**31 - 2


@st.composite
def stretches(draw: st.DrawFn) -> list[int]:
    """Tables as vLLM makes them: stretches that run up or down, with odd ones in between."""
    table: list[int] = []
    for first, count, up in draw(
        st.lists(st.tuples(st.integers(20, 5000), st.integers(1, 20), st.booleans()), max_size=12)
    ):
        table += [first + i if up else first - i for i in range(count)]
    return table


@given(st.one_of(stretches(), st.lists(st.integers(0, LARGEST)), st.lists(st.integers(0, 3))))
@example([1, 2, 3, 2, 1, 2])
@example([5, 6, 5, 6])
@example([7, 7, 7])
@example([0])
def test_round_trip(ids: list[int]) -> None:
    data = encode_blocks(ids)
    decoded = decode_blocks(data, LARGEST + 1)
    assert decoded.tolist() == ids
    assert decoded.dtype == np.int64
    assert len(data) <= 1 + 4 * len(ids)


@pytest.mark.parametrize("table", [range(3, 10_003), range(10_002, 2, -1)], ids=["ascending", "descending"])
def test_a_run_takes_nine_bytes_in_either_direction(table: range) -> None:
    data = encode_blocks(list(table))
    assert len(data) == 9
    assert decode_blocks(data, 10_003).tolist() == list(table)


def test_scattered_ids_take_four_bytes_each() -> None:
    ids = list(range(0, 2000, 2))
    assert len(encode_blocks(ids)) == 1 + 4 * len(ids)


def test_a_few_runs_beat_plain_ids() -> None:
    ids = [*range(100, 200), 7, *range(90, 50, -1), 300]
    assert len(encode_blocks(ids)) == 1 + 8 * 4


def test_arrays_encode_like_lists() -> None:
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        assert encode_blocks(np.array([4, 5, 6, 2], dtype)) == encode_blocks([4, 5, 6, 2])


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([0, -1], r"\[1\] is -1"),
        ([LARGEST + 1], r"\[0\] is 2147483647"),
        ([1.5], "not float64"),
        ([True], "not bool"),
        ([[1, 2]], "of 2 axes"),
        (["a"], "must be a list of ints"),
    ],
)
def test_what_is_no_block_id_is_refused(ids: list, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        encode_blocks(ids)


def runs(*pairs: tuple[int, int]) -> bytes:
    return b"\x01" + b"".join(struct.pack("<Ii", *pair) for pair in pairs)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no bytes"),
        (b"\x02", "unknown tag"),
        (b"\x00\x01", "1 bytes are no whole number of ids"),
        (b"\x01" + bytes(7), "7 bytes are no whole number of runs"),
        (b"\x00" + struct.pack("<I", 10), "entry 0 is 10, the cache has 10 blocks"),
        (b"\x00" + bytes(44), "11 blocks, the cache has 10"),
        (runs((0, 11)), "11 blocks, the cache has 10"),
        (runs((0, 5), (0, 6)), "11 blocks"),
        (runs((5, 6)), "entry 5 is 10"),
        (runs((3, -5)), "entry 4 is -1"),
        (runs((0, 0)), "run 0 is empty"),
        (runs((2, 1), (2**32 - 1, 1)), "entry 1 is 4294967295"),
        (runs((0, 2**31 - 1), (0, -(2**31))), "4294967295 blocks"),
    ],
)
def test_bytes_that_are_no_table_are_refused_by_what_is_wrong(data: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        decode_blocks(data, 10)


@given(st.binary(max_size=200), st.integers(1, 100))
def test_any_bytes_decode_to_a_valid_table_or_raise_value_error(data: bytes, num_blocks: int) -> None:
    try:
        ids = decode_blocks(data, num_blocks)
    except ValueError:
        return
    assert len(ids) <= num_blocks
    assert all(0 <= i < num_blocks for i in ids.tolist())
    assert decode_blocks(encode_blocks(ids), num_blocks).tolist() == ids.tolist()


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1)), max_size=30))
def test_runs_with_any_numbers_decode_as_written_or_raise(pairs: list[tuple[int, int]]) -> None:
    try:
        ids = decode_blocks(runs(*pairs), 1000)
    except ValueError:
        return
    expected = [first + (i if count > 0 else -i) for first, count in pairs for i in range(abs(count))]
    assert ids.tolist() == expected


def test_a_tiny_message_cannot_ask_for_much_memory() -> None:
    data = runs(*[(0, 2**31 - 1)] * 100)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="blocks, the cache has 50"):
            decode_blocks(data, 50)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
