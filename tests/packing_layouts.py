"""Paged caches of any layout with random bytes, and copies of their memory. Shared by unit and GPU tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.naive import Memory


@dataclass(frozen=True)
class Layout:
    """order: axes from the outermost to the innermost, of b(lock), l(ayer), h(ead), t(oken); without l every layer has
    a tensor of its own. gaps: elements left free behind one entry of the axis. Without h the cache is MLA's."""

    order: str
    gaps: tuple[tuple[str, int], ...] = ()
    start: int = 0

    def layers(
        self, num_layers: int, blocks: int, heads: int, tokens: int, width: int, dtype: torch.dtype, device: int | None
    ) -> list[torch.Tensor]:
        sizes = {"b": blocks, "l": num_layers, "h": heads, "t": tokens}
        gaps, step, steps = dict(self.gaps), width, {}
        for axis in reversed(self.order):
            step += gaps.get(axis, 0)
            steps[axis] = step
            step *= sizes[axis]
        logical = "bt" if "h" not in self.order else "bht"
        shape = [sizes[axis] for axis in logical] + [width]
        strides = [steps[axis] for axis in logical] + [1]
        target = torch.device("cpu") if device is None else torch.device("cuda", device)
        num_storages = 1 if "l" in self.order else num_layers
        raws = []
        for _ in range(num_storages):
            raw = torch.empty(self.start + step, dtype=dtype, device=target)
            randomise(raw)
            raws.append(raw)
        found = []
        for i in range(num_layers):
            raw, offset = (raws[0], i * steps["l"]) if "l" in self.order else (raws[i], 0)
            found.append(raw.as_strided(shape, strides, self.start + offset))
        return found


HND = Layout("bht")
NHD = Layout("bth")
MLA = Layout("bt")
ONE_STORAGE = Layout("lbht")
CROSS_LAYER = Layout("blht")
HEADS_OUTSIDE = Layout("hbt")
LAYOUTS = {
    "HND": HND, "NHD": NHD, "MLA": MLA, "one storage": ONE_STORAGE, "layers inside a block": CROSS_LAYER,
    "layers inside a head": Layout("bhlt"), "heads outside": HEADS_OUTSIDE,
    "gaps": Layout("bht", (("b", 64), ("t", 32))),
}  # fmt: skip


def randomise(tensor: torch.Tensor) -> None:
    """Fresh random bytes."""
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


def geometry_of(layers: Sequence[torch.Tensor]) -> CacheGeometry:
    first = layers[0]
    return CacheGeometry.from_strides(
        [layer.data_ptr() for layer in layers], first.shape, first.stride(), first.element_size(),
        first.device.index if first.is_cuda else None,
    )  # fmt: skip


def memory_of(layers: Sequence[torch.Tensor], *buffers: StagingBuffer) -> Memory:
    """A copy of everything that these tensors share memory with."""
    ranges = {}
    for tensor in [*layers, *(buffer.bytes for buffer in buffers)]:
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        ranges[storage.data_ptr()] = whole
    return Memory((address, whole.cpu().numpy().copy()) for address, whole in ranges.items())
