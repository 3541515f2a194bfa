"""One connection of a client to one address, with a deadline on everything."""

from __future__ import annotations

import math
import time
from types import TracebackType

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvpush.transfer.addresses import address_text
from kvpush.transfer.sidechannel.envelope import (
    HEADER_BYTES,
    BadMac,
    NotAnEnvelope,
    OtherVersion,
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

_FAILED_BEFORE_CONNECT = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_NOT_OUR_PROTOCOL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# No detail: the connection ended while the two sides greeted each other.
_CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
_WATCHED = _FAILED_BEFORE_CONNECT | _NOT_OUR_PROTOCOL | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _CLOSED


def remaining_s(deadline_s: float) -> float:
    """Seconds until a time of the monotonic clock, not below 0."""
    return max(0.0, deadline_s - time.monotonic())


class Connection:
    """Connects once to a numeric address and asks one question at a time. One thread uses it.

    where: how messages name the peer. deadline_s: monotonic time by which everything has ended.
    """

    def __init__(self, address: str, port: int, where: str, secret: bytes | None, deadline_s: float) -> None:
        self._where = where
        self._secret = secret
        self._deadline_s = deadline_s
        self._progress = "no connection"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, ":" in address)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES + HEADER_BYTES)
            # One attempt: whoever is not there now is reported at once instead of at the deadline.
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._monitor = self._socket.get_monitor_socket(_WATCHED)
            self._socket.connect(f"tcp://{address_text(address, port)}")
        except zmq.ZMQError as error:
            self.close()
            raise HandshakeError("refused", f"{where}: cannot connect to {address}: {error}") from error
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
        self._context.destroy(linger=0)

    def ask(self, query: Query) -> Answer:
        """The authentic answer to a question. Raises HandshakeError: timeout, refused, malformed, version, bad_mac."""
        nonce = new_nonce()
        try:
            self._socket.send(seal("query", nonce, encode(query), self._secret), zmq.NOBLOCK)
        except zmq.Again:
            raise self._closed() from None
        while True:
            frame = self._receive()
            try:
                answered, payload = unseal("answer", frame, self._secret)
                if answered == nonce:
                    return decode_answer(payload)
            except OtherVersion as error:
                raise HandshakeError("version", f"{self._where}: {error}") from None
            except BadMac as error:
                raise HandshakeError("bad_mac", f"{self._where}: {error}") from None
            except (NotAnEnvelope, MalformedMessage) as error:
                raise HandshakeError("malformed", f"{self._where}: the answer is malformed: {error}") from None
            # Authentic, but of another question: nobody sends this by accident. Go on until the deadline.

    def _receive(self) -> bytes:
        """The next frame; HandshakeError if there will be none."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            # Up, so that the last millisecond is not spent spinning.
            events = dict(poller.poll(math.ceil(remaining_s(self._deadline_s) * 1000)))
            if self._socket in events:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(parts) != 1:
                    raise HandshakeError("malformed", f"{self._where}: the answer has {len(parts)} parts")
                return parts[0]
            if self._monitor in events:
                event = recv_monitor_message(self._monitor)["event"]
                # The answer may have come in between the two looks, right before the peer closed.
                if not event & _CLOSED or not self._socket.poll(0):
                    self._see(event)
            elif remaining_s(self._deadline_s) == 0.0:
                raise HandshakeError("timeout", f"{self._where}: {self._progress} by the deadline")

    def _see(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._progress = "connected, but the peer does not speak"
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._progress = "connected, but no answer"
        elif event & _NOT_OUR_PROTOCOL:
            raise HandshakeError("malformed", f"{self._where}: whoever listens there does not speak this protocol")
        elif event & _CLOSED:
            raise self._closed()
        elif event & _FAILED_BEFORE_CONNECT:
            raise HandshakeError("refused", f"{self._where}: nobody listens there, or it cannot be reached")

    def _closed(self) -> HandshakeError:
        return HandshakeError("refused", f"{self._where}: the peer closed the connection before it answered")
