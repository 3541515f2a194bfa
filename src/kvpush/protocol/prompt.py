"""Prompt identity: what determines the KV of a prompt, in a form that two engines can compare."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

DIGEST_BYTES = 16


class PromptIdentity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Length in tokens and digest of a prompt. Equal identities mean equal KV, given the same model."""

    num_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 < self.num_tokens < 2**31:
            raise ValueError(f"num_tokens must be 1 to 2**31 - 1, got {self.num_tokens}")
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"digest must have {DIGEST_BYTES} bytes, got {len(self.digest)}")


def prompt_identity(
    token_ids: Sequence[int],
    *,
    lora: str | None = None,
    multimodal: Iterable[str] = (),
    cache_salt: str | None = None,
) -> PromptIdentity:
    """The identity of a prompt of at least one token.

    token_ids: the prompt, each 0 to 2**32 - 1; lora: the adapter's name; multimodal: content hashes in order of
    appearance; cache_salt: separates tenants. Every part is length-prefixed, so no two combinations collide.
    Raises ValueError for an empty prompt and OverflowError for ids out of range.
    """
    # Both engines' main threads do this once a request. Processors have instructions for SHA-256: 64 KB take half of
    # what BLAKE2 needs, and an array hands its memory over as it is.
    hasher = hashlib.sha256(b"kvpush-prompt-2")
    tokens = array("I", token_ids)
    hasher.update((len(tokens) * tokens.itemsize).to_bytes(8, "little"))
    hasher.update(tokens)
    for part in (lora, cache_salt):
        # None and "" differ: a request without an adapter is not one with an adapter that has no name.
        encoded = b"" if part is None else b"\x01" + part.encode("utf-8", "surrogatepass")
        hasher.update(len(encoded).to_bytes(8, "little"))
        hasher.update(encoded)
    for item in multimodal:
        encoded = item.encode("utf-8", "surrogatepass")
        hasher.update(len(encoded).to_bytes(8, "little"))
        hasher.update(encoded)
    return PromptIdentity(len(token_ids), hasher.digest()[:DIGEST_BYTES])
