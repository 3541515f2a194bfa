"""The paged cache of a worker: its map, its memory and its bytes, from real tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpush.vllm.cache import PagedCache
from kvpush.vllm.identity import UnsupportedModel

pytestmark = pytest.mark.unit

LAYERS, BLOCKS, HEADS, BLOCK, WIDTH = 3, 10, 2, 4, 6


def _config(block_size: int = BLOCK, names: list[str] | None = None) -> Any:
    names = [f"layer{i}" for i in range(LAYERS)] if names is None else names
    spec = SimpleNamespace(block_size=block_size)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names)])


def _named(layers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"layer{i}": layer for i, layer in enumerate(layers)}


def _hnd(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, HEADS, BLOCK, WIDTH, dtype=dtype) for _ in range(LAYERS)]


def _nhd(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, BLOCK, HEADS, WIDTH, dtype=dtype).transpose(1, 2) for _ in range(LAYERS)]


def _one_storage(dtype: torch.dtype) -> list[torch.Tensor]:
    return list(torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, WIDTH, dtype=dtype))


def _interleaved(dtype: torch.dtype) -> list[torch.Tensor]:
    """All layers of a block side by side."""
    whole = torch.zeros(BLOCKS, LAYERS, HEADS, BLOCK, WIDTH, dtype=dtype)
    return [whole[:, layer] for layer in range(LAYERS)]


def _mla(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, BLOCK, WIDTH, dtype=dtype) for _ in range(LAYERS)]


LAYOUTS = {"HND": _hnd, "NHD": _nhd, "one storage": _one_storage, "interleaved": _interleaved, "MLA": _mla}


def _fill(layers: list[torch.Tensor]) -> None:
    """Other bytes in every place, none of them zero."""
    torch.manual_seed(0)
    for layer in layers:
        raw = layer.view(torch.uint8)
        raw.copy_(torch.randint(1, 255, raw.shape, dtype=torch.uint8))


def _at(address: int, length: int, storages: list[torch.Tensor]) -> bytes:
    """Bytes of this process at an address inside one of the storages."""
    for tensor in storages:
        storage = tensor.untyped_storage()
        start = address - storage.data_ptr()
        if start >= 0 and start + length <= storage.nbytes():
            return bytes(storage[start : start + length])
    raise AssertionError(f"{address:#x} lies in no storage")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_map_leads_to_every_content(layout: str, dtype: torch.dtype) -> None:
    layers = LAYOUTS[layout](dtype)
    _fill(layers)
    cache = PagedCache(_named(layers), _config())
    geometry = cache.geometry
    heads = 1 if layout == "MLA" else HEADS
    assert (len(geometry.bases), geometry.num_blocks, geometry.num_heads, geometry.block_size) == (
        LAYERS, BLOCKS, heads, BLOCK,
    )  # fmt: skip
    assert geometry.content_bytes == WIDTH * dtype.itemsize
    assert geometry.device is None
    for base, layer in enumerate(layers):
        view = layer.view(torch.uint8)
        for block in range(BLOCKS):
            for head in range(heads):
                for token in range(BLOCK):
                    place = (block, token) if layout == "MLA" else (block, head, token)
                    address = geometry.address(base, block, head, token)
                    assert _at(address, geometry.content_bytes, layers) == bytes(view[place].tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_registered_regions_are_the_storages_once_each(layout: str) -> None:
    layers = LAYOUTS[layout](torch.bfloat16)
    cache = PagedCache(_named(layers), _config())
    storages = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in layers}
    assert set(cache.regions) == storages
    assert len(cache.regions) == len(storages)
    assert len(storages) == (1 if layout in ("one storage", "interleaved") else LAYERS)


def test_layers_stand_in_the_order_of_the_group() -> None:
    layers = _hnd(torch.bfloat16)
    config = _config(names=["layer2", "layer0", "layer1"])
    cache = PagedCache(_named(layers), config)
    assert cache.geometry.bases == tuple(layers[i].data_ptr() for i in (2, 0, 1))


def test_layers_that_share_a_tensor_count_once() -> None:
    layers = _hnd(torch.bfloat16)
    layers[2] = layers[0]
    cache = PagedCache(_named(layers), _config())
    assert cache.geometry.bases == (layers[0].data_ptr(), layers[1].data_ptr())
    assert len(cache.hash_blocks([1], lambda: False)) == 2


def test_names_that_the_group_does_not_know_are_taken_as_they_come() -> None:
    layers = _hnd(torch.bfloat16)
    assert len(PagedCache(_named(layers), _config(names=["another"])).geometry.bases) == LAYERS


@pytest.mark.parametrize(
    ("caches", "complaint"),
    [
        ({}, "no KV cache"),
        ({"layer0": [torch.zeros(1)]}, "layer layer0 is a list, not a tensor"),
        ({"layer0": torch.zeros(4, 2, 4, 6), "layer1": torch.zeros(4, 2, 4, 8)}, "layer0 and layer1 differ"),
        ({"layer0": torch.zeros(4, 2, 4, 6), "layer1": torch.zeros(4, 2, 4, 6).half()}, "layer0 and layer1 differ"),
        ({"layer0": torch.zeros(4, 2, 4, 6), "layer1": torch.zeros(4, 4, 2, 6).transpose(1, 2)}, "differ"),
        ({"layer0": torch.zeros(2, 4, 2, 4, 6)}, r"shape \(2, 4, 2, 4, 6\)"),
        ({"layer0": torch.zeros(4, 2, 8, 6)}, r"shape \(4, 2, 8, 6\).*4, width"),
        ({"layer0": torch.zeros(4, 2, 6, 4).transpose(2, 3)}, "cannot be transferred: .*innermost"),
        ({"layer0": torch.zeros(1, 2, 4, 6).expand(4, 2, 4, 6)}, "cannot be transferred"),
    ],
)
def test_caches_of_another_kind_are_refused_by_name(caches: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        PagedCache(caches, _config())
