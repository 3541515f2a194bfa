"""What an engine starts and stops: a port, a thread, a `Responder`."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence

from kvpush.transfer.addresses import address_text, numeric_addresses
from kvpush.transfer.sidechannel.counters import SideChannelCounters
from kvpush.transfer.sidechannel.envelope import SECRET_VARIABLE
from kvpush.transfer.sidechannel.errors import SideChannelError
from kvpush.transfer.sidechannel.messages import EngineInfo, RankInfo
from kvpush.transfer.sidechannel.responder import Responder
from kvpush.transfer.sidechannel.service import MAX_SESSIONS, Service, kernel_buffers

_log = logging.getLogger(__name__)

PORT_OPTION = "side_channel_port"
PORT_VARIABLE = "KVPUSH_SIDE_CHANNEL_PORT"
_STOP_TIMEOUT_S = 5.0
_RESOLVE_TIMEOUT_S = 5.0


class SideChannelServer:
    """Answers the handshakes of peers for one engine, in a thread of its own, from `start` to `stop`.

    host: what to bind, a name or an IPv4 or IPv6 address. port: 0 takes a free one. traces: see `Responder`.
    Raises ValueError if `engine` is out of bounds or the port is none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine: EngineInfo,
        secret: bytes | None,
        traces: Callable[[int], Sequence[bytes]] = lambda _count: (),
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"{PORT_OPTION} must be 0 to 65535, got {port!r}")
        self.host = host
        self._port = port
        self._responder = Responder(engine, secret, traces)
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
        listener = self._listen()
        if not self._secured:
            _log.warning(
                "side channel %s: %s is not set, so whoever reaches this port is trusted",
                address_text(self.host, self._port),
                SECRET_VARIABLE,
            )
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # From now on only the thread uses the socket.
        self._thread = threading.Thread(
            target=Service(listener, self._wake, self._responder).run, name="kvpush-side-channel", daemon=True
        )
        self._thread.start()

    def set_ranks(self, ranks: Sequence[RankInfo]) -> None:
        """Makes these the engine's ranks; see `Responder.set_ranks` for what is refused. Any thread may call it."""
        self._responder.set_ranks(ranks)

    def set_trouble(self, trouble: str) -> None:
        """What every answer says from now on (`EngineInfo.trouble`). The thread of `set_ranks` may call it."""
        self._responder.set_trouble(trouble)

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

    def _listen(self) -> socket.socket:
        where = address_text(self.host, self._port)
        try:
            address = numeric_addresses(self.host, _RESOLVE_TIMEOUT_S)[0]
            # Asks nobody, because the address is numeric; it finds the family and an IPv6 scope.
            family, kind, protocol, _, own = socket.getaddrinfo(
                address, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise SideChannelError(f"cannot offer the side channel at {where}: {error}") from error
        try:
            # Connections of an earlier life that have not timed out yet do not keep the port. On Linux two sockets
            # still cannot listen at one port: whoever comes second fails, at the latest in listen().
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is every address, also IPv4
            kernel_buffers(listener)
            listener.setblocking(False)
            listener.bind(own)
            listener.listen(MAX_SESSIONS)
        except OSError as error:
            listener.close()
            reason = "the port is taken" if error.errno == errno.EADDRINUSE else str(error)
            raise SideChannelError(
                f"cannot offer the side channel at {where}: {reason}; choose another with {PORT_OPTION} in "
                f"kv_connector_extra_config or with the environment variable {PORT_VARIABLE}"
            ) from error
        self._port = int(listener.getsockname()[1])
        return listener
