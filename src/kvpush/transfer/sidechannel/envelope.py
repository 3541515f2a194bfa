"""The frame around every side channel message, and what authenticates it.

    magic (4) | version (1) | sealed (1) | nonce (16) | mac (32, zeros if not sealed) | msgpack payload

The first five bytes never change between versions. The client chooses a fresh nonce for each question; the answer
carries the same one. With a secret, mac = HMAC-SHA256(secret, direction, version, nonce, payload), so

- nobody without the secret can ask, and nobody without it can answer (a forged answer would make us write elsewhere);
- an answer cannot be replayed, because its nonce is not that of a later question;
- a question cannot be sent back as an answer, because the direction is part of the mac;
- a question cannot be replayed later (an old one would fetch the metadata of a new incarnation): it must carry a
  challenge that this life of the server issued during the last 30 s. The challenge is the server's own clock and a mac
  over it, so no table can be filled from outside, and the clocks of two machines need not agree. It costs one more
  round trip, once per handshake.

It does not hide anything: whoever can read the network sees the transport metadata. It does not stop somebody in the
middle from withholding or delaying messages, or from carrying a question to another engine that holds the same
secret (which `expected_engine_id` finds). It does not protect the transport's own traffic. Nor does it protect from
exhaustion: libzmq keeps the parts of an unfinished multipart message without a bound and before anything can be
verified, so the port must not be reachable from networks that are not trusted. Without a secret the whole network is
trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Final, Literal

MAGIC: Final = b"KVSC"
VERSION: Final = 1
NONCE_BYTES: Final = 16
SECRET_VARIABLE: Final = "KVPUSH_SECRET"
CHALLENGE_LIFETIME_S: Final = 30.0

_HEADER = struct.Struct(">4sBB16s32s")
HEADER_BYTES: Final = _HEADER.size
_NO_MAC = bytes(32)

Direction = Literal["query", "answer"]


class NotAnEnvelope(ValueError):
    """Bytes that no version of the side channel has sent."""


class OtherVersion(ValueError):
    """A frame of another version; `version` is that version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the peer speaks side channel version {version}, this side {VERSION}")
        self.version = version


class BadMac(ValueError):
    """The frame is not authentic; the text says whether one side lacks the secret or the two differ."""

    def __init__(self, nonce: bytes, message: str) -> None:
        super().__init__(message)
        self.nonce = nonce


def secret_from_environment() -> bytes | None:
    """The value of KVPUSH_SECRET without surrounding white space (files end in a line feed); None if unset or empty."""
    return os.environ.get(SECRET_VARIABLE, "").strip().encode("utf-8", "surrogateescape") or None


def new_nonce() -> bytes:
    """16 random bytes."""
    return os.urandom(NONCE_BYTES)


def seal(direction: Direction, nonce: bytes, payload: bytes, secret: bytes | None) -> bytes:
    """Frame around payload; authenticated if there is a secret."""
    mac = _NO_MAC if secret is None else _mac(direction, nonce, payload, secret)
    return _HEADER.pack(MAGIC, VERSION, secret is not None, nonce, mac) + payload


def unseal(direction: Direction, frame: bytes, secret: bytes | None) -> tuple[bytes, bytes]:
    """Frame -> (nonce, payload), authentic if there is a secret.

    Raises NotAnEnvelope, OtherVersion or BadMac and nothing else. The payload may still be malformed.
    """
    if frame[: len(MAGIC)] != MAGIC or len(frame) <= len(MAGIC):
        raise NotAnEnvelope("no side channel magic")
    if frame[len(MAGIC)] != VERSION:
        raise OtherVersion(frame[len(MAGIC)])
    if len(frame) < HEADER_BYTES:
        raise NotAnEnvelope(f"{len(frame)} bytes are no header")
    _, _, sealed, nonce, mac = _HEADER.unpack_from(frame)
    if sealed not in (0, 1):
        raise NotAnEnvelope(f"sealed is {sealed}")
    payload = frame[HEADER_BYTES:]
    if secret is None:
        if sealed:
            raise BadMac(nonce, f"the other side has {SECRET_VARIABLE}, this side has none")
        return nonce, payload
    if not sealed:
        raise BadMac(nonce, f"this side has {SECRET_VARIABLE}, the other side has none")
    if not hmac.compare_digest(mac, _mac(direction, nonce, payload, secret)):
        raise BadMac(nonce, f"the two sides have different values of {SECRET_VARIABLE}")
    return nonce, payload


def _mac(direction: Direction, nonce: bytes, payload: bytes, secret: bytes) -> bytes:
    # All parts but the last have a fixed length, so no two frames have the same input.
    label = f"kvpush side channel {direction:<8}".encode()
    return hmac.new(secret, label + bytes([VERSION]) + nonce + payload, hashlib.sha256).digest()


class Challenges:
    """Issues and checks challenges; holds a key of its own and nothing else. `now_s` is any monotonic clock."""

    _FORM = struct.Struct(">Q16s")

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def issue(self, now_s: float) -> bytes:
        """A challenge that is good for 30 s."""
        now_ms = int(now_s * 1000)
        return self._FORM.pack(now_ms, self._mac(now_ms))

    def good(self, challenge: bytes, now_s: float) -> bool:
        """True if this object issued it during the last 30 s."""
        if len(challenge) != self._FORM.size:
            return False
        issued_ms, mac = self._FORM.unpack(challenge)
        if not hmac.compare_digest(mac, self._mac(issued_ms)):
            return False
        age_ms = int(now_s * 1000) - int(issued_ms)
        return 0 <= age_ms <= CHALLENGE_LIFETIME_S * 1000

    def _mac(self, issued_ms: int) -> bytes:
        return hmac.new(self._key, issued_ms.to_bytes(8, "big"), hashlib.sha256).digest()[:16]
