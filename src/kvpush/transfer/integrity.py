"""Integrity: P sends digests of the KV that it pushed, and D compares them with what has landed.

P alone decides, by the transfer id, and D checks whatever digests have come: no word about it is needed, and engines
with other settings understand each other. Digests are of whole blocks, in the order of the block table and of the
layers, so they tell blocks, layers and tokens apart that have changed places.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from typing import Literal

from kvpush.protocol.ids import TransferId
from kvpush.protocol.messages import PieceDigest
from kvpush.transfer.hashing import BlockHasher, Hashing, Words

_log = logging.getLogger(__name__)

IntegrityMode = Literal["off", "sample", "always"]
Verdict = Literal["ok", "partial", "mismatch", "unchecked"]
DIGEST_BYTES = 16
DIGEST_WAIT_S = 5.0
"""How long after its start a digest is waited for, and keeps the blocks of its piece."""


def is_sampled(transfer_id: TransferId, share: float) -> bool:
    """Whether a transfer is among the share (0 to 1) that are checked; every engine with this share finds the same."""
    hashed = hashlib.blake2b(transfer_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "big") < share * 2**64


def digest_of(words: Words, first_token: int, end_token: int) -> PieceDigest:
    """The digest of the blocks of tokens [first_token, end_token). words: their hashes, shape [layers, blocks]."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvpush-kv-2")
    hasher.update(struct.pack("<4Q", *words.shape, first_token, end_token))
    hasher.update(words.astype("<i8").tobytes())
    return PieceDigest(first_token, end_token, hasher.digest())


class PieceHashing:
    """P: the digest of one piece, on its way."""

    def __init__(self, hashing: Hashing, first_token: int, end_token: int) -> None:
        self._hashing = hashing
        self._tokens = (first_token, end_token)

    def done(self) -> bool:
        return self._hashing.done()

    def cancel(self) -> None:
        self._hashing.cancel()

    def take(self) -> PieceDigest | None:
        """The digest; None if it could not be computed. Call it when done."""
        words = _result(self._hashing)
        return None if words is None else digest_of(words, *self._tokens)


class Check:
    """D: the comparison of a transfer's digests, on its way.

    A digest that does not lie on whole blocks of what is owed, or overlaps another one, counts as a mismatch.
    """

    def __init__(
        self,
        hasher: BlockHasher,
        block_size: int,
        table: Sequence[int],
        first_token: int,
        num_tokens: int,
        digests: Sequence[PieceDigest],
    ) -> None:
        self._digests = sorted(digests, key=lambda digest: digest.first_token)
        self._block_size = block_size
        self._hashing: Hashing | None = None
        covered = 0
        end = first_token
        for digest in self._digests:
            at_border = digest.end_token % block_size == 0 or digest.end_token == num_tokens
            if digest.first_token < end or digest.first_token % block_size or not at_border:
                return
            end = digest.end_token
            covered += digest.end_token - digest.first_token
        if end > num_tokens:
            return
        # P leaves out the last block if it goes on writing into it.
        self._whole = covered in (num_tokens - first_token, num_tokens // block_size * block_size - first_token)
        self._first_block = first_token // block_size
        self._hashing = _start(hasher, table[self._first_block : -(-end // block_size)])

    def done(self) -> bool:
        return self._hashing is None or self._hashing.done()

    def cancel(self) -> None:
        if self._hashing is not None:
            self._hashing.cancel()

    def verdict(self) -> Verdict:
        """What has been found; call it when done.

        partial: what was digested is right, but P could not digest all. unchecked: this side could not hash.
        """
        if self._hashing is None:
            return "mismatch"
        words = _result(self._hashing)
        if words is None:
            return "unchecked"
        for theirs in self._digests:
            first = theirs.first_token // self._block_size - self._first_block
            end = -(-theirs.end_token // self._block_size) - self._first_block
            if digest_of(words[:, first:end], theirs.first_token, theirs.end_token) != theirs:
                return "mismatch"
        return "ok" if self._whole else "partial"


class Digester:
    """Makes and checks the digests of one rank.

    share: of its transfers that it sends digests of, as P; wait_s: how long a piece waits for its own.
    """

    def __init__(self, hasher: BlockHasher, block_size: int, share: float, wait_s: float = DIGEST_WAIT_S) -> None:
        self.wait_s = wait_s
        self._hasher = hasher
        self._block_size = block_size
        self._share = share

    def chooses(self, transfer_id: TransferId) -> bool:
        return is_sampled(transfer_id, self._share)

    def start(
        self, table: Sequence[int], first_token: int, end_token: int, *, stable_tail: bool
    ) -> PieceHashing | None:
        """P: digests the blocks of a piece, which begins at a block border; the caller keeps them until it is done.

        stable_tail: nobody writes behind end_token meanwhile; otherwise a block that is filled only in part is left
        out. None: then nothing is left.
        """
        size = self._block_size
        if not stable_tail:
            end_token = end_token // size * size
        if first_token >= end_token or first_token % size:
            return None
        hashing = _start(self._hasher, table[first_token // size : -(-end_token // size)])
        return PieceHashing(hashing, first_token, end_token)

    def check(self, table: Sequence[int], first_token: int, num_tokens: int, digests: Sequence[PieceDigest]) -> Check:
        """D: compares digests with the blocks that hold tokens [first_token, num_tokens); first_token at a border."""
        return Check(self._hasher, self._block_size, table, first_token, num_tokens, digests)

    def close(self) -> None:
        self._hasher.close()


class _Failed:
    """A hashing that could not even begin."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> Words:
        raise self._error

    def cancel(self) -> None:
        """It is over."""


def _start(hasher: BlockHasher, blocks: Sequence[int]) -> Hashing:
    try:
        return hasher.start(blocks)
    except Exception as error:
        return _Failed(error)


def _result(hashing: Hashing) -> Words | None:
    try:
        return hashing.result()
    except Exception as error:
        # Mostly: the GPU has no memory left for the buffers. The transfer itself has nothing to do with it.
        _log.warning("kvpush: KV could not be hashed for a check of integrity: %r", error)
        return None
