"""Pieces: from tokens to one write of whole blocks, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_world import BLOCK, LAYERS, SLOT, World, identity

from kvpush.plan.block_table import encode_blocks
from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.runs import Ints
from kvpush.protocol.actions import WritePiece
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.registration import Registration
from kvpush.transfer.writer import PieceLost, PieceRefused, PieceWriter, whole_blocks
from kvpush.transport.base import TransportError

pytestmark = [pytest.mark.unit, pytest.mark.paths("direct")]
KEY = SendKey(TransferId("t"), 0)


def _piece(first: int, end: int) -> WritePiece:
    return WritePiece(KEY, 1, 1, RequestId("r"), AgentName("D-0"), first, end)


def _post(
    writer: PieceWriter, piece: WritePiece, source: list[int], target: CacheGeometry, table: Ints, now_s: float
) -> None:
    writer.post(piece, writer.plan(piece, source, target, table), target, now_s)


def _registration(*groups: tuple[bytes, ...]) -> Registration:
    address = PeerAddress("D", 1000)
    return Registration(KEY, 1, identity("p", 8), 0, groups, 1, 1, AgentName("D-0"), address, 0.0)


@pytest.fixture
def world() -> World:
    world = World("P", "D")
    world.fabric.on_land = None
    world["P"].transport.connect(world["D"].transport.metadata())
    return world


@pytest.fixture
def writer(world: World) -> PieceWriter:
    return PieceWriter(world["P"].transport, world["P"].geometry)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 64))
def test_whole_blocks_cover_a_piece_and_no_block_more(first_block: int, length: int, block_size: int) -> None:
    first = first_block * block_size
    start, end = whole_blocks(first, first + length, block_size)
    assert start == first
    assert end % block_size == 0
    assert 0 <= end - (first + length) < block_size


@settings(deadline=None)
@given(st.integers(1, 1000), st.integers(2, 64))
def test_a_piece_does_not_begin_inside_a_block(first: int, block_size: int) -> None:
    if first % block_size:
        with pytest.raises(ValueError, match="block border"):
            whole_blocks(first, first + 1, block_size)


def test_a_piece_lands_in_whole_blocks_and_nowhere_else(world: World, writer: PieceWriter) -> None:
    p, d = world["P"], world["D"]
    p.memory[:] = np.random.default_rng(0).integers(1, 255, p.memory.shape, dtype=np.uint8)
    source, target = [9, 3, 4, 20], np.array([7, 8, 2, 30])
    _post(writer, _piece(BLOCK, 3 * BLOCK - 1), source, d.geometry, target, 1.0)
    assert len(writer) == 1
    landed = []
    while not landed:
        world.fabric.advance(world.now_s + 1e-4)
        landed = writer.poll(world.now_s + 1.0)
    [end] = landed
    assert (end.error, end.may_land, end.num_bytes) == ("", False, 2 * BLOCK * SLOT * LAYERS)
    assert end.took_s == pytest.approx(world.now_s)
    assert end.cost.num_runs >= 1
    assert len(writer) == 0
    assert writer.poll(5.0) == []
    expected = np.zeros_like(d.memory)
    expected[:, [8, 2]] = p.memory[:, [3, 4]]
    assert np.array_equal(d.memory, expected)
    assert p.transport.in_flight == 0


def test_tables_in_parts_are_joined(world: World, writer: PieceWriter) -> None:
    parts = (encode_blocks([1, 2]), encode_blocks([9, 8]))
    table = writer.target_blocks(_registration(parts), world["D"].geometry)
    assert table.tolist() == [1, 2, 9, 8]


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        (((b"\x00",), (b"\x00",)), "2 KV cache groups"),
        (((b"",),), "no bytes"),
        (((b"\x07",),), "unknown tag"),
        (((encode_blocks([31, 32]),),), "entry 1 is 32, the cache has 32 blocks"),
        (((encode_blocks(list(range(64))),),), "64 blocks, the cache has 32"),
    ],
)
def test_tables_that_are_none_of_the_target_are_refused(
    world: World, writer: PieceWriter, groups: tuple[tuple[bytes, ...], ...], complaint: str
) -> None:
    with pytest.raises(PieceRefused, match=complaint):
        writer.target_blocks(_registration(*groups), world["D"].geometry)


@pytest.mark.parametrize(
    ("first", "end", "source", "target", "complaint"),
    [
        (1, 8, [1, 2], [1, 2], "not at a block border"),
        (0, 12, [1, 2], [1, 2, 3], "src_blocks has 2 entries"),
        (0, 12, [1, 2, 3], [1, 2], "dst_blocks has 2 entries"),
        (0, 8, [1, 99], [1, 2], "src_blocks.*99"),
        (0, 8, [1, 2], [3, 3], "twice"),
        (0, 0, [1, 2], [3, 4], "at least one run"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    world: World, writer: PieceWriter, first: int, end: int, source: list[int], target: list[int], complaint: str
) -> None:
    with pytest.raises(PieceRefused, match=complaint):
        _post(writer, _piece(first, end), source, world["D"].geometry, np.array(target), 0.0)
    assert len(writer) == 0


def test_geometries_that_do_not_fit_are_refused(world: World, writer: PieceWriter) -> None:
    import msgspec

    theirs = world["D"].geometry
    for changes, complaint in (
        ({"block_size": 2}, "block sizes differ: 4 here, 2 there"),
        ({"bases": theirs.bases[:1]}, "bases"),
        ({"num_heads": 1}, "num_heads"),
        ({"content_bytes": 4}, "content_bytes"),
    ):
        target = msgspec.structs.replace(theirs, **changes)
        with pytest.raises(PieceRefused, match=complaint):
            _post(writer, _piece(0, 4), [1], target, np.array([1]), 0.0)


def test_what_the_transport_refuses_is_refused(world: World, writer: PieceWriter) -> None:
    world["P"].transport.disconnect("D-0")
    with pytest.raises(PieceRefused, match="not connected"):
        _post(writer, _piece(0, 4), [1], world["D"].geometry, np.array([1]), 0.0)


@pytest.mark.parametrize("may_land", [False, True])
def test_a_post_that_fails_says_whether_bytes_may_land(
    world: World, writer: PieceWriter, monkeypatch: pytest.MonkeyPatch, may_land: bool
) -> None:
    def write(*args: object) -> None:
        raise TransportError("broke", "D-0", may_land=may_land)

    monkeypatch.setattr(world["P"].transport, "write", write)
    with pytest.raises(PieceLost if may_land else PieceRefused, match="broke"):
        _post(writer, _piece(0, 4), [1], world["D"].geometry, np.array([1]), 0.0)


@pytest.mark.parametrize("may_land", [False, True])
def test_a_write_that_fails_ends_with_its_reason(world: World, writer: PieceWriter, may_land: bool) -> None:
    world["P"].transport.fail_next_write(may_land=may_land)
    _post(writer, _piece(0, 4), [1], world["D"].geometry, np.array([1]), 0.0)
    _post(writer, _piece(4, 8), [1, 2], world["D"].geometry, np.array([1, 2]), 0.0)
    world.fabric.advance(1.0)
    failed, landed = writer.poll(1.0)
    assert failed.error
    assert failed.may_land is may_land
    assert (landed.error, landed.may_land) == ("", False)
    assert len(writer) == 0


def test_every_handle_is_given_back(world: World, writer: PieceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[object] = []
    monkeypatch.setattr(world["P"].transport, "release", given_back.append)
    world["P"].transport.fail_next_write()
    for i in range(3):
        _post(writer, _piece(4 * i, 4 * i + 4), [1, 2, 3], world["D"].geometry, np.array([1, 2, 3]), 0.0)
    world.fabric.advance(1.0)
    assert len(writer.poll(1.0)) == len(given_back) == 3
