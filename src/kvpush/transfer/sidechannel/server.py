"""The server thread: one socket, one `Responder`."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence

import zmq

from kvpush.transfer.addresses import address_text, numeric_addresses
from kvpush.transfer.sidechannel.counters import SideChannelCounters
from kvpush.transfer.sidechannel.envelope import HEADER_BYTES, SECRET_VARIABLE
from kvpush.transfer.sidechannel.errors import SideChannelError
from kvpush.transfer.sidechannel.messages import MAX_QUERY_BYTES, EngineInfo, RankInfo
from kvpush.transfer.sidechannel.responder import Responder

_log = logging.getLogger(__name__)

PORT_OPTION = "side_channel_port"
PORT_VARIABLE = "KVPUSH_SIDE_CHANNEL_PORT"
_STOP_TIMEOUT_S = 5.0
_RESOLVE_TIMEOUT_S = 5.0


class SideChannelServer:
    """Answers the handshakes of peers for one engine, in a thread of its own, from `start` to `stop`.

    host: what to bind, a name or an IPv4 or IPv6 address. port: 0 takes a free one.
    Raises ValueError if `engine` is out of bounds or the port is none.
    """

    def __init__(self, host: str, port: int, engine: EngineInfo, secret: bytes | None) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"{PORT_OPTION} must be 0 to 65535, got {port!r}")
        self.host = host
        self._port = port
        self._responder = Responder(engine, secret)
        self._secured = secret is not None
        self._thread: threading.Thread | None = None
        self._wake: int | None = None

    @property
    def port(self) -> int:
        """The port that is bound; before `start`, the one that was asked for."""
        return self._port

    @property
    def counters(self) -> SideChannelCounters:
        """What has been seen so far."""
        return self._responder.counters

    def start(self) -> None:
        """Binds and starts the thread. Peers are told `not_ready` until `set_ranks`.

        Raises SideChannelError, naming the address and the option that changes it, if it cannot be bound.
        """
        if self._thread is not None:
            raise SideChannelError(f"the side channel at {address_text(self.host, self._port)} was started twice")
        context = zmq.Context()
        try:
            socket = self._bind(context)
        except BaseException:
            context.destroy(linger=0)
            raise
        if not self._secured:
            _log.warning(
                "side channel %s: %s is not set, so whoever reaches this port is trusted",
                address_text(self.host, self._port),
                SECRET_VARIABLE,
            )
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # The socket changes its owner here: from now on only the thread uses it.
        self._thread = threading.Thread(
            target=self._serve, args=(context, socket, self._wake), name="kvpush-side-channel", daemon=True
        )
        self._thread.start()

    def set_ranks(self, ranks: Sequence[RankInfo]) -> None:
        """Makes these the engine's ranks; see `Responder.set_ranks` for what is refused. Any thread may call it."""
        self._responder.set_ranks(ranks)

    def stop(self) -> None:
        """Closes the port and joins the thread. Idempotent. Peers that wait for an answer see the connection close."""
        if self._thread is None or self._wake is None:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("side channel at port %d: the thread did not end in %.0f s", self._port, _STOP_TIMEOUT_S)
            return
        os.close(self._wake)
        self._thread = self._wake = None

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        where = address_text(self.host, self._port)
        try:
            address = numeric_addresses(self.host, _RESOLVE_TIMEOUT_S)[0]
        except OSError as error:
            raise SideChannelError(f"cannot offer the side channel at {where}: {error}") from error
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, ":" in address)
        # Larger frames cost their sender the connection; what is only a little too large is counted by the responder.
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * (MAX_QUERY_BYTES + HEADER_BYTES))
        # A client has one question at a time. One that asks on without reading must not fill our memory with answers.
        socket.setsockopt(zmq.RCVHWM, 16)
        socket.setsockopt(zmq.SNDHWM, 4)
        # Connections that never speak, and those whose machine is gone, are closed.
        socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        try:
            socket.bind(f"tcp://{address_text(address, self._port)}")
        except zmq.ZMQError as error:
            reason = "the port is taken" if error.errno == errno.EADDRINUSE else str(error)
            raise SideChannelError(
                f"cannot offer the side channel at {where}: {reason}; choose another with {PORT_OPTION} in "
                f"kv_connector_extra_config or with the environment variable {PORT_VARIABLE} (0 takes a free port)"
            ) from error
        self._port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], wake: int) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        try:
            while wake not in dict(poller.poll()):
                try:
                    self._serve_one(socket)
                except zmq.ZMQError as error:
                    # A peer that vanished between its question and our answer; nobody is left to be told.
                    _log.debug("side channel: %s", error)
        finally:
            context.destroy(linger=0)

    def _serve_one(self, socket: zmq.Socket[bytes]) -> None:
        parts = [socket.recv(zmq.NOBLOCK)]
        count = 1
        while socket.getsockopt(zmq.RCVMORE):
            part = socket.recv(zmq.NOBLOCK)
            count += 1
            if count == 2:
                parts.append(part)
        if count != 2:
            self._responder.drop()
            return
        answer = self._responder.answer(parts[1], time.monotonic())
        if answer is not None:
            socket.send_multipart([parts[0], answer], zmq.NOBLOCK)
