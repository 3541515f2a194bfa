"""Packing on the CPU against its naive twin: any layout, fresh random bytes, nothing else touched."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.transfer.packing.base import PackingError, packed_block_bytes
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.factory import make_packer
from kvpush.transfer.packing.host_packer import HostPacker
from kvpush.transfer.packing.naive import naive_pack, naive_unpack
from kvpush.transfer.packing.torch_packer import TorchPacker
from kvpush.transfer.sources import PASSED
from packing_layouts import HND, LAYOUTS, NHD, Layout, geometry_of, memory_of, randomise

pytestmark = pytest.mark.unit

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8]

PACKERS = [HostPacker, TorchPacker]  # the second is for GPUs, but knows no difference


def ids(*blocks: int) -> npt.NDArray[np.int64]:
    return np.array(blocks, dtype=np.int64)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    axes = draw(st.sampled_from(["bht", "lbht", "bt", "lbt"]))
    order = "".join(draw(st.permutations(list(axes))))
    gaps = draw(st.lists(st.tuples(st.sampled_from(order), st.sampled_from([1, 3, 8])), max_size=2))
    return Layout(order, tuple(gaps), draw(st.sampled_from([0, 0, 1, 8])))


@st.composite
def caches(draw: st.DrawFn) -> list[torch.Tensor]:
    sizes = [draw(st.integers(1, most)) for most in (3, 6, 3, 4)]
    width = draw(st.sampled_from([1, 2, 3, 8, 16]))
    return draw(layouts()).layers(*sizes, width, draw(st.sampled_from(DTYPES)), None)


@settings(max_examples=60, deadline=None)
@given(caches(), st.data())
def test_packed_bytes_are_those_of_the_naive_twin(layers: list[torch.Tensor], data: st.DataObject) -> None:
    geometry = geometry_of(layers)
    blocks = data.draw(st.lists(st.integers(0, geometry.num_blocks - 1), max_size=8))
    margin = data.draw(st.sampled_from([0, 1, 16]))
    length = len(blocks) * packed_block_bytes(geometry)
    buffer = StagingBuffer(length + margin + 40)
    randomise(buffer.bytes)
    before = memory_of(layers, buffer)
    packer = data.draw(st.sampled_from(PACKERS))(geometry, layers, [buffer])
    assert packer.pack(ids(*blocks), buffer.address + margin) is PASSED
    before.at(buffer.address + margin, length)[:] = np.frombuffer(naive_pack(geometry, before, blocks), dtype=np.uint8)
    assert memory_of(layers, buffer) == before


@settings(max_examples=60, deadline=None)
@given(caches(), st.data())
def test_unpacked_blocks_are_those_of_the_naive_twin(layers: list[torch.Tensor], data: st.DataObject) -> None:
    geometry = geometry_of(layers)
    blocks = data.draw(st.lists(st.integers(0, geometry.num_blocks - 1), unique=True))
    margin = data.draw(st.sampled_from([0, 1, 16]))
    length = len(blocks) * packed_block_bytes(geometry)
    buffer = StagingBuffer(length + margin + 40)
    randomise(buffer.bytes)
    before = memory_of(layers, buffer)
    packer = data.draw(st.sampled_from(PACKERS))(geometry, layers, [buffer])
    assert packer.unpack(buffer.address + margin, ids(*blocks)) is PASSED
    naive_unpack(geometry, before, blocks, before.at(buffer.address + margin, length).tobytes())
    assert memory_of(layers, buffer) == before


@pytest.mark.parametrize(("by", "to"), [(by, to) for by in LAYOUTS for to in LAYOUTS if (by == "MLA") == (to == "MLA")])
def test_a_block_survives_the_way_into_another_layout(by: str, to: str) -> None:
    heads = 1 if by == "MLA" else 2
    source = LAYOUTS[by].layers(3, 9, heads, 4, 8, torch.bfloat16, None)
    target = LAYOUTS[to].layers(3, 7, heads, 4, 8, torch.bfloat16, None)
    buffer = StagingBuffer(4 * packed_block_bytes(geometry_of(source)))
    one = make_packer(geometry_of(source), source, [buffer])
    other = make_packer(geometry_of(target), target, [buffer])
    assert one.block_bytes == other.block_bytes == 3 * heads * 4 * 8 * 2
    one.pack(ids(8, 0, 3, 5), buffer.address)
    other.unpack(buffer.address, ids(2, 6, 1, 4))
    for mine, theirs in zip(source, target, strict=True):
        assert torch.equal(mine.view(torch.int16)[[8, 0, 3, 5]], theirs.view(torch.int16)[[2, 6, 1, 4]])


def test_caches_made_for_inference_are_written() -> None:
    with torch.inference_mode():
        layers = HND.layers(2, 4, 1, 2, 8, torch.bfloat16, None)
    geometry = geometry_of(layers)
    buffer = StagingBuffer(packed_block_bytes(geometry))
    packer = make_packer(geometry, layers, [buffer])
    packer.pack(ids(1), buffer.address)
    packer.unpack(buffer.address, ids(3))
    assert all(torch.equal(layer[1].view(torch.int16), layer[3].view(torch.int16)) for layer in layers)


def test_block_ids_that_may_not_be_written_are_read() -> None:
    layers = HND.layers(1, 4, 1, 2, 8, torch.bfloat16, None)
    buffer = StagingBuffer(packed_block_bytes(geometry_of(layers)))
    blocks = ids(2)
    blocks.setflags(write=False)
    make_packer(geometry_of(layers), layers, [buffer]).pack(blocks, buffer.address)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        (ids(-1), "blocks holds -1, the cache has blocks 0 to 5"),
        (ids(0, 6, 1), "blocks holds 6"),
        (np.array([1], dtype=np.int32), "int64"),
        (np.array([[1]], dtype=np.int64), "one-dimensional"),
        ([1], "array"),
    ],
)
def test_bad_blocks_are_refused_and_nothing_moves(blocks: npt.NDArray[np.int64], complaint: str) -> None:
    layers = NHD.layers(2, 6, 2, 4, 8, torch.bfloat16, None)
    buffer = StagingBuffer(3 * packed_block_bytes(geometry_of(layers)))
    packer = make_packer(geometry_of(layers), layers, [buffer])
    before = memory_of(layers, buffer)
    with pytest.raises(ValueError, match=complaint):
        packer.pack(blocks, buffer.address)
    with pytest.raises(ValueError, match=complaint):
        packer.unpack(buffer.address, blocks)
    assert memory_of(layers, buffer) == before


def test_a_block_may_leave_twice_but_not_arrive_twice() -> None:
    layers = HND.layers(1, 6, 1, 2, 8, torch.bfloat16, None)
    geometry = geometry_of(layers)
    buffer = StagingBuffer(3 * packed_block_bytes(geometry))
    packer = make_packer(geometry, layers, [buffer])
    packer.unpack(buffer.address, ids(3, 1))  # what an earlier list held is no repetition
    packer.pack(ids(3, 1, 3), buffer.address)
    with pytest.raises(ValueError, match="blocks holds block 3 twice"):
        packer.unpack(buffer.address, ids(3, 1, 3))


@pytest.mark.parametrize("shift", [-1, 1, 1 << 40, -(1 << 40)])
def test_bytes_outside_of_the_buffer_are_refused(shift: int) -> None:
    layers = HND.layers(1, 6, 1, 2, 8, torch.bfloat16, None)
    geometry = geometry_of(layers)
    buffer = StagingBuffer(2 * packed_block_bytes(geometry))
    packer = make_packer(geometry, layers, [buffer, StagingBuffer(1)])
    for call in (lambda: packer.pack(ids(1, 2), buffer.address + shift),
                 lambda: packer.unpack(buffer.address + shift, ids(1, 2))):  # fmt: skip
        with pytest.raises(ValueError, match="lie in no staging buffer"):
            call()


def test_host_memory_is_packed_without_the_threads_that_the_engine_computes_with() -> None:
    layers = HND.layers(2, 6, 1, 2, 8, torch.bfloat16, None)
    assert isinstance(make_packer(geometry_of(layers), layers, []), HostPacker)


@pytest.mark.parametrize("kind", PACKERS)
def test_parts_that_do_not_belong_together_are_refused(kind: type[HostPacker] | type[TorchPacker]) -> None:
    layers = HND.layers(2, 6, 1, 2, 8, torch.bfloat16, None)
    geometry = geometry_of(layers)
    with pytest.raises(ValueError, match="not the 2 bases"):
        kind(geometry, layers[:1], [])
    with pytest.raises(ValueError, match="not the 2 bases"):
        kind(geometry, layers[::-1], [])


@pytest.mark.parametrize(("num_bytes", "device"), [(1 << 60, None), (16, 900)])
def test_memory_that_cannot_be_had_says_so(num_bytes: int, device: int | None) -> None:
    with pytest.raises(PackingError, match=f"no staging buffer: {num_bytes} bytes of .*cannot be had"):
        StagingBuffer(num_bytes, device)


def test_the_interpreter_lock_is_free_while_bytes_move() -> None:
    layers = HND.layers(8, 256, 4, 16, 512, torch.bfloat16, None)
    geometry = geometry_of(layers)
    blocks = np.random.default_rng(1).permutation(256).astype(np.int64)
    buffer = StagingBuffer(256 * packed_block_bytes(geometry))
    packer = make_packer(geometry, layers, [buffer])
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count, daemon=True)
    interval = sys.getswitchinterval()
    # A holder of the lock is asked for it only after this long, so turns in between are lock given freely.
    sys.setswitchinterval(5)
    thread.start()
    try:
        deadline_s = time.monotonic() + 30
        for call in (lambda: packer.pack(blocks, buffer.address), lambda: packer.unpack(buffer.address, blocks)):
            before = turns[0]
            while turns[0] == before:
                assert time.monotonic() < deadline_s, "no other thread ran while bytes moved"
                call()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(30)
