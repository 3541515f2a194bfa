"""What the side channel raises."""

from __future__ import annotations

from typing import Literal

HandshakeCode = Literal[
    "timeout", "refused", "wrong_engine", "bad_mac", "malformed", "version", "not_ready", "unknown_rank"
]


class SideChannelError(Exception):
    """This side cannot offer its side channel as configured: the port is taken, the host is not ours, ..."""


class HandshakeError(Exception):
    """A peer could not be asked, or gave no usable answer.

    code says what happened and may be used as a metric label:

    - timeout: no answer by the deadline; the peer may be slow, stopped, gone or unreachable
    - refused: nobody listens there, the name is unknown, or the connection was closed before the answer
    - wrong_engine: another engine answers at this address
    - bad_mac: the secrets differ, or only one side has one
    - malformed: the peer does not speak this protocol, or calls our query malformed
    - version: the peer speaks another version of the side channel
    - not_ready: the peer lives, but its ranks had not registered their memory by the deadline
    - unknown_rank: the peer has no such rank

    None of them proves that the peer is gone (see `kvpush.transfer.proof`).
    """

    def __init__(self, code: HandshakeCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def printable(text: str, limit: int = 300) -> str:
    """Text from the network, made safe for a log line: no control characters, at most `limit` characters."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:limit])
    return clean + "..." if len(text) > limit else clean
