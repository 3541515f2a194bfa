"""The affine map: what it refuses, what it derives from strides, and which ranges it registers."""

from __future__ import annotations

from itertools import pairwise, product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import ORDERS, SRC_ORIGIN, geometries, geometry_of

from kvpush.plan.geometry import MAX_BASES, CacheGeometry

pytestmark = pytest.mark.unit

GOOD = {
    "bases": (4096, 8192),
    "block_stride": 256,
    "head_stride": 64,
    "token_stride": 16,
    "content_bytes": 16,
    "num_blocks": 8,
    "num_heads": 4,
    "block_size": 4,
    "device": None,
}


def contents(geometry: CacheGeometry, base: int) -> list[int]:
    axes = (range(geometry.num_blocks), range(geometry.num_heads), range(geometry.block_size))
    return [geometry.address(base, *place) for place in product(*axes)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"content_bytes": 0}, "content_bytes is 0"),
        ({"content_bytes": 17}, "token_stride is 16, but what it steps over takes 17"),
        ({"token_stride": -16}, "token_stride is -16"),
        ({"token_stride": 8}, "token_stride is 8, but"),
        ({"head_stride": 0}, "head_stride is 0"),
        ({"head_stride": 63}, "head_stride is 63, but what it steps over takes 64"),
        ({"block_stride": 255}, "block_stride is 255, but what it steps over takes 256"),
        ({"block_stride": 2**70}, "block_stride is"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 2**31}, "num_blocks is"),
        ({"num_heads": -1}, "num_heads is -1"),
        ({"block_size": 4.0}, "block_size must be an int, not float"),
        ({"block_size": True}, "block_size must be an int, not bool"),
        ({"num_heads": np.int64(4)}, "num_heads must be an int, not int64"),
        ({"device": -1}, "device is -1"),
        ({"device": "cuda"}, "device must be an int, not str"),
        ({"bases": ()}, "bases must be a tuple of 1 to"),
        ({"bases": [4096]}, "bases must be a tuple"),
        ({"bases": tuple(range(4096, 4096 + 4096 * (MAX_BASES + 1), 4096))}, "bases must be a tuple of 1 to"),
        ({"bases": (0,)}, r"bases\[0\] is 0"),
        ({"bases": (4096, "x")}, r"bases\[1\] must be an int, not str"),
        ({"bases": (2**63 - 1000,)}, r"bases\[0\]: .* leaves the address space"),
        ({"bases": (4096, 4096)}, "bases: the contents of 0x1000 and 0x1000 overlap"),
        ({"bases": (4096, 4104)}, "bases: the contents of 0x1000 and 0x1008 overlap"),
        ({"bases": (4096, 4096 + 7 * 256)}, "bases: the contents of .* overlap"),
    ],
)
def test_an_impossible_geometry_is_refused_by_field(changes: dict, match: str) -> None:
    CacheGeometry(**GOOD)
    with pytest.raises(ValueError, match=match):
        CacheGeometry(**(GOOD | changes))


def test_the_wire_keeps_it_and_checks_it() -> None:
    good = CacheGeometry(**GOOD)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=CacheGeometry) == good
    assert hash(good) == hash(CacheGeometry(**GOOD))
    for changes in ({"block_stride": 1}, {"bases": [1, "2"]}, {"num_heads": None}, {"bases": [2**63]}):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD | changes), type=CacheGeometry)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_is_refused_exactly_if_two_contents_overlap(data: st.DataObject) -> None:
    """Bases anywhere near each other, against a count of every byte."""
    draw = data.draw
    shape = draw(geometries(layers=1, heads=draw(st.integers(1, 3)), content=draw(st.integers(1, 5)), origin=1000))
    reach = shape.extent_bytes + 4
    bases = tuple(1000 + x for x in draw(st.lists(st.integers(0, reach), min_size=1, max_size=3)))
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__} | {"bases": bases}
    seen: set[int] = set()
    overlap = False
    for base in bases:
        for address in contents(shape, 0):
            bytes_here = {address - 1000 + base + i for i in range(shape.content_bytes)}
            overlap |= bool(seen & bytes_here)
            seen |= bytes_here
    if overlap:
        with pytest.raises(ValueError, match="overlap"):
            CacheGeometry(**fields)
    else:
        CacheGeometry(**fields)


@settings(max_examples=100, deadline=None)
@given(geometries(layers=3, heads=2, content=3, origin=SRC_ORIGIN))
def test_every_content_lies_in_the_region_of_its_base_and_regions_are_apart(geometry: CacheGeometry) -> None:
    regions = geometry.regions()
    assert list(regions) == sorted(regions)
    for (a, length), (b, _) in pairwise(regions):
        assert a + length <= b
    for i, region in enumerate(geometry.region_of_bases()):
        start, length = regions[region]
        for address in contents(geometry, i):
            assert start <= address
            assert address + geometry.content_bytes <= start + length


@settings(max_examples=100, deadline=None)
@given(geometries(layers=2, heads=2, content=3, origin=SRC_ORIGIN))
def test_extent_reaches_from_the_first_to_the_last_byte(geometry: CacheGeometry) -> None:
    found = contents(geometry, 0)
    assert min(found) == geometry.bases[0]
    assert max(found) + geometry.content_bytes == geometry.bases[0] + geometry.extent_bytes
    assert geometry.token_bytes * geometry.num_tokens == 2 * len(found) * 3


def test_interleaved_layers_are_one_region_and_separate_layers_one_each() -> None:
    planar = geometry_of("NHD", layers=3, origin=4096)
    assert planar.regions() == tuple((base, planar.extent_bytes) for base in planar.bases)
    interleaved = geometry_of("NHD, layers in the block", layers=3, origin=4096)
    assert interleaved.regions() == ((4096, planar.extent_bytes * 3),)


def test_storages_are_deduplicated_and_must_hold_every_base() -> None:
    geometry = CacheGeometry(**GOOD)
    assert geometry.extent_bytes == 2048
    assert geometry.regions([(4096, 8192)] * 2) == ((4096, 8192),)
    assert geometry.regions([(8192, 2048), (4096, 2048), (65536, 10)]) == ((4096, 2048), (8192, 2048))
    with pytest.raises(ValueError, match=r"none holds bases\[1\], 2048 bytes at 0x2000"):
        geometry.regions([(4096, 4096 + 2047)])
    with pytest.raises(ValueError, match="overlap the one at"):
        geometry.regions([(4096, 8192), (8192, 8192)])


def numpy_view(order: str, shape: tuple[int, int, int, int], layers: int, itemsize: int = 2) -> list[np.ndarray]:
    """One view per layer, logical [num_blocks, kv_heads, block_size, width], physically in the order given."""
    sizes = dict(zip(("block", "head", "token", "width"), shape, strict=True)) | {"base": layers}
    names = [*ORDERS[order][::-1], "width"]
    memory = np.zeros([sizes[name] for name in names], dtype=f"u{itemsize}")
    whole = memory.transpose([names.index(name) for name in ("base", "block", "head", "token", "width")])
    return [whole[layer] for layer in range(layers)]


@pytest.mark.parametrize("order", ORDERS)
def test_strides_of_a_real_array_give_the_addresses_that_the_array_has(order: str) -> None:
    views = numpy_view(order, (5, 3, 4, 6), layers=2)
    first = views[0]
    geometry = CacheGeometry.from_strides(
        [view.__array_interface__["data"][0] for view in views],
        first.shape,
        [stride // first.itemsize for stride in first.strides],
        first.itemsize,
        device=1,
    )
    assert (geometry.content_bytes, geometry.num_heads, geometry.device) == (12, 3, 1)
    for layer, view in enumerate(views):
        for block, head, token in product(range(5), range(3), range(4)):
            one = view[block, head, token]
            assert geometry.address(layer, block, head, token) == one.__array_interface__["data"][0]


def test_the_layout_that_vllm_has_on_the_cpu() -> None:
    layer = 4096 * 16384 * 2
    pointers = [2**30 + i * layer for i in range(8)]
    geometry = CacheGeometry.from_strides(pointers, (4096, 4, 32, 128), (16384, 4096, 128, 1), 2)
    assert geometry == CacheGeometry(tuple(pointers), 32768, 8192, 256, 256, 4096, 4, 32)
    assert geometry.regions([(2**30, 8 * layer)] * 8) == ((2**30, 8 * layer),)


def test_mla_has_one_head() -> None:
    geometry = CacheGeometry.from_strides([4096], (10, 16, 576), (16 * 576, 576, 1), 2)
    assert (geometry.num_heads, geometry.content_bytes, geometry.token_stride) == (1, 1152, 1152)


@pytest.mark.parametrize(
    ("shape", "strides", "match"),
    [
        ((10, 16), (16, 1), "has 2 axes"),
        ((2, 10, 2, 16, 8), (2560, 256, 128, 8, 1), "has 5 axes"),
        ((10, 2, 16, 8), (256, 128, 8), "differ in length"),
        ((10, 2, 16, 8), (256, 128, 8, 2), r"strides\[-1\] is 2"),
        ((10, 2, 16, 8), (256, 0, 8, 1), "head_stride is 0"),
        ((10, 2, 16, 8), (128, 128, 8, 1), "block_stride is"),
    ],
)
def test_strides_that_are_no_paged_cache_are_refused(shape: tuple, strides: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CacheGeometry.from_strides([4096], shape, strides, 2)
