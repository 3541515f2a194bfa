"""One connection of a client to one address, with a deadline on everything."""

from __future__ import annotations

import socket
import time
from types import TracebackType

from kvpush.transfer.sidechannel.envelope import (
    HEADER_BYTES,
    BadMac,
    NotAnEnvelope,
    OtherVersion,
    frame_bytes,
    new_nonce,
    seal,
    unseal,
)
from kvpush.transfer.sidechannel.errors import HandshakeError
from kvpush.transfer.sidechannel.messages import (
    MAX_ANSWER_BYTES,
    Answer,
    MalformedMessage,
    Query,
    decode_answer,
    encode,
)

_MAX_FRAME_BYTES = MAX_ANSWER_BYTES + HEADER_BYTES
_AT_ONCE_BYTES = 256 * 1024


def remaining_s(deadline_s: float) -> float:
    """Seconds until a time of the monotonic clock, not below 0."""
    return max(0.0, deadline_s - time.monotonic())


class Connection:
    """Connects once to a numeric address and asks one question at a time. One thread uses it.

    where: how messages name the peer. deadline_s: monotonic time by which everything has ended.
    Raises HandshakeError: refused or timeout, if there will be no connection.
    """

    def __init__(self, address: str, port: int, where: str, secret: bytes | None, deadline_s: float) -> None:
        self._where = where
        self._secret = secret
        self._deadline_s = deadline_s
        try:
            # Asks nobody, because the address is numeric; it finds the family and an IPv6 scope.
            family, kind, protocol, _, target = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise HandshakeError("refused", f"{where}: cannot connect to {address}: {error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._wait("no connection")
            self._socket.connect(target)
            if self._socket.getsockname() == self._socket.getpeername():
                # To a free port that the kernel chose for our own end too, it connects us to ourselves.
                raise ConnectionRefusedError("connected to itself")
        except TimeoutError:
            self.close()
            raise self._late("no connection") from None
        except OSError as error:
            self.close()
            message = f"{where}: nobody listens there, or it cannot be reached: {error}"
            raise HandshakeError("refused", message) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection without waiting for anything."""
        self._socket.close()

    def ask(self, query: Query) -> Answer:
        """The authentic answer to a question. Raises HandshakeError: timeout, refused, malformed, version, bad_mac."""
        nonce = new_nonce()
        self._send(seal("query", nonce, encode(query), self._secret))
        while True:
            try:
                answered, payload = unseal("answer", self._receive(), self._secret)
                if answered == nonce:
                    return decode_answer(payload)
            except OtherVersion as error:
                raise HandshakeError("version", f"{self._where}: {error}") from None
            except BadMac as error:
                raise HandshakeError("bad_mac", f"{self._where}: {error}") from None
            except NotAnEnvelope as error:
                message = f"{self._where}: whoever listens there does not speak this protocol: {error}"
                raise HandshakeError("malformed", message) from None
            except MalformedMessage as error:
                raise HandshakeError("malformed", f"{self._where}: the answer is malformed: {error}") from None
            # Authentic, but of another question: nobody sends this by accident. Go on until the deadline.

    def _send(self, frame: bytes) -> None:
        self._wait("connected, but the question was not taken")
        try:
            self._socket.sendall(frame)
        except TimeoutError:
            raise self._late("connected, but the question was not taken") from None
        except OSError:
            raise self._closed() from None

    def _receive(self) -> bytes:
        """The next frame, read up to its end and not further. Raises also NotAnEnvelope, OtherVersion."""
        frame = bytearray()
        while (size := frame_bytes(frame, _MAX_FRAME_BYTES)) != len(frame):
            progress = f"connected, but only {len(frame)} bytes of an answer" if frame else "connected, but no answer"
            # Anew for each piece: a peer that drips must not stretch the deadline.
            self._wait(progress)
            try:
                piece = self._socket.recv(min(size - len(frame), _AT_ONCE_BYTES))
            except TimeoutError:
                raise self._late(progress) from None
            except OSError:
                raise self._closed() from None
            if not piece:
                raise self._closed()
            frame += piece
        return bytes(frame)

    def _wait(self, progress: str) -> None:
        """Lets the next call on the socket last until the deadline."""
        left_s = remaining_s(self._deadline_s)
        if left_s == 0.0:
            raise self._late(progress)
        self._socket.settimeout(left_s)

    def _late(self, progress: str) -> HandshakeError:
        return HandshakeError("timeout", f"{self._where}: {progress} by the deadline")

    def _closed(self) -> HandshakeError:
        return HandshakeError("refused", f"{self._where}: the peer closed the connection before it answered")
