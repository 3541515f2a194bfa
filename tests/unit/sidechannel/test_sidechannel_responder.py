"""What is answered to what, without a socket."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidechannel_cases import OTHER_SECRET, SECRET, engine, patient, rank, ranks
from test_sidechannel_messages import garbage, queries

from kvpush.transfer.sidechannel.envelope import CHALLENGE_LIFETIME_S, MAGIC, OtherVersion, new_nonce, seal, unseal
from kvpush.transfer.sidechannel.messages import (
    MAX_ANSWER_BYTES,
    Answer,
    Challenge,
    PeerAnswer,
    Query,
    RankQuery,
    Refusal,
    TraceAnswer,
    TraceQuery,
    WriterAnswer,
    WriterQuery,
    decode_answer,
    encode,
)
from kvpush.transfer.sidechannel.process import current_process
from kvpush.transfer.sidechannel.responder import Responder

pytestmark = pytest.mark.unit


def responder(secret: bytes | None = None, ready: bool = True, **changes: object) -> Responder:
    made = Responder(engine(**changes), secret)
    if ready:
        made.set_ranks(ranks())
    return made


def ask(
    peer: Responder, query: Query, secret: bytes | None = None, now_s: float = 0.0, read: bytes | str | None = "same"
) -> Answer:
    """Asks and reads the answer, with another secret for reading if `read` says so."""
    nonce = new_nonce()
    frame = peer.answer(seal("query", nonce, encode(query), secret), now_s)
    assert frame is not None
    answered, payload = unseal("answer", frame, secret if isinstance(read, str) else read)
    assert answered == nonce
    return decode_answer(payload)


def refusal(answer: Answer) -> Refusal:
    assert isinstance(answer, Refusal)
    return answer


def test_only_the_rank_that_was_asked_for_is_told() -> None:
    peer = responder()
    for expected in (None, "engine-1"):
        answer = ask(peer, RankQuery(pp_rank=1, tp_rank=0, expected_engine_id=expected))
        assert answer == PeerAnswer(engine=engine(), rank=rank(1, 0))
    assert peer.counters.as_dict() == {**Responder(engine(), None).counters.as_dict(), "answered": 2}


def test_not_ready_until_the_ranks_are_set() -> None:
    peer = responder(ready=False)
    assert refusal(ask(peer, RankQuery(pp_rank=0, tp_rank=1))).code == "not_ready"
    peer.set_ranks([rank(0, 1)])
    assert isinstance(ask(peer, RankQuery(pp_rank=0, tp_rank=1)), PeerAnswer)
    left_out = refusal(ask(peer, RankQuery(pp_rank=1, tp_rank=1)))
    assert left_out.code == "not_ready"
    assert "pp1tp1" in left_out.message
    assert (peer.counters.not_ready, peer.counters.answered) == (2, 1)


def test_ranks_may_be_replaced() -> None:
    peer = responder()
    peer.set_ranks([rank(0, 0, agent="reborn")])
    answer = ask(peer, RankQuery(pp_rank=0, tp_rank=0))
    assert isinstance(answer, PeerAnswer)
    assert answer.rank.agent == "reborn"


def test_a_rank_that_cannot_exist_is_unknown_even_before_the_ranks_are_set() -> None:
    peer = responder(ready=False)
    for pp_rank, tp_rank in ((2, 0), (0, 2), (65535, 65535)):
        answer = refusal(ask(peer, RankQuery(pp_rank=pp_rank, tp_rank=tp_rank)))
        assert answer.code == "unknown_rank"
        assert f"pp{pp_rank}tp{tp_rank}" in answer.message
    assert peer.counters.unknown_rank == 3


def test_the_wrong_engine_is_named_with_the_expected_one() -> None:
    peer = responder()
    answer = refusal(ask(peer, RankQuery(pp_rank=0, tp_rank=0, expected_engine_id="engine-2")))
    assert answer.code == "wrong_engine"
    assert "engine-1" in answer.message
    assert "engine-2" in answer.message
    long = refusal(ask(peer, RankQuery(pp_rank=0, tp_rank=0, expected_engine_id="\x1b" * 512)))
    assert long.message.isprintable()
    assert "engine-1" in long.message
    assert refusal(ask(peer, RankQuery(pp_rank=0, tp_rank=0, expected_engine_id=""))).code == "wrong_engine"
    assert peer.counters.wrong_engine == 3


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ([rank(2, 0)], "pp2tp0 is outside"),
        ([rank(0, 0), rank(0, 0, agent="b")], "pp0tp0 was given twice"),
        ([rank(0, 0), rank(0, 1, agent="agent-0-0")], "pp0tp1 has the agent name"),
        ([rank(0, 0, metadata=bytes(4 * 1024 * 1024))], "metadata"),
        ([rank(0, 0, metadata=bytes(3 * 1024 * 1024), geometry=bytes(2 * 1024 * 1024))], "pp0tp0: an answer of"),
    ],
)
def test_ranks_that_cannot_be_served_are_refused_and_change_nothing(changed, text) -> None:
    peer = responder()
    with pytest.raises(ValueError, match=text):
        peer.set_ranks(changed)
    assert ask(peer, RankQuery(pp_rank=1, tp_rank=1)) == PeerAnswer(engine=engine(), rank=rank(1, 1))


def test_with_a_secret_a_question_needs_a_fresh_challenge() -> None:
    peer = responder(SECRET)
    first = ask(peer, RankQuery(pp_rank=0, tp_rank=0), SECRET, now_s=100.0)
    assert isinstance(first, Challenge)
    again = RankQuery(pp_rank=0, tp_rank=0, challenge=first.challenge)
    assert isinstance(ask(peer, again, SECRET, now_s=101.0), PeerAnswer)
    assert isinstance(ask(peer, again, SECRET, now_s=101.0 + CHALLENGE_LIFETIME_S), Challenge)
    assert (peer.counters.challenged, peer.counters.answered) == (2, 1)


def test_a_recorded_question_fetches_nothing_from_the_next_incarnation() -> None:
    first, second = responder(SECRET), responder(SECRET, incarnation="life-2")
    challenge = ask(first, RankQuery(pp_rank=0, tp_rank=0), SECRET)
    assert isinstance(challenge, Challenge)
    nonce = new_nonce()
    recorded = seal("query", nonce, encode(RankQuery(pp_rank=0, tp_rank=0, challenge=challenge.challenge)), SECRET)
    for peer, expected in ((first, PeerAnswer), (second, Challenge)):
        frame = peer.answer(recorded, 0.0)
        assert frame is not None
        assert isinstance(decode_answer(unseal("answer", frame, SECRET)[1]), expected)


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, OTHER_SECRET), (SECRET, None), (None, SECRET)])
def test_without_the_right_secret_nothing_is_told(mine, theirs) -> None:
    peer = responder(mine)
    for query in (RankQuery(pp_rank=0, tp_rank=0), WriterQuery(writer=current_process())):
        answer = refusal(ask(peer, query, theirs, read=mine))
        assert answer.code == "bad_mac"
    assert peer.counters.bad_mac == peer.counters.total() == 2


def test_a_flood_of_bad_macs_is_logged_once_a_minute(caplog) -> None:
    peer = responder(SECRET)
    for tenth in range(1300):
        ask(peer, RankQuery(pp_rank=0, tp_rank=0), OTHER_SECRET, now_s=tenth / 10, read=SECRET)
    assert len(caplog.records) == 3


def test_another_version_is_told_ours() -> None:
    peer = responder()
    frame = peer.answer(MAGIC + b"\x07" + bytes(100), 0.0)
    assert frame is not None
    payload = unseal("answer", frame, None)[1]
    assert refusal(decode_answer(payload)).code == "version"
    # What the other side makes of it: to a side of version 7 our frame starts with a version that is not its own.
    with pytest.raises(OtherVersion):
        unseal("query", frame[:4] + b"\x07", None)


def test_whether_a_writer_is_gone_is_told_before_the_ranks_are_set() -> None:
    peer = responder(ready=False)
    me = current_process()
    assert ask(peer, WriterQuery(writer=me)) == WriterAnswer(engine=engine(), gone=False)
    earlier = type(me)(host_id=me.host_id, pid=me.pid, pid_start=me.pid_start + 1)
    assert ask(peer, WriterQuery(writer=earlier)) == WriterAnswer(engine=engine(), gone=True)
    elsewhere = type(me)(host_id="elsewhere", pid=me.pid, pid_start=me.pid_start + 1)
    assert ask(peer, WriterQuery(writer=elsewhere)) == WriterAnswer(engine=engine(), gone=False)
    assert peer.counters.proofs == 3


def test_oversized_and_foreign_frames_get_no_answer() -> None:
    peer = responder()
    too_long = seal("query", new_nonce(), bytes(5000), None)
    for frame in (b"", b"KVSC", b"GET / HTTP/1.1", too_long):
        assert peer.answer(frame, 0.0) is None
    assert peer.counters.dropped == peer.counters.total() == 4


def test_a_large_answer_is_not_copied_for_each_who_asks() -> None:
    peer = responder(ready=False)
    peer.set_ranks([rank(metadata=bytes(3 * 1024 * 1024))])
    frames = [seal("query", bytes([n]) * 16, encode(RankQuery(pp_rank=0, tp_rank=0)), None) for n in range(2)]
    first, second = (peer.answer_parts(frame, 0.0) for frame in frames)
    assert first is not None
    assert second is not None
    assert first[1] is second[1]
    assert first[0] != second[0]
    assert b"".join(first) == peer.answer(frames[0], 0.0)


def test_an_engine_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="pp_size"):
        Responder(engine(pp_size=0), None)


sealed_garbage = st.builds(
    seal, st.just("query"), st.binary(min_size=16, max_size=16), garbage, st.sampled_from([None, SECRET, OTHER_SECRET])
)
sealed_queries = st.builds(
    lambda nonce, query, secret: seal("query", nonce, encode(query), secret),
    st.binary(min_size=16, max_size=16),
    queries,
    st.sampled_from([None, SECRET]),
)


@settings(patient, max_examples=150)
@given(
    st.lists(st.one_of(st.binary(max_size=300), sealed_garbage, sealed_queries), max_size=8),
    st.sampled_from([None, SECRET]),
)
def test_whatever_arrives_is_counted_once_and_never_raises(frames, secret) -> None:
    peer = responder(secret)
    for number, frame in enumerate(frames, start=1):
        answer = peer.answer(frame, 0.0)
        assert peer.counters.total() == number
        if answer is not None:
            decode_answer(unseal("answer", answer, secret)[1])
    assert peer.counters.internal == 0


def test_the_newest_transfers_are_told_and_fit_into_an_answer() -> None:
    lines = [bytes([n]) * 10_000 for n in range(200)] * 3
    peer = Responder(engine(), None, lambda count: lines[-count:])
    answer = ask(peer, TraceQuery(count=2))
    assert answer == TraceAnswer(engine=engine(), traces=lines[-2:])
    everything = ask(peer, TraceQuery(count=600))
    assert isinstance(everything, TraceAnswer)
    kept = len(everything.traces)
    assert 100 < kept < 600
    assert everything.traces == lines[-kept:]
    assert len(encode(everything)) <= MAX_ANSWER_BYTES
    assert peer.counters.traces == 2
    assert ask(responder(), TraceQuery(count=5)) == TraceAnswer(engine=engine(), traces=[])


def test_a_defect_of_ours_is_counted_and_logged_once(monkeypatch, caplog) -> None:
    def broken(process: object) -> bool:
        raise RuntimeError("defect")

    monkeypatch.setattr("kvpush.transfer.sidechannel.responder.process_gone", broken)
    peer = responder()
    frame = seal("query", new_nonce(), encode(WriterQuery(writer=current_process())), None)
    assert [peer.answer(frame, 0.0) for _ in range(3)] == [None] * 3
    assert peer.counters.internal == 3
    assert len(caplog.records) == 1
    assert isinstance(ask(peer, RankQuery(pp_rank=0, tp_rank=0)), PeerAnswer)
