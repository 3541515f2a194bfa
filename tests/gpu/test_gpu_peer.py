"""One process stores into the cache of another. With one GPU both use it; with more, each sees its own alone."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from gpu_cases import needs_gpu, wait

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import PeerUnavailable
from kvpush.transfer.packing.naive import Memory, naive_pack, naive_unpack
from kvpush.transfer.packing.peer import PeerRegion, export_regions, open_peer, process_mappings
from kvpush.transport.base import Region
from packing_layouts import LAYOUTS, geometry_of, memory_of

pytestmark = needs_gpu

HERE = Path(__file__).parent
START_S = 120.0


class Other:
    """The other process. geometry, regions: what it exports; unavailable: why it could not."""

    def __init__(self, layout: str, num_blocks: int, **environment: str) -> None:
        paths = [str(HERE.parents[1] / "src"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        env.pop("PYTORCH_ALLOC_CONF", None)
        if torch.cuda.device_count() > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            env["CUDA_VISIBLE_DEVICES"] = visible[-1] if visible != [""] else str(torch.cuda.device_count() - 1)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_process.py"), layout, str(num_blocks)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**env, **environment},
        )  # fmt: skip
        # What it prints to stderr is shown by pytest; a read that never ends is ended by killing it.
        self._timer = threading.Timer(START_S, self._process.kill)
        self._timer.start()
        first = self._read()
        self.expandable = first["expandable"]
        self.unavailable = first.get("unavailable", "")
        if not self.unavailable:
            exported = base64.b64decode(first["exported"])
            self.geometry, self.regions = msgspec.msgpack.decode(exported, type=tuple[CacheGeometry, list[PeerRegion]])

    def memory(self, path: Path) -> Memory:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        self._read()
        with np.load(path) as arrays:
            return Memory((int(address), arrays[address]) for address in arrays.files)

    def end(self) -> None:
        self._timer.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)

    def _read(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other process has ended with {self._process.wait(20)}; its errors stand above"
        return json.loads(line)


@pytest.fixture
def others() -> Iterator[list[Other]]:
    started: list[Other] = []
    yield started
    for other in started:
        other.end()


def mine(layout: str, num_blocks: int = 30) -> list[torch.Tensor]:
    heads = 1 if "h" not in LAYOUTS[layout].order else 4
    return LAYOUTS[layout].layers(3, num_blocks, heads, 16, 64, torch.bfloat16, 0)


# In "heads outside" the distance between heads is that of all blocks, so both need the same number.
@pytest.mark.parametrize(("layout", "num_blocks"), [(name, 30 if name == "heads outside" else 43) for name in LAYOUTS])
def test_blocks_arrive_and_nothing_else(layout: str, num_blocks: int, others: list[Other], tmp_path: Path) -> None:
    layers = mine(layout)
    geometry = geometry_of(layers)
    other = Other(layout, num_blocks)
    others.append(other)
    assert not other.unavailable
    expected = other.memory(tmp_path / "before.npz")
    peer = open_peer(geometry, layers, other.geometry, other.regions)
    rng = np.random.default_rng()
    left, arrived = rng.permutation(30)[:17], rng.permutation(num_blocks)[:17]
    torch.cuda.synchronize()
    wait(peer.copy(left.astype(np.int64), arrived.astype(np.int64)))
    packed = naive_pack(geometry, memory_of(layers), left.tolist())
    naive_unpack(other.geometry, expected, arrived.tolist(), packed)
    assert other.memory(tmp_path / "after.npz") == expected
    for blocks, peer_blocks, complaint in (
        ([30], [0], "blocks holds 30"), ([0], [num_blocks], f"peer_blocks holds {num_blocks}"),
        ([0, 1], [2, 2], "peer_blocks holds block 2 twice"), ([0, 1], [2], "2 blocks cannot go to 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=complaint):
            peer.copy(np.array(blocks, dtype=np.int64), np.array(peer_blocks, dtype=np.int64))
    assert other.memory(tmp_path / "refused.npz") == expected
    peer.close()
    peer.close()
    assert len(process_mappings()) == 0


def test_a_cache_is_mapped_once_for_two_users_and_closing_waits(others: list[Other], tmp_path: Path) -> None:
    layers = mine("HND")
    other = Other("HND", 30)
    others.append(other)
    assert not other.unavailable
    one = open_peer(geometry_of(layers), layers, other.geometry, other.regions)
    mapped = len(process_mappings())
    two = open_peer(geometry_of(layers), layers, other.geometry, other.regions)
    assert len(process_mappings()) == mapped > 0
    one.close()
    assert len(process_mappings()) == mapped
    expected = other.memory(tmp_path / "before.npz")
    stream = two._stream.stream  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(0.5 * 1.5e9))
    blocks = np.arange(9, dtype=np.int64)
    event = two.copy(blocks, blocks + 7)
    assert not event.query(), "nothing held the copy up, so nothing was tested"
    two.close()
    assert event.query()
    assert len(process_mappings()) == 0
    packed = naive_pack(geometry_of(layers), memory_of(layers), blocks.tolist())
    naive_unpack(other.geometry, expected, (blocks + 7).tolist(), packed)
    assert other.memory(tmp_path / "after.npz") == expected


def test_closing_after_the_end_of_the_other_process_is_no_error(others: list[Other]) -> None:
    layers = mine("HND")
    other = Other("HND", 30)
    assert not other.unavailable
    peer = open_peer(geometry_of(layers), layers, other.geometry, other.regions)
    other.end()
    peer.close()
    assert len(process_mappings()) == 0
    assert float(torch.ones(4, device="cuda:0").sum()) == 4


def test_a_handle_that_is_none_is_a_reason_and_harms_nothing(others: list[Other]) -> None:
    layers = mine("HND")
    other = Other("HND", 30)
    others.append(other)
    assert not other.unavailable
    wrong = [msgspec.structs.replace(region, handle=bytes(64)) for region in other.regions]
    with pytest.raises(PeerUnavailable, match=r"cannot be mapped: cuIpcOpenMemHandle.*\(\d+\)"):
        open_peer(geometry_of(layers), layers, other.geometry, wrong)
    too_long = [msgspec.structs.replace(region, length_bytes=1 << 45) for region in other.regions]
    with pytest.raises(PeerUnavailable, match="of an allocation, which has"):
        open_peer(geometry_of(layers), layers, other.geometry, too_long)
    assert len(process_mappings()) == 0
    open_peer(geometry_of(layers), layers, other.geometry, other.regions).close()


def test_this_process_is_no_peer() -> None:
    layers = mine("HND")
    geometry = geometry_of(layers)
    regions = export_regions([Region(address, length, 0) for address, length in geometry.regions()])
    with pytest.raises(PeerUnavailable, match="this very process"):
        open_peer(geometry, layers, geometry, regions)


def test_expandable_segments_are_named_as_the_reason(others: list[Other]) -> None:
    setting = "expandable_segments:True"
    other = Other("HND", 30, PYTORCH_CUDA_ALLOC_CONF=setting)
    others.append(other)
    if not other.expandable:
        pytest.skip("torch has no expandable segments on this machine")
    assert "expandable segments" in other.unavailable
