"""Messages survive the wire; what is no message is refused with one kind of error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidechannel_cases import engine, patient, rank

from kvpush.transfer.sidechannel.messages import (
    MAX_TRACES,
    Challenge,
    EngineInfo,
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
    decode_answer,
    decode_query,
    encode,
)
from kvpush.transfer.sidechannel.process import ProcessIdentity

pytestmark = pytest.mark.unit

texts = st.text(max_size=40)
names = st.text(min_size=1, max_size=40)
numbers = st.integers(0, 65535)
processes = st.builds(ProcessIdentity, host_id=texts, pid=st.integers(1, 2**31 - 1), pid_start=st.integers(0, 2**62))
engines = st.builds(
    EngineInfo,
    engine_id=names,
    incarnation=names,
    mode=st.sampled_from(["push", "pull"]),
    tp_size=st.integers(1, 65536),
    pp_size=st.integers(1, 65536),
    protocol_version=st.integers(0, 2**31 - 1),
    host_id=texts,
    fingerprint=st.dictionaries(texts, texts, max_size=10),
)
rank_infos = st.builds(
    RankInfo,
    pp_rank=numbers,
    tp_rank=numbers,
    agent=names,
    metadata=st.binary(max_size=500),
    geometry=st.binary(max_size=100),
    pid=st.integers(1, 2**31 - 1),
    pid_start=st.integers(0, 2**62),
    host_id=texts,
)
queries = st.one_of(
    st.builds(
        RankQuery,
        pp_rank=numbers,
        tp_rank=numbers,
        expected_engine_id=st.none() | texts,
        challenge=st.binary(max_size=64),
    ),
    st.builds(WriterQuery, writer=processes, challenge=st.binary(max_size=64)),
    st.builds(TraceQuery, count=st.integers(1, MAX_TRACES), challenge=st.binary(max_size=64)),
)
answers = st.one_of(
    st.builds(PeerAnswer, engine=engines, rank=rank_infos),
    st.builds(WriterAnswer, engine=engines, gone=st.booleans()),
    st.builds(TraceAnswer, engine=engines, traces=st.lists(st.binary(max_size=40), max_size=4)),
    st.builds(Challenge, challenge=st.binary(max_size=64)),
    st.builds(Refusal, code=st.sampled_from(["unknown_rank", "not_ready", "bad_mac"]), message=texts),
)
# What a decoder meets: anything at all, anything that is msgpack, and messages with a few bytes changed.
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
garbage = st.one_of(st.binary(max_size=400), plain.map(msgspec.msgpack.encode))


@patient
@given(queries)
def test_questions_survive_the_wire(query) -> None:
    assert decode_query(encode(query)) == query
    assert checked(query) == query


@patient
@given(answers)
def test_answers_survive_the_wire(answer) -> None:
    assert decode_answer(encode(answer)) == answer


@patient
@given(garbage)
def test_garbage_is_malformed_and_nothing_else(payload) -> None:
    for decode in (decode_query, decode_answer):
        with pytest.raises(MalformedMessage):
            decode(payload)


@patient
@given(st.one_of(queries, answers), st.data())
def test_damaged_messages_are_refused_or_within_bounds(message, data) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_query, decode_answer):
        try:
            read = decode(bytes(payload))
        except MalformedMessage:
            continue
        assert checked(read) == read


def test_deep_nesting_is_malformed() -> None:
    for payload in (b"\x91" * 100_000, b"\x82\xa4type\xa4rank\xa1x" + b"\x91" * 100_000):
        with pytest.raises(MalformedMessage):
            decode_query(payload)


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    later = {"type": "rank", **msgspec.structs.asdict(RankQuery(pp_rank=1, tp_rank=0)), "priority": 3}
    assert decode_query(msgspec.msgpack.encode(later)) == RankQuery(pp_rank=1, tp_rank=0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp_size": 0}, "tp_size"),
        ({"mode": "shove"}, "mode"),
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "x" * 513}, "engine_id"),
        ({"protocol_version": -1}, "protocol_version"),
        ({"fingerprint": {"model": 3}}, "fingerprint"),
        ({"fingerprint": {str(i): "" for i in range(65)}}, "fingerprint"),
    ],
)
def test_an_engine_out_of_bounds_is_named(changes, field) -> None:
    with pytest.raises(ValueError, match=f"EngineInfo: .*{field}"):
        checked(engine(**changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"pid": 0}, "pid"), ({"pid": -1}, "pid"), ({"metadata": "text"}, "metadata"), ({"geometry": None}, "geometry")],
)
def test_a_rank_out_of_bounds_is_named(changes, field) -> None:
    with pytest.raises(ValueError, match=f"RankInfo: .*{field}"):
        checked(rank(**changes))
