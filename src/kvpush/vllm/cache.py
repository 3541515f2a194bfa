"""The paged KV cache of one worker, as vLLM hands it over: its geometry, its memory, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.hashing import Cancelled, Words, hash_memory
from kvpush.vllm.hashing import TensorHasher
from kvpush.vllm.identity import UnsupportedModel


class PagedCache:
    """Strides and storages of one KV cache group; layers in the order of the group.

    kv_caches: layer name -> tensor, logical shape [num_blocks, kv_heads, block_size, width], or
    [num_blocks, block_size, width] (MLA). Layers that share one tensor count once. Raises UnsupportedModel if layers
    differ or their shape or layout is another one.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> None:
        group = kv_cache_config.kv_cache_groups[0]
        names = [name for name in group.layer_names if name in kv_caches] or list(kv_caches)
        if not names:
            raise UnsupportedModel("the engine has no KV cache")
        layers = self._checked({name: kv_caches[name] for name in names})
        self._layers = list({layer.data_ptr(): layer for layer in layers}.values())
        first = self._layers[0]
        self._hasher: TensorHasher | None = None  # made by the thread that uses it
        self.device: int | None = first.device.index if first.is_cuda else None
        block_size = group.kv_cache_spec.block_size
        if first.dim() not in (3, 4) or first.shape[-2] != block_size:
            raise UnsupportedModel(
                f"the KV cache has the shape {tuple(first.shape)}; [blocks, heads, {block_size}, width] was expected"
            )
        pointers = [layer.data_ptr() for layer in self._layers]
        storages = [(layer.untyped_storage().data_ptr(), layer.untyped_storage().nbytes()) for layer in self._layers]
        try:
            self.geometry = CacheGeometry.from_strides(
                pointers, first.shape, first.stride(), first.element_size(), self.device
            )
            self.regions = self.geometry.regions(storages)
        except ValueError as error:
            raise UnsupportedModel(f"the KV cache has a layout that cannot be transferred: {error}") from None

    @property
    def layers(self) -> list[torch.Tensor]:
        """The tensors behind the bases of the geometry, in that order."""
        return self._layers

    @staticmethod
    def _checked(caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all layers, if they are alike."""
        first_name = next(iter(caches))
        first = caches[first_name]
        for name, layer in caches.items():
            if not isinstance(layer, torch.Tensor):
                raise UnsupportedModel(f"the KV cache of layer {name} is a {type(layer).__name__}, not a tensor")
            if (layer.shape, layer.stride(), layer.dtype) != (first.shape, first.stride(), first.dtype):
                raise UnsupportedModel(f"the KV caches of layers {first_name} and {name} differ in shape or layout")
        return list(caches.values())

    def select_device(self) -> None:
        """Makes the calling thread use the cache's device."""
        if self.device is not None:
            torch.cuda.set_device(self.device)

    def hash_blocks(self, blocks: Sequence[int], cancelled: Cancelled) -> Words:
        """Hashes whole blocks, shape [layers, blocks]; for a thread of its own, which waits for the device."""
        if self.device is None:
            return hash_memory([layer.view(torch.uint8).numpy() for layer in self._layers], blocks, cancelled)
        if self._hasher is None:
            self._hasher = TensorHasher(self._layers)
        return self._hasher.hash_blocks(blocks, cancelled)
