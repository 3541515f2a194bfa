"""Asks the side channel of a peer. Plain blocking calls with a deadline, for a thread that may wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kvpush.transfer.addresses import address_text, numeric_addresses
from kvpush.transfer.sidechannel.connection import Connection, remaining_s
from kvpush.transfer.sidechannel.errors import HandshakeCode, HandshakeError, printable
from kvpush.transfer.sidechannel.messages import (
    Challenge,
    ErrorCode,
    PeerAnswer,
    Query,
    RankQuery,
    Refusal,
    TraceAnswer,
    TraceQuery,
    WriterAnswer,
    WriterQuery,
    checked,
)
from kvpush.transfer.sidechannel.process import ProcessIdentity

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_MAX_CHALLENGES = 3

_CODES: dict[ErrorCode, HandshakeCode] = {
    "unknown_rank": "unknown_rank",
    "not_ready": "not_ready",
    "wrong_engine": "wrong_engine",
    "bad_request": "malformed",
    "bad_mac": "bad_mac",
    "version": "version",
}


def query_peer(
    host: str,
    port: int,
    pp_rank: int,
    tp_rank: int,
    expected_engine_id: str | None,
    secret: bytes | None,
    timeout_s: float,
) -> PeerAnswer:
    """Asks the engine whose side channel is at host:port for itself and one of its ranks.

    expected_engine_id: an assertion about who answers, or None. While the engine's ranks are not ready the question
    is repeated until the deadline. Returns within timeout_s, whatever the peer does. The caller has checked the address
    against its allow list. Raises HandshakeError; ValueError if an argument is out of bounds.
    """
    where = f"{address_text(host, port)} rank pp{pp_rank}tp{tp_rank}"
    query = checked(RankQuery(pp_rank=pp_rank, tp_rank=tp_rank, expected_engine_id=expected_engine_id))

    def ask(challenge: bytes) -> Query:
        return RankQuery(
            pp_rank=query.pp_rank, tp_rank=query.tp_rank, expected_engine_id=expected_engine_id, challenge=challenge
        )

    answer = _ask(host, port, where, ask, secret, timeout_s)
    if not isinstance(answer, PeerAnswer):
        raise HandshakeError("malformed", f"{where}: the answer is to another question")
    if expected_engine_id not in (None, answer.engine.engine_id):
        message = f"{where}: this is engine {printable(answer.engine.engine_id)}, not {expected_engine_id}"
        raise HandshakeError("wrong_engine", message)
    if (answer.rank.pp_rank, answer.rank.tp_rank) != (pp_rank, tp_rank):
        raise HandshakeError("malformed", f"{where}: answered pp{answer.rank.pp_rank}tp{answer.rank.tp_rank}")
    return answer


def query_writer(host: str, port: int, writer: ProcessIdentity, secret: bytes | None, timeout_s: float) -> WriterAnswer:
    """Asks the engine at host:port whether a process of its machine is gone. Deadline and errors as in `query_peer`."""
    where = address_text(host, port)
    checked(WriterQuery(writer=writer))
    answer = _ask(
        host, port, where, lambda challenge: WriterQuery(writer=writer, challenge=challenge), secret, timeout_s
    )
    if not isinstance(answer, WriterAnswer):
        raise HandshakeError("malformed", f"{where}: the answer is to another question")
    return answer


def query_traces(host: str, port: int, count: int, secret: bytes | None, timeout_s: float) -> TraceAnswer:
    """Asks the engine at host:port for its newest transfer records. Deadline and errors as in `query_peer`."""
    where = address_text(host, port)
    checked(TraceQuery(count=count))
    answer = _ask(host, port, where, lambda challenge: TraceQuery(count=count, challenge=challenge), secret, timeout_s)
    if not isinstance(answer, TraceAnswer):
        raise HandshakeError("malformed", f"{where}: the answer is to another question")
    return answer


def _ask(
    host: str, port: int, where: str, query: Callable[[bytes], Query], secret: bytes | None, timeout_s: float
) -> PeerAnswer | WriterAnswer | TraceAnswer:
    """Tries the addresses of the host in turn; each has an equal share of the time that is left."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s}")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ValueError(f"port must be 1 to 65535, got {port!r}")
    deadline_s = time.monotonic() + timeout_s
    try:
        addresses = numeric_addresses(host, timeout_s)
    except TimeoutError as error:
        raise HandshakeError("timeout", f"{where}: {error}") from error
    except OSError as error:
        raise HandshakeError("refused", f"{where}: {error}") from error
    last: HandshakeError | None = None
    for index, address in enumerate(addresses):
        share_s = remaining_s(deadline_s) / (len(addresses) - index)
        try:
            return _converse(address, port, where, query, secret, time.monotonic() + share_s)
        except HandshakeError as error:
            if error.code not in ("refused", "timeout"):
                raise
            last = error
    assert last is not None  # there is at least one address
    raise last


def _converse(
    address: str, port: int, where: str, query: Callable[[bytes], Query], secret: bytes | None, deadline_s: float
) -> PeerAnswer | WriterAnswer | TraceAnswer:
    """Asks until there is an answer that is final; waits for ranks that are not ready.

    Each time over a new connection: hundreds of workers that wait for one engine must not hold it up meanwhile.
    """
    pause_s = _FIRST_PAUSE_S
    not_ready: HandshakeError | None = None
    while True:
        try:
            with Connection(address, port, where, secret, deadline_s) as connection:
                answer = _answered(connection, where, query)
        except HandshakeError as error:
            if error.code == "timeout" and not_ready is not None:
                # The deadline cut off one of many questions; what the peer said before is what the caller must know.
                raise not_ready from error
            raise
        if not isinstance(answer, Refusal):
            return answer
        refused = HandshakeError(_CODES[answer.code], f"{where}: {printable(answer.message)}")
        if answer.code != "not_ready" or remaining_s(deadline_s) <= pause_s:
            raise refused
        not_ready = refused
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _answered(
    connection: Connection, where: str, query: Callable[[bytes], Query]
) -> PeerAnswer | WriterAnswer | TraceAnswer | Refusal:
    """Asks, and asks again with the challenge if the peer wants one."""
    challenge = b""
    for _ in range(1 + _MAX_CHALLENGES):
        answer = connection.ask(query(challenge))
        if not isinstance(answer, Challenge):
            return answer
        challenge = answer.challenge
    raise HandshakeError("malformed", f"{where}: the peer does not accept its own challenges")
