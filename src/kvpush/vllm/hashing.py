"""Hashes KV blocks on the device that they lie on; the twin of `kvpush.transfer.hashing.hash_memory`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvpush.transfer.hashing import WORD_BYTES, Cancelled, Words, factors

CHUNK_BYTES = 16 * 2**20
"""Bytes hashed at once: two buffers of this size are all the memory that it takes on the device."""

YIELD_S = 20e-6
"""Pause after each chunk's launches: whoever waits for the interpreter (a decode engine's main thread would wait
5 ms to take it by force) gets it then."""


class TensorHasher:
    """Hashes blocks of layers that all lie on one device, on a stream of its own there. Owned by one thread.

    layers: shape [num_blocks, ...] in logical order, all alike, the last axis contiguous. No KV leaves the device; the
    stream of the model is neither waited for nor held up. The caller has seen that the blocks are complete.
    """

    def __init__(self, layers: Sequence[torch.Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._layers = [_widest(layer) for layer in layers]
        self._device = layers[0].device
        self._page_bytes = self._layers[0][0].numel() * self._layers[0].element_size()
        self._num_words = -(-self._page_bytes // WORD_BYTES)
        self._at_once = max(1, chunk_bytes // (self._num_words * WORD_BYTES))
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._factors = torch.tensor(factors(self._num_words), device=self._device)

    def hash_blocks(self, blocks: Sequence[int], cancelled: Cancelled) -> Words:
        """Shape [layers, blocks]. Raises IndexError for a block that is none, torch.OutOfMemoryError.

        Waits, without the interpreter lock, until the device has done it.
        """
        num_blocks = len(self._layers[0])
        if any(not 0 <= block < num_blocks for block in blocks):
            raise IndexError(f"blocks {min(blocks)} to {max(blocks)}, the cache has {num_blocks}")
        on_stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._stream is not None:
            on_stream = torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:
            table = torch.tensor(blocks, dtype=torch.int64, device=self._device)
            words = torch.zeros((len(self._layers), len(blocks)), dtype=torch.int64, device=self._device)
            for layer, row in zip(self._layers, words, strict=True):
                for start in range(0, len(blocks), self._at_once):
                    if cancelled():
                        break
                    used = slice(start, start + self._at_once)
                    row[used] = self._hash_pages(layer.index_select(0, table[used]))
                    if self._stream is not None:
                        time.sleep(YIELD_S)
            return words.cpu().numpy()

    def _hash_pages(self, pages: torch.Tensor) -> torch.Tensor:
        flat = pages.reshape(len(pages), -1)
        if flat.dtype != torch.int64:
            missing = self._num_words * WORD_BYTES - self._page_bytes
            flat = torch.nn.functional.pad(flat, (0, missing)).view(torch.int64)
        # Torch has no unsigned shift: the mask takes away what the sign has filled in.
        flat.bitwise_xor_((flat >> 32).bitwise_and_(0xFFFFFFFF))
        return flat.mul_(self._factors).sum(dim=1)


def _widest(layer: torch.Tensor) -> torch.Tensor:
    """The same memory as words, if its axes allow it, else as bytes: not every dtype of a KV cache can be indexed."""
    raw = layer.view(torch.uint8)
    aligned = layer.data_ptr() % WORD_BYTES == 0 and all(step % WORD_BYTES == 0 for step in raw.stride()[:-1])
    aligned = aligned and raw.storage_offset() % WORD_BYTES == 0 and raw.shape[-1] % WORD_BYTES == 0
    return raw.view(torch.int64) if aligned else raw
