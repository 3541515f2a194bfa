"""Packing on a GPU against the naive twin: every layout, fresh random bytes, nothing else touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gpu_cases import needs_gpu, wait

from kvpush.transfer.packing.base import Packer, packed_block_bytes
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.factory import make_packer
from kvpush.transfer.packing.naive import naive_pack, naive_unpack
from packing_layouts import HND, LAYOUTS, MLA, NHD, Layout, geometry_of, memory_of, randomise

pytestmark = needs_gpu

DEVICE = 0
GUARD = 4096
Maker = Callable[[list[torch.Tensor], Sequence[StagingBuffer]], Packer]


def by_kernel(layers: list[torch.Tensor], buffers: Sequence[StagingBuffer]) -> Packer:
    from kvpush.transfer.packing.triton_packer import TritonPacker

    return TritonPacker(geometry_of(layers), layers, buffers)


def by_torch(layers: list[torch.Tensor], buffers: Sequence[StagingBuffer]) -> Packer:
    from kvpush.transfer.packing.torch_packer import TorchPacker

    stream = torch.cuda.Stream(torch.device("cuda", DEVICE))
    return TorchPacker(geometry_of(layers), layers, buffers, stream)


MAKERS = {"kernel": by_kernel, "torch": by_torch}


def cache(layout: Layout, blocks: int = 24, width: int = 64) -> list[torch.Tensor]:
    layers = layout.layers(3, blocks, 1 if "h" not in layout.order else 4, 16, width, torch.bfloat16, DEVICE)
    torch.cuda.synchronize()
    return layers


def table(rng: np.random.Generator, num_blocks: int, count: int) -> npt.NDArray[np.int64]:
    return rng.permutation(num_blocks)[:count].astype(np.int64)


def ids(*blocks: int) -> npt.NDArray[np.int64]:
    return np.array(blocks, dtype=np.int64)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_wide_contents_gets_the_kernel(layout: str) -> None:
    from kvpush.transfer.packing.triton_packer import TritonPacker

    layers = cache(LAYOUTS[layout])
    buffer = StagingBuffer(1 << 20, DEVICE)
    assert isinstance(make_packer(geometry_of(layers), layers, [buffer]), TritonPacker)


def test_odd_contents_are_packed_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    from kvpush.transfer.packing.torch_packer import TorchPacker

    layers = cache(HND, width=3)
    geometry = geometry_of(layers)
    buffer = StagingBuffer(2 * packed_block_bytes(geometry), DEVICE)
    packer = make_packer(geometry, layers, [buffer])
    assert isinstance(packer, TorchPacker)
    assert "multiples of" in caplog.text
    torch.cuda.synchronize()
    wait(packer.pack(ids(5, 1), buffer.address))
    wait(packer.unpack(buffer.address, ids(9, 2)))
    for layer in layers:
        assert torch.equal(layer[[5, 1]].view(torch.uint8), layer[[9, 2]].view(torch.uint8))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 7, 24])
def test_packed_bytes_and_nothing_else(layout: str, maker: str, count: int, rng: np.random.Generator) -> None:
    layers = cache(LAYOUTS[layout])
    geometry = geometry_of(layers)
    length = count * packed_block_bytes(geometry)
    buffer = StagingBuffer(length + 2 * GUARD, DEVICE)
    randomise(buffer.bytes)
    blocks = table(rng, geometry.num_blocks, count)
    expected = memory_of(layers, buffer)
    packer = MAKERS[maker](layers, [buffer])
    wait(packer.pack(blocks, buffer.address + GUARD))
    packed = naive_pack(geometry, expected, blocks.tolist())
    expected.at(buffer.address + GUARD, length)[:] = np.frombuffer(packed, dtype=np.uint8)
    assert memory_of(layers, buffer) == expected


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 7, 24])
def test_unpacked_blocks_and_nothing_else(layout: str, maker: str, count: int, rng: np.random.Generator) -> None:
    layers = cache(LAYOUTS[layout])
    geometry = geometry_of(layers)
    length = count * packed_block_bytes(geometry)
    buffer = StagingBuffer(length + 2 * GUARD, DEVICE)
    randomise(buffer.bytes)
    blocks = table(rng, geometry.num_blocks, count)
    expected = memory_of(layers, buffer)
    packer = MAKERS[maker](layers, [buffer])
    wait(packer.unpack(buffer.address + GUARD, blocks))
    naive_unpack(geometry, expected, blocks.tolist(), expected.at(buffer.address + GUARD, length).tobytes())
    assert memory_of(layers, buffer) == expected


@pytest.mark.parametrize(("by", "to"), [(HND, NHD), (NHD, HND), (MLA, MLA)], ids=["HND-NHD", "NHD-HND", "MLA"])
@pytest.mark.parametrize("num_programs", [1, 5, 32, 200])
def test_many_blocks_arrive_whole(by: Layout, to: Layout, num_programs: int, rng: np.random.Generator) -> None:
    """36 layers of 16 or 18 KiB pages: several rounds of every program."""
    heads, width = (1, 576) if by is MLA else (4, 128)
    source = by.layers(36, 150, heads, 16, width, torch.bfloat16, DEVICE)
    target = to.layers(36, 170, heads, 16, width, torch.bfloat16, DEVICE)
    buffer = StagingBuffer(100 * packed_block_bytes(geometry_of(source)), DEVICE)
    one = make_packer(geometry_of(source), source, [buffer], num_programs)
    other = make_packer(geometry_of(target), target, [buffer], num_programs)
    assert one.block_bytes == other.block_bytes
    left, arrived = table(rng, 150, 100), table(rng, 170, 100)
    rest = np.setdiff1d(np.arange(170), arrived)
    untouched = [layer[rest].clone() for layer in target]
    torch.cuda.synchronize()
    wait(one.pack(left, buffer.address))
    wait(other.unpack(buffer.address, arrived))
    for mine, theirs, before in zip(source, target, untouched, strict=True):
        assert torch.equal(mine[left].view(torch.int16), theirs[arrived].view(torch.int16))
        assert torch.equal(theirs[rest].view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_the_dtype_does_not_matter(dtype: torch.dtype, rng: np.random.Generator) -> None:
    layers = HND.layers(2, 20, 2, 16, 64, dtype, DEVICE)
    geometry = geometry_of(layers)
    buffer = StagingBuffer(9 * packed_block_bytes(geometry), DEVICE)
    blocks = table(rng, 20, 9)
    packer = by_kernel(layers, [buffer])
    wait(packer.pack(blocks, buffer.address))
    assert buffer.bytes.cpu().numpy().tobytes() == naive_pack(geometry, memory_of(layers), blocks.tolist())


def test_a_cache_that_was_made_for_inference_is_written(rng: np.random.Generator) -> None:
    with torch.inference_mode():
        layers = cache(HND)
    buffer = StagingBuffer(packed_block_bytes(geometry_of(layers)), DEVICE)
    torch.cuda.synchronize()
    for maker in MAKERS.values():
        packer = maker(layers, [buffer])
        wait(packer.pack(ids(3), buffer.address))
        wait(packer.unpack(buffer.address, ids(11)))
        assert all(torch.equal(layer[3].view(torch.int16), layer[11].view(torch.int16)) for layer in layers)


def sleeping(packer: Packer, seconds: float = 0.5) -> None:
    """Holds the packer's stream up."""
    stream = packer._stream.stream  # type: ignore[attr-defined]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles


def test_the_call_returns_and_the_event_passes_later() -> None:
    layers = cache(HND)
    buffer = StagingBuffer(packed_block_bytes(geometry_of(layers)), DEVICE)
    packer = by_kernel(layers, [buffer])
    sleeping(packer)
    start_s = time.monotonic()
    event = packer.pack(ids(3), buffer.address)
    assert not event.query()
    assert time.monotonic() - start_s < 0.2
    wait(event)


def test_block_ids_of_launches_that_wait_are_not_overwritten(rng: np.random.Generator) -> None:
    """Far more launches than there are places for ids, all behind something that holds the stream up."""
    layers = cache(HND, blocks=40)
    geometry = geometry_of(layers)
    size = packed_block_bytes(geometry)
    buffer = StagingBuffer(50 * 4 * size, DEVICE)
    packer = by_kernel(layers, [buffer])
    tables = [table(rng, 40, 4) for _ in range(50)]
    sleeping(packer)
    events = [packer.pack(blocks, buffer.address + i * 4 * size) for i, blocks in enumerate(tables)]
    assert not events[0].query(), "nothing held the stream up, so nothing was tested"
    for event in events:
        wait(event)
    expected = b"".join(naive_pack(geometry, memory_of(layers), blocks.tolist()) for blocks in tables)
    assert buffer.bytes.cpu().numpy().tobytes() == expected


def test_what_is_wrong_is_refused_and_nothing_moves() -> None:
    layers = cache(HND)
    geometry = geometry_of(layers)
    buffer = StagingBuffer(2 * packed_block_bytes(geometry), DEVICE)
    packer = by_kernel(layers, [buffer])
    before = memory_of(layers, buffer)
    start, end = buffer.address, buffer.address + buffer.num_bytes
    for blocks, address, complaint in (
        (ids(24), start, "holds 24"),
        (ids(-1), start, "holds -1"),
        (ids(1, 2), start + 16, "in no staging buffer"),
        (ids(1), start - 16, "in no staging buffer"),
        (ids(1), end, "in no staging buffer"),
        (ids(1), start + 8, "multiple of 16"),
    ):
        with pytest.raises(ValueError, match=complaint):
            packer.pack(blocks, address)
        with pytest.raises(ValueError, match=complaint):
            packer.unpack(address, blocks)
    with pytest.raises(ValueError, match="block 2 twice"):
        packer.unpack(start, ids(2, 2))
    torch.cuda.synchronize()
    assert memory_of(layers, buffer) == before
