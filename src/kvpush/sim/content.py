"""What the model computes: the KV of a token depends on every token before it, and on the cache salt."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

LAYERS = 2
_MASK = 2**64 - 1
Words = npt.NDArray[np.uint64]


class Content:
    """A prompt and its greedy continuation.

    chain: for each position a number that depends on all tokens up to it. kv: uint64 of shape [LAYERS, positions], no
    two (prompt, position, layer) alike, never 0.
    """

    __slots__ = ("chain", "kv")

    def __init__(self, tokens: tuple[int, ...], salt: str | None, num_outputs: int) -> None:
        state = _mix(sum(b << (8 * i) for i, b in enumerate((salt or "").encode())) & _MASK, 0)
        chain = []
        for token in tokens:
            state = _mix(state, token)
            chain.append(state)
        for _ in range(num_outputs):
            state = _mix(state, state % 50_021)
            chain.append(state)
        self.chain = chain
        base = np.array(chain, np.uint64)
        self.kv: Words = np.stack([base * np.uint64(2 * i + 1) + np.uint64(1000 * i) for i in range(LAYERS)])


def _mix(state: int, token: int) -> int:
    state = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return (state ^ (state >> 31)) | 1


@lru_cache(maxsize=256)
def content_of(tokens: tuple[int, ...], salt: str | None, num_outputs: int) -> Content:
    """The same object for the same prompt; nobody writes to it."""
    return Content(tokens, salt, num_outputs)
