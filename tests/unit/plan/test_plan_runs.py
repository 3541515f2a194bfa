"""`plan_runs` against its naive twin, by example at the corners, and what it refuses."""

from __future__ import annotations

import time
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from plan_cases import DST_ORIGIN, ORDERS, SRC_ORIGIN, Transfer, geometry_of, transfers

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.naive import byte_map, naive_moves, naive_runs
from kvpush.plan.runs import Runs, plan_runs

pytestmark = pytest.mark.unit


def triples(runs: Runs) -> list[tuple[int, int, int]]:
    return sorted(zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True))


@settings(max_examples=300, deadline=None)
@given(transfers())
def test_the_plan_moves_what_its_twin_moves_in_the_fewest_runs(case: Transfer) -> None:
    planned = plan_runs(*case.args)
    # Maximal runs are unique, so equality says: same bytes, none twice, and no two runs that could be one.
    assert triples(planned) == triples(naive_runs(*case.args))
    expected = {}
    for _, s, d in naive_moves(*case.args):
        expected |= {d + i: s + i for i in range(case.src.content_bytes)}
    assert byte_map(planned) == expected
    assert planned.num_bytes == len(expected)


@settings(max_examples=100, deadline=None)
@given(transfers())
def test_runs_copied_between_buffers_leave_the_target_with_the_content_of_the_source(case: Transfer) -> None:
    src, dst = case.src, case.dst
    reach = {c: max(c.bases) + c.extent_bytes for c in (src, dst)}
    source = np.random.default_rng(1).integers(1, 256, reach[src] - SRC_ORIGIN, dtype=np.uint8)
    target = np.zeros(reach[dst] - DST_ORIGIN, dtype=np.uint8)
    for s, d, length in triples(plan_runs(*case.args)):
        target[d - DST_ORIGIN : d - DST_ORIGIN + length] = source[s - SRC_ORIGIN : s - SRC_ORIGIN + length]
    written = 0
    for _, s, d in naive_moves(*case.args):
        n = src.content_bytes
        assert (target[d - DST_ORIGIN : d - DST_ORIGIN + n] == source[s - SRC_ORIGIN : s - SRC_ORIGIN + n]).all()
        written += n
    assert int((target != 0).sum()) == written


@settings(max_examples=100, deadline=None)
@given(transfers())
def test_runs_ascend_within_a_region(case: Transfer) -> None:
    runs = plan_runs(*case.args)
    regions = case.src.regions()
    for address, length in regions:
        inside = runs.src[(runs.src >= address) & (runs.src < address + length)].astype(np.int64)
        if len(set(case.dst.region_of_bases())) == 1:
            assert (np.diff(inside) > 0).all()


@pytest.mark.parametrize(("src_name", "dst_name"), list(product(ORDERS, ORDERS)))
@pytest.mark.parametrize("tokens", [(0, 32), (3, 30), (5, 6), (4, 8), (7, 7)])
def test_every_pair_of_layouts(src_name: str, dst_name: str, tokens: tuple[int, int]) -> None:
    args = (
        geometry_of(src_name, origin=SRC_ORIGIN),
        [6, 5, 4, 0, 1, 2, 3, 7],
        geometry_of(dst_name, origin=DST_ORIGIN),
        [5, 4, 3, 1, 2, 0, 7, 6],
        *tokens,
    )
    assert triples(plan_runs(*args)) == triples(naive_runs(*args))


@pytest.mark.parametrize("name", ["HND", "NHD"])
@pytest.mark.parametrize("table", [[2, 3, 4, 5], [5, 4, 3, 2]], ids=["ascending", "descending"])
def test_neighbouring_blocks_are_one_run_a_layer_in_either_direction(name: str, table: list[int]) -> None:
    src, dst = geometry_of(name, origin=SRC_ORIGIN), geometry_of(name, origin=DST_ORIGIN)
    runs = plan_runs(src, table, dst, table, 0, 16)
    block = 2 * 4 * 8
    assert triples(runs) == sorted(
        (s + 2 * block, d + 2 * block, 4 * block) for s, d in zip(src.bases, dst.bases, strict=True)
    )


def test_layers_interleaved_in_the_block_merge_into_one_run() -> None:
    src = geometry_of("HND, layers in the block", layers=3, origin=SRC_ORIGIN)
    dst = geometry_of("HND, layers in the block", layers=3, origin=DST_ORIGIN)
    runs = plan_runs(src, [3, 2], dst, [5, 4], 0, 8)
    block = 3 * 2 * 4 * 8
    assert triples(runs) == [(SRC_ORIGIN + 2 * block, DST_ORIGIN + 4 * block, 2 * block)]


def test_a_partly_used_block_is_one_slice_per_head_in_hnd_and_one_run_in_nhd() -> None:
    lengths = {}
    for name in ("HND", "NHD"):
        args = (
            geometry_of(name, layers=1, origin=SRC_ORIGIN),
            [3],
            geometry_of(name, layers=1, origin=DST_ORIGIN),
            [0],
        )
        lengths[name] = plan_runs(*args, 1, 3).length.tolist()
    assert lengths == {"HND": [16, 16], "NHD": [32]}


def test_layers_that_lie_side_by_side_are_not_joined() -> None:
    """They may be registered one by one, and no transport accepts a range over two registrations."""
    src, dst = geometry_of("HND", blocks=2, origin=SRC_ORIGIN), geometry_of("HND", blocks=2, origin=DST_ORIGIN)
    assert src.bases[0] + src.extent_bytes == src.bases[1]
    assert len(plan_runs(src, [0, 1], dst, [0, 1], 0, 8)) == 2


def test_a_run_never_leaves_its_region() -> None:
    src = geometry_of("HND, layers in the block", blocks=1, origin=SRC_ORIGIN)
    dst = geometry_of("HND, layers in the block", blocks=4, origin=DST_ORIGIN)
    assert len(src.regions()) == 2
    assert len(plan_runs(src, [0], dst, [1], 0, 4)) == 2


def test_mla_is_one_head() -> None:
    src = CacheGeometry.from_strides([4096], (6, 4, 9), (36, 9, 1), 2)
    dst = CacheGeometry.from_strides([65536], (6, 4, 9), (36, 9, 1), 2)
    runs = plan_runs(src, [4, 3], dst, [0, 5], 1, 8)
    assert triples(runs) == [(4096 + 3 * 72, 65536 + 5 * 72, 72), (4096 + 4 * 72 + 18, 65536 + 18, 54)]


def test_block_size_16_into_block_size_128_follows_the_larger_block() -> None:
    src = geometry_of("HND", layers=1, blocks=16, block_size=2, origin=SRC_ORIGIN)
    dst = geometry_of("HND", layers=1, blocks=2, block_size=16, origin=DST_ORIGIN)
    runs = plan_runs(src, list(range(8)), dst, [1], 0, 16)
    assert len(runs) == 16
    assert set(runs.length.tolist()) == {16}
    nhd = plan_runs(
        geometry_of("NHD", layers=1, blocks=16, block_size=2, origin=SRC_ORIGIN),
        list(range(8)),
        geometry_of("NHD", layers=1, blocks=2, block_size=16, origin=DST_ORIGIN),
        [1],
        0,
        16,
    )
    assert nhd.length.tolist() == [16 * 16]


def test_entries_outside_the_token_range_are_not_looked_at() -> None:
    src, dst = geometry_of("HND", origin=SRC_ORIGIN), geometry_of("HND", origin=DST_ORIGIN)
    inside = plan_runs(src, [-1, 5, 6, 10**9], dst, [999, 2, 3], 4, 12)
    assert triples(inside) == triples(plan_runs(src, [0, 5, 6], dst, [1, 2, 3], 4, 12))


def test_tables_may_be_arrays_of_any_int_type() -> None:
    src, dst = geometry_of("HND", origin=SRC_ORIGIN), geometry_of("HND", origin=DST_ORIGIN)
    expected = triples(plan_runs(src, [1, 7], dst, [2, 0], 0, 8))
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        planned = plan_runs(src, np.array([1, 7], dtype), dst, np.array([2, 0], dtype), 0, 8)
        assert triples(planned) == expected


def bad(match: str, **changes: object):
    return pytest.param(changes, match, id=match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        bad(r"src_blocks\[1\] is 8, the cache has 8 blocks", src_blocks=[0, 8]),
        bad(r"dst_blocks\[0\] is -1", dst_blocks=[-1, 0]),
        bad(r"src_blocks has 1 entries, 8 tokens in blocks of 4 need 2", src_blocks=[0]),
        bad(r"dst_blocks has 0 entries", dst_blocks=[]),
        bad(r"src_blocks names block 3 twice", src_blocks=[3, 3]),
        bad(r"dst_blocks names block 0 twice", dst_blocks=[0, 0]),
        bad(r"tokens \[9, 8\) are no range", first_token=9),
        bad(r"tokens \[-1, 8\) are no range", first_token=-1),
        bad(r"src_blocks must be a list of ints, not float64", src_blocks=[0.0, 1.0]),
        bad(r"dst_blocks must be a list of ints, not bool", dst_blocks=[True, False]),
        bad(r"source heads range\(1, 3\)", heads=(range(1, 3), range(2))),
        bad(r"target heads range\(0, 2, 2\)", heads=(range(1), range(0, 2, 2))),
        bad(r"not equally many", heads=(range(1), range(2))),
        bad(r"content_bytes differ: source 8, target 4", dst=geometry_of("HND", content=4, origin=DST_ORIGIN)),
        bad(r"number of bases differs: source 2, target 3", dst=geometry_of("HND", layers=3, origin=DST_ORIGIN)),
        bad(r"num_heads differ: source 2, target 4", dst=geometry_of("HND", heads=4, origin=DST_ORIGIN)),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, object], match: str) -> None:
    args: dict[str, object] = {
        "src": geometry_of("HND", origin=SRC_ORIGIN),
        "src_blocks": [0, 1],
        "dst": geometry_of("HND", origin=DST_ORIGIN),
        "dst_blocks": [0, 1],
        "first_token": 0,
        "end_token": 8,
    }
    plan_runs(**args)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=match):
        plan_runs(**(args | changes))  # type: ignore[arg-type]


def test_runs_check_their_arrays() -> None:
    two, three = np.zeros(2, np.uint64), np.zeros(3, np.uint64)
    with pytest.raises(ValueError, match="dst is uint64 of shape"):
        Runs(two, three, two)
    with pytest.raises(ValueError, match="length is int64"):
        Runs(two, two, np.zeros(2, np.int64))
    assert len(Runs.of()) == 0
    assert Runs.of().num_bytes == 0
    assert Runs.of((1, 2, 3), (4, 5, 6)).num_bytes == 9


def qwen_like(origin: int) -> CacheGeometry:
    """72 regions of 32 KiB pages: the raw-transfer shape of the measured baselines."""
    pages = 43_000
    return CacheGeometry(
        bases=tuple(origin + i * pages * 32768 for i in range(72)),
        block_stride=32768,
        head_stride=4096,
        token_stride=256,
        content_bytes=256,
        num_blocks=pages,
        num_heads=8,
        block_size=16,
    )


@pytest.mark.parametrize(("kind", "limit_s"), [("contiguous", 0.010), ("random", 0.040)])
def test_ten_thousand_blocks_in_72_regions_plan_in_time(kind: str, limit_s: float) -> None:
    src, dst = qwen_like(1 << 40), qwen_like(1 << 45)
    rng = np.random.default_rng(0)
    tables = [np.arange(10_000), np.arange(5_000, 15_000)]
    if kind == "random":
        tables = [rng.permutation(43_000)[:10_000] for _ in range(2)]
    took = []
    for _ in range(15):
        start = time.process_time()
        runs = plan_runs(src, tables[0], dst, tables[1], 0, 160_000)
        took.append(time.process_time() - start)
    assert len(runs) == (72 if kind == "contiguous" else 720_000)
    # Time of this process alone, and the least of it: the rest is what else the machine was busy with.
    assert min(took) < limit_s


def test_geometry_and_runs_survive_the_wire() -> None:
    geometry = geometry_of("NHD", origin=SRC_ORIGIN)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=CacheGeometry) == geometry
