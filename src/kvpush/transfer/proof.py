"""Positive proof that a writer no longer exists.

Memory that a peer may write is given to nobody else until the peer has said quiet or is proven gone. A deadline, a
refused connection or silence prove nothing: a stopped process finishes its writes when it is continued, and so does one
whose network was away. What proves it is that the kernel of the writer's machine no longer knows its process.
"""

from __future__ import annotations

import logging

from kvpush.transfer.sidechannel import (
    HandshakeError,
    ProcessIdentity,
    current_process,
    host_id,
    process_gone,
    query_writer,
    rebooted,
)
from kvpush.transfer.sight import Sight

__all__ = ["ProcessIdentity", "WriterProof", "current_process", "process_gone"]

_log = logging.getLogger(__name__)


class WriterProof:
    """Looks for the proof: in this machine's process table, or in that of the writer's machine.

    secret: as for `query_peer`; without one, whoever answers at the side channel's address is believed.
    timeout_s: how long one question to another machine may take. sight: the writers that this machine has shown while
    they lived. here: this machine's host id.
    """

    def __init__(
        self, secret: bytes | None, timeout_s: float = 2.0, *, sight: Sight | None = None, here: str | None = None
    ) -> None:
        self._sight = sight
        self._secret = secret
        self._timeout_s = timeout_s
        self._here = here if here is not None else host_id()

    def gone(self, writer: ProcessIdentity, side_channel: tuple[str, int] | None) -> bool:
        """True if the writer certainly writes no more. False is no statement; ask again later.

        writer: its rank's process, as the handshake told. side_channel: (host, port) at which the writer's engine, or
        its successor after a restart, answers; the caller has checked it against its allow list. None: look here only.

        On this machine the answer comes at once, also for a writer in a container of it, if it could be seen from here
        while it lived. For a writer elsewhere its side channel is asked, which takes up to timeout_s. That counts only
        if the answer comes from the writer's own machine and process namespace (a restarted engine may have been
        moved), or from that machine after it has started anew, and only if it says that this very process is gone: that
        another incarnation of the engine answers is not enough, because a stopped worker can outlive the engine that
        it belonged to.
        """
        if self._sight is not None and self._sight.gone(writer):
            return True
        if writer.host_id == self._here:
            return process_gone(writer)
        if side_channel is None:
            return False
        host, port = side_channel
        try:
            answer = query_writer(host, port, writer, self._secret, self._timeout_s)
        except (HandshakeError, ValueError) as error:
            _log.debug("no proof about process %d of %s: %s", writer.pid, writer.host_id, error)
            return False
        there = answer.engine.host_id
        return answer.gone and (there == writer.host_id or rebooted(writer.host_id, there))
