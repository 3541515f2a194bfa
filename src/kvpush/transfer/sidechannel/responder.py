"""Answers side channel frames: bytes in, bytes out, no socket and no thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from kvpush.transfer.sidechannel.counters import SideChannelCounters
from kvpush.transfer.sidechannel.envelope import (
    HEADER_BYTES,
    NONCE_BYTES,
    SECRET_VARIABLE,
    BadMac,
    Challenges,
    NotAnEnvelope,
    OtherVersion,
    header,
    unseal,
)
from kvpush.transfer.sidechannel.errors import printable
from kvpush.transfer.sidechannel.messages import (
    MAX_ANSWER_BYTES,
    MAX_QUERY_BYTES,
    Challenge,
    EngineInfo,
    ErrorCode,
    MalformedMessage,
    PeerAnswer,
    RankInfo,
    RankQuery,
    Refusal,
    TraceAnswer,
    TraceQuery,
    WriterAnswer,
    WriterQuery,
    checked,
    decode_query,
    encode,
)
from kvpush.transfer.sidechannel.process import process_gone

_log = logging.getLogger(__name__)
_WARNING_INTERVAL_S = 60.0
MAX_TROUBLE_CHARACTERS = 400
MAX_QUESTION_BYTES = MAX_QUERY_BYTES + HEADER_BYTES


class Responder:
    """Knows the engine and its ranks, and answers questions about them.

    `answer` is for one thread; `set_ranks` and `set_trouble` may be called from one other; an answer sees what was set
    before or after.
    traces: gives the newest so many transfer records, oldest first, encoded; called in the thread that answers.
    Raises ValueError naming the field if the engine's own description is out of bounds.
    """

    def __init__(
        self,
        engine: EngineInfo,
        secret: bytes | None,
        traces: Callable[[int], Sequence[bytes]] = lambda _count: (),
    ) -> None:
        self.engine = checked(engine)
        self._traces = traces
        self.counters = SideChannelCounters()
        self._secret = secret
        self._challenges = Challenges()
        # (pp_rank, tp_rank) -> encoded PeerAnswer. Replaced whole, never changed.
        self._answers: dict[tuple[int, int], bytes] = {}
        self._ranks: tuple[RankInfo, ...] = ()
        self._warned_s: float | None = None

    def set_ranks(self, ranks: Sequence[RankInfo]) -> None:
        """Makes these the engine's ranks, in place of earlier ones. Those that are left out stay `not_ready`.

        Raises ValueError naming the rank that is given twice, outside the engine's sizes, or too large for an answer.
        """
        answers: dict[tuple[int, int], bytes] = {}
        agents: set[str] = set()
        for rank in ranks:
            key = (rank.pp_rank, rank.tp_rank)
            name = f"rank pp{rank.pp_rank}tp{rank.tp_rank}"
            if not self._exists(*key):
                raise ValueError(f"{name} is outside of pp_size {self.engine.pp_size}, tp_size {self.engine.tp_size}")
            if key in answers:
                raise ValueError(f"{name} was given twice")
            if rank.agent in agents:
                raise ValueError(f"{name} has the agent name {rank.agent!r} of another rank")
            agents.add(rank.agent)
            answers[key] = encode(PeerAnswer(engine=self.engine, rank=checked(rank)))
            if len(answers[key]) > MAX_ANSWER_BYTES:
                raise ValueError(f"{name}: an answer of {len(answers[key])} bytes exceeds {MAX_ANSWER_BYTES}")
        self._ranks, self._answers = tuple(ranks), answers

    def set_trouble(self, trouble: str) -> None:
        """Says in every answer from now on what `EngineInfo.trouble` means, shortened if need be. Never raises."""
        self.engine = msgspec.structs.replace(self.engine, trouble=printable(trouble, MAX_TROUBLE_CHARACTERS))
        answers = dict(self._answers)
        for rank in self._ranks:
            answer = encode(PeerAnswer(engine=self.engine, rank=rank))
            if len(answer) <= MAX_ANSWER_BYTES:  # else peers must do without
                answers[rank.pp_rank, rank.tp_rank] = answer
        self._answers = answers

    def answer(self, frame: bytes, now_s: float) -> bytes | None:
        """The frame to send back, or None if nothing is. Never raises; counts what it saw. `now_s` is monotonic."""
        parts = self.answer_parts(frame, now_s)
        return None if parts is None else b"".join(parts)

    def answer_parts(self, frame: bytes, now_s: float) -> tuple[bytes, bytes] | None:
        """As `answer`, but header and payload apart: the payload is shared by all who ask for the same rank."""
        try:
            return self._answer(frame, now_s)
        except Exception:
            self.counters.internal += 1
            if self.counters.internal == 1:
                _log.exception("side channel: a question could not be answered (logged once)")
            return None

    def drop(self) -> None:
        """Counts a message that is not even a frame."""
        self.counters.dropped += 1

    def _answer(self, frame: bytes, now_s: float) -> tuple[bytes, bytes] | None:
        if len(frame) > MAX_QUESTION_BYTES:
            self.drop()
            return None
        try:
            nonce, payload = unseal("query", frame, self._secret)
        except NotAnEnvelope:
            self.drop()
            return None
        except OtherVersion as error:
            # Where its nonce stands, if it has one, is not ours to know. Its client needs our version byte only.
            return self._refuse(bytes(NONCE_BYTES), "version", str(error))
        except BadMac as error:
            if self._warned_s is None or now_s - self._warned_s >= _WARNING_INTERVAL_S:
                self._warned_s = now_s
                _log.warning("side channel: refused a question: %s", error)
            return self._refuse(error.nonce, "bad_mac", f"{SECRET_VARIABLE} is not the same at both sides")
        try:
            query = decode_query(payload)
        except MalformedMessage as error:
            return self._refuse(nonce, "bad_request", str(error))
        if self._secret is not None and not self._challenges.good(query.challenge, now_s):
            self.counters.challenged += 1
            return self._seal(nonce, encode(Challenge(challenge=self._challenges.issue(now_s))))
        if isinstance(query, WriterQuery):
            self.counters.proofs += 1
            return self._seal(nonce, encode(WriterAnswer(engine=self.engine, gone=process_gone(query.writer))))
        if isinstance(query, TraceQuery):
            return self._answer_traces(nonce, query)
        return self._answer_rank(nonce, query)

    def _answer_rank(self, nonce: bytes, query: RankQuery) -> tuple[bytes, bytes]:
        mine, rank = self.engine.engine_id, f"rank pp{query.pp_rank}tp{query.tp_rank}"
        if query.expected_engine_id not in (None, mine):
            expected = printable(query.expected_engine_id or "''", 200)
            return self._refuse(nonce, "wrong_engine", f"this is engine {printable(mine, 200)}, not {expected}")
        if not self._exists(query.pp_rank, query.tp_rank):
            sizes = f"pp_size is {self.engine.pp_size}, tp_size is {self.engine.tp_size}"
            return self._refuse(nonce, "unknown_rank", f"no {rank}: {sizes}")
        answer = self._answers.get((query.pp_rank, query.tp_rank))
        if answer is None:
            return self._refuse(nonce, "not_ready", f"{rank} has not registered its memory yet")
        self.counters.answered += 1
        return self._seal(nonce, answer)

    def _answer_traces(self, nonce: bytes, query: TraceQuery) -> tuple[bytes, bytes]:
        traces = list(self._traces(query.count))
        payload = encode(TraceAnswer(engine=self.engine, traces=traces))
        while len(payload) > MAX_ANSWER_BYTES:
            traces = traces[len(traces) // 2 + 1 :]
            payload = encode(TraceAnswer(engine=self.engine, traces=traces))
        self.counters.traces += 1
        return self._seal(nonce, payload)

    def _exists(self, pp_rank: int, tp_rank: int) -> bool:
        return 0 <= pp_rank < self.engine.pp_size and 0 <= tp_rank < self.engine.tp_size

    def _refuse(self, nonce: bytes, code: ErrorCode, message: str) -> tuple[bytes, bytes]:
        self.counters.count(code)
        return self._seal(nonce, encode(Refusal(code=code, message=printable(message, 500))))

    def _seal(self, nonce: bytes, payload: bytes) -> tuple[bytes, bytes]:
        return header("answer", nonce, payload, self._secret), payload
