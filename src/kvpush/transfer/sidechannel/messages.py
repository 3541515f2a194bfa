"""What the side channel says: three questions, and the answers to them.

`RankQuery` asks for one rank, so that an answer stays small however many ranks an engine has. `WriterQuery` asks
whether a process of that machine is gone. `TraceQuery` asks for the last transfers, for people to look at. Unknown
fields are ignored, so that an engine of another version can at least be told apart; unknown questions are errors.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from kvpush.transfer.sidechannel.fields import Name, Pid, RankNumber, Size, Text, Ticks, Version
from kvpush.transfer.sidechannel.process import ProcessIdentity

MAX_QUERY_BYTES = 4 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_TRACES = 1024
_MAX_METADATA_BYTES = MAX_ANSWER_BYTES - 64 * 1024

Mode = Literal["push", "pull"]
ErrorCode = Literal["unknown_rank", "not_ready", "wrong_engine", "bad_request", "bad_mac", "version"]
_S = TypeVar("_S", bound=msgspec.Struct)
_T = TypeVar("_T")
Blob = Annotated[bytes, msgspec.Meta(max_length=_MAX_METADATA_BYTES)]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one engine.

    incarnation: unique per life of the engine's scheduler process. host_id: of the scheduler process.
    fingerprint: name -> value of everything that must be equal for KV to be meaningful at the other side.
    trouble: why it takes no KV at present, for people; "" if it does.
    """

    engine_id: Name
    incarnation: Name
    mode: Mode
    tp_size: Size
    pp_size: Size
    protocol_version: Version
    host_id: Text
    fingerprint: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)]
    trouble: Text = ""

    def of(self, rank: RankInfo) -> EngineInfo:
        """The same with what this rank alone knows in the fingerprint."""
        return msgspec.structs.replace(self, fingerprint={**self.fingerprint, **rank.fingerprint})


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process of an engine.

    agent: its name in the transport, unique per incarnation. metadata: what the transport needs to reach its memory.
    geometry: its paged KV cache; staging: its staging slots; peer: how its cache can be mapped. All opaque here, the
    latter two empty if there are none. host_id, pid, pid_start: its process. The host is the rank's own and not the
    engine's, because an engine's ranks may run on several machines. fingerprint: as the engine's, of what is known only
    where the model runs.
    """

    pp_rank: RankNumber
    tp_rank: RankNumber
    agent: Name
    metadata: Blob
    geometry: Blob
    pid: Pid
    pid_start: Ticks
    host_id: Text
    staging: Annotated[bytes, msgspec.Meta(max_length=256)] = b""
    fingerprint: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)] = {}
    peer: Annotated[bytes, msgspec.Meta(max_length=512 * 1024)] = b""

    @property
    def process(self) -> ProcessIdentity:
        """The process to ask for when it must be proven that this rank writes no more."""
        return ProcessIdentity(host_id=self.host_id, pid=self.pid, pid_start=self.pid_start)


class RankQuery(msgspec.Struct, frozen=True, kw_only=True, tag="rank"):
    """Asks for one rank. expected_engine_id: an assertion, or None. challenge: from an earlier `Challenge`."""

    pp_rank: RankNumber
    tp_rank: RankNumber
    expected_engine_id: Text | None = None
    challenge: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class WriterQuery(msgspec.Struct, frozen=True, kw_only=True, tag="writer"):
    """Asks whether a process of the answering engine's machine is gone."""

    writer: ProcessIdentity
    challenge: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class TraceQuery(msgspec.Struct, frozen=True, kw_only=True, tag="traces"):
    """Asks for the newest transfer records, at most `count`."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACES)]
    challenge: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="rank"):
    """The engine, and the rank that was asked for."""

    engine: EngineInfo
    rank: RankInfo


class WriterAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="writer"):
    """gone: True if the writer certainly runs no more; False is no statement."""

    engine: EngineInfo
    gone: bool


class TraceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="traces"):
    """Transfers that have ended, oldest first; each a line of JSON (see `kvpush.transfer.trace`), opaque here.

    Fewer than asked for if there are no more, or they would be too long.
    """

    engine: EngineInfo
    traces: Annotated[list[Blob], msgspec.Meta(max_length=MAX_TRACES)]


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """Ask again with this, to show that the question is not an old one."""

    challenge: Annotated[bytes, msgspec.Meta(max_length=64)]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The question cannot be answered. message is for a log line."""

    code: ErrorCode
    message: Text


Query = RankQuery | WriterQuery | TraceQuery
Answer = PeerAnswer | WriterAnswer | TraceAnswer | Challenge | Refusal

_ENCODER = msgspec.msgpack.Encoder()
_QUERIES: msgspec.msgpack.Decoder[Query] = msgspec.msgpack.Decoder(Query)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class MalformedMessage(ValueError):
    """Bytes that are no side channel message; the text says what is wrong with them."""


def encode(message: Query | Answer) -> bytes:
    """Message -> msgpack. Does not check bounds: see `checked`."""
    return _ENCODER.encode(message)


def decode_query(payload: bytes) -> Query:
    """msgpack -> question. Raises MalformedMessage and nothing else."""
    return _decode(_QUERIES, payload)


def decode_answer(payload: bytes) -> Answer:
    """msgpack -> answer. Raises MalformedMessage and nothing else."""
    return _decode(_ANSWERS, payload)


def checked(message: _S) -> _S:
    """Returns a message of ours after checking its bounds; raises ValueError naming the field that breaks them."""
    try:
        return msgspec.msgpack.decode(_ENCODER.encode(message), type=type(message))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(message).__name__}: {error}") from None


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise MalformedMessage(str(error) or type(error).__name__) from None
