"""The frame around every side channel message: what bounds it and what authenticates it.

    magic (4) | version (1) | length (4) | sealed (1) | nonce (16) | mac (32, zeros if not sealed) | msgpack payload

length: bytes after it. Frames follow each other on a TCP connection with nothing between them, so whoever reads one
knows after 9 bytes how much it will keep, and keeps nothing that is longer than it wants. The first five bytes never
change between versions; what follows them may. The client chooses a fresh nonce for each question; the answer carries
the same one. With a secret, mac = HMAC-SHA256(secret, direction, version, nonce, payload), so

- nobody without the secret can ask, and nobody without it can answer (a forged answer would make us write elsewhere);
- an answer cannot be replayed, because its nonce is not that of a later question;
- a question cannot be sent back as an answer, because the direction is part of the mac;
- a question cannot be replayed later (an old one would fetch the metadata of a new incarnation): it must carry a
  challenge that this life of the server issued during the last 30 s. The challenge is the server's own clock and a mac
  over it, so no table can be filled from outside, and the clocks of two machines need not agree. It costs one more
  round trip, once per handshake.

It does not hide anything: whoever can read the network sees the transport metadata. It does not stop somebody in the
middle from withholding or delaying messages, or from carrying a question to another engine that holds the same
secret (which `expected_engine_id` finds). It does not protect the transport's own traffic. Whoever reaches the port
can cost the server bounded memory and a bounded number of connections (see `service`), and can keep others from being
answered by opening connections faster than they can ask. Without a secret the whole network is trusted.
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

_HEADER = struct.Struct(">4sBIB16s32s")
HEADER_BYTES: Final = _HEADER.size
# What a reader needs to see before it knows the version, and then the length.
_PREFIX_BYTES: Final = 5
_LENGTH_BYTES: Final = 9
_LONGEST: Final = _LENGTH_BYTES + 2**32 - 1
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
    return header(direction, nonce, payload, secret) + payload


def header(direction: Direction, nonce: bytes, payload: bytes, secret: bytes | None) -> bytes:
    """What stands before the payload in its frame, so that one large payload can be sent to many without a copy."""
    mac = _NO_MAC if secret is None else _mac(direction, nonce, payload, secret)
    length = HEADER_BYTES - _LENGTH_BYTES + len(payload)
    return _HEADER.pack(MAGIC, VERSION, length, secret is not None, nonce, mac)


def frame_bytes(start: bytes | bytearray, limit_bytes: int) -> int:
    """How long a frame is, as far as its first bytes tell; the frame is whole when `start` is as long as that.

    A reader begins with nothing, reads up to the number it gets here and asks again. So it never reads more than one
    frame and never keeps more than limit_bytes. Raises NotAnEnvelope as soon as the bytes cannot be the start of a
    frame of at most limit_bytes, OtherVersion if they are one of another version.
    """
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise NotAnEnvelope("no side channel magic")
    if len(start) < _PREFIX_BYTES:
        return _PREFIX_BYTES
    if start[len(MAGIC)] != VERSION:
        raise OtherVersion(start[len(MAGIC)])
    if len(start) < _LENGTH_BYTES:
        return _LENGTH_BYTES
    size = _LENGTH_BYTES + int.from_bytes(start[_PREFIX_BYTES:_LENGTH_BYTES], "big")
    if size < HEADER_BYTES:
        raise NotAnEnvelope(f"{size} bytes are no header")
    if size > limit_bytes:
        raise NotAnEnvelope(f"a frame of {size} bytes, {limit_bytes} are allowed")
    return size


def unseal(direction: Direction, frame: bytes, secret: bytes | None) -> tuple[bytes, bytes]:
    """Frame -> (nonce, payload), authentic if there is a secret.

    Raises NotAnEnvelope, OtherVersion or BadMac and nothing else. The payload may still be malformed.
    """
    size = frame_bytes(frame, _LONGEST)
    if size != len(frame):
        raise NotAnEnvelope(f"{len(frame)} bytes, where the frame has {size}")
    _, _, _, sealed, nonce, mac = _HEADER.unpack_from(frame)
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
    mac = hmac.new(secret, label + bytes([VERSION]) + nonce, hashlib.sha256)
    mac.update(payload)
    return mac.digest()


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
