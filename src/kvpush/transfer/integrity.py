"""Integrity mode: digests of the KV bytes themselves, in an order that no layout changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, Protocol

from kvpush.protocol.messages import PieceDigest

IntegrityMode = Literal["off", "always"]
DIGEST_BYTES = 16


class CacheReader(Protocol):
    """Reads KV out of a paged cache for comparison; not for speed."""

    def read(self, blocks: Sequence[int], first_token: int, end_token: int) -> Sequence[bytes]:
        """The bytes of the blocks that hold tokens [first_token, end_token) of a request with this block table.

        One entry per layer; blocks in the table's order, within a block in its logical order (not that of memory).
        """
        ...


class Digester:
    """Digests pieces of a request's KV."""

    def __init__(self, reader: CacheReader) -> None:
        self._reader = reader

    def piece(self, blocks: Sequence[int], first_token: int, end_token: int) -> PieceDigest:
        """The digest of tokens [first_token, end_token) over all layers."""
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvpush-kv-1")
        for layer in self._reader.read(blocks, first_token, end_token):
            hasher.update(len(layer).to_bytes(8, "little"))
            hasher.update(layer)
        return PieceDigest(first_token, end_token, hasher.digest())

    def matches(self, blocks: Sequence[int], first_token: int, end_token: int, digests: Sequence[PieceDigest]) -> bool:
        """Whether digests cover tokens [first_token, end_token) without a gap and equal what stands in these blocks."""
        covered = first_token
        for theirs in sorted(digests, key=lambda digest: digest.first_token):
            if theirs.first_token != covered or not covered < theirs.end_token <= end_token:
                return False
            if self.piece(blocks, theirs.first_token, theirs.end_token) != theirs:
                return False
            covered = theirs.end_token
        return covered == end_token
