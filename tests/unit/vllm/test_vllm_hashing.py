"""Hashes of a cache's tensors: the device's own arithmetic finds what numpy finds, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_vllm_cache import LAYOUTS, _config, _fill, _named

from kvpush.transfer.hashing import hash_memory
from kvpush.vllm.cache import PagedCache
from kvpush.vllm.hashing import TensorHasher

TABLE = [7, 2, 9, 1, 2]


def never() -> bool:
    return False


def _numpy(layers: list[torch.Tensor], blocks: list[int]) -> Any:
    return hash_memory([layer.cpu().view(torch.uint8).contiguous().numpy() for layer in layers], blocks, never)


@pytest.mark.unit
@pytest.mark.parametrize("chunk_bytes", [1, 150, 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_and_numpy_agree(layout: str, dtype: torch.dtype, chunk_bytes: int) -> None:
    layers = LAYOUTS[layout](dtype)
    _fill(layers)
    for layer in layers:
        layer.view(torch.uint8)[3] |= 0x80  # negative as signed words
    expected = _numpy(layers, TABLE)
    assert (TensorHasher(layers, chunk_bytes).hash_blocks(TABLE, never) == expected).all()
    assert (PagedCache(_named(layers), _config()).hash_blocks(TABLE, never) == expected).all()
    assert TensorHasher(layers).hash_blocks([], never).shape == (3, 0)


@pytest.mark.unit
def test_layouts_differ_in_memory_and_not_in_what_is_hashed() -> None:
    hnd, nhd = LAYOUTS["HND"](torch.bfloat16), LAYOUTS["NHD"](torch.bfloat16)
    for one, other in zip(hnd, nhd, strict=True):
        one.copy_(torch.randn(one.shape))
        other.copy_(one)
    hashed = [PagedCache(_named(layers), _config()).hash_blocks([3, 5], never) for layers in (hnd, nhd)]
    assert (hashed[0] == hashed[1]).all()


@pytest.mark.unit
def test_blocks_that_are_none_are_errors() -> None:
    layers = LAYOUTS["HND"](torch.bfloat16)
    for block in (-1, 10):
        with pytest.raises(IndexError, match="the cache has 10"):
            TensorHasher(layers).hash_blocks([0, block], never)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gpu_agrees_with_the_cpu(layout: str) -> None:
    layers = [layer.cuda() for layer in LAYOUTS[layout](torch.bfloat16)]
    _fill(layers)
    assert (TensorHasher(layers, 150).hash_blocks(TABLE, never) == _numpy(layers, TABLE)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_gpu_hashes_beside_a_stream_that_is_busy() -> None:
    layers = [torch.randint(0, 255, (2000, 8, 16, 256), dtype=torch.uint8, device="cuda") for _ in range(8)]
    expected = _numpy(layers, TABLE)
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        busy = busy @ busy * 1e-3
    hasher = TensorHasher(layers)
    assert (hasher.hash_blocks(TABLE, never) == expected).all()
    assert not torch.cuda.current_stream().query(), "the hash has waited for the model's stream"
    torch.cuda.synchronize()
