"""The loop of the server's thread: who may connect, whose turn it is, whose time is over."""

from __future__ import annotations

import logging
import selectors
import socket
import time

from kvpush.transfer.sidechannel.responder import Responder
from kvpush.transfer.sidechannel.session import Session

_log = logging.getLogger(__name__)

# Whoever reaches the port can make the server hold this many connections: 4 KiB and, in the kernel, the buffers of
# `kernel_buffers` for each. One more costs the one that has kept us waiting longest.
MAX_SESSIONS = 256
# So few that somebody who has asked is answered before a flood of newer connections could push him out.
_ACCEPT_AT_ONCE = 32
_SWEEP_INTERVAL_S = 0.25
_RECEIVE_BUFFER_BYTES = 16 * 1024
_SEND_BUFFER_BYTES = 128 * 1024


def kernel_buffers(listener: socket.socket) -> None:
    """Bounds what the kernel keeps for each connection of a listener that does not listen yet (it doubles these)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


class Service:
    """Serves the connections of a listening socket that does not block, and owns it, until `wake` can be read.

    wake: file descriptor, of the caller.
    """

    def __init__(self, listener: socket.socket, wake: int, responder: Responder) -> None:
        self._listener = listener
        self._responder = responder
        self._sessions: set[Session] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake = wake
        self._accepts = True
        self._complained = False

    def run(self) -> None:
        """Returns when `wake` can be read; every connection is closed then."""
        swept_s = time.monotonic()
        try:
            while True:
                waits = not self._sessions and self._accepts
                ready = self._selector.select(None if waits else _SWEEP_INTERVAL_S)
                now_s = time.monotonic()
                newcomers = False
                for key, _ in ready:
                    if key.fileobj == self._wake:
                        return
                    if key.data is None:
                        newcomers = True
                    else:
                        self._advance(key.data, now_s)
                # After the others, who have been waiting, and whom a newcomer may push out.
                if newcomers:
                    self._accept(now_s)
                # Last: if this thread was kept from running, those who have written meanwhile are not to blame.
                if now_s - swept_s >= _SWEEP_INTERVAL_S:
                    swept_s = now_s
                    self._sweep(now_s)
        finally:
            self._listener.close()
            for session in self._sessions:
                session.close()
            self._selector.close()

    def _advance(self, session: Session, now_s: float) -> None:
        events = session.events
        try:
            goes_on = session.advance(now_s)
        except Exception:
            self._responder.counters.internal += 1
            _log.exception("side channel: a connection could not be served")
            goes_on = False
        if not goes_on:
            self._end(session)
        elif session.events != events:
            self._selector.modify(session.connection, session.events, session)

    def _accept(self, now_s: float) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Mostly: no file descriptor is left. The port stays ready to be read, so look away for a while.
                self._stop_accepting(error)
                return
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                session = Session(connection, self._responder, now_s)
                self._selector.register(connection, session.events, session)
            except OSError:
                connection.close()
                continue
            if len(self._sessions) >= MAX_SESSIONS:
                self._evict()
            self._sessions.add(session)

    def _stop_accepting(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("side channel: cannot accept a connection (logged once): %s", error)
        self._selector.unregister(self._listener)
        self._accepts = False
        if self._sessions:
            self._evict()

    def _evict(self) -> None:
        """Ends one connection: rather one whose turn it is to ask than one that reads, and of those the oldest."""
        self._responder.counters.evicted += 1
        self._end(min(self._sessions, key=lambda session: (session.answering, session.since_s)))

    def _sweep(self, now_s: float) -> None:
        for session in [session for session in self._sessions if session.deadline_s <= now_s]:
            self._end(session)
        if not self._accepts:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepts = True

    def _end(self, session: Session) -> None:
        self._sessions.discard(session)
        self._selector.unregister(session.connection)
        session.close()
