"""Messages that got lost, were forgotten, or make no sense, as D sees them."""

from __future__ import annotations

import pytest
from protocol_cases import PROMPT, TIMING, Stage, T, address, streaming

from kvpush.protocol.actions import (
    ReportFailed,
    ReportReceived,
    ReportReleased,
    Verify,
)
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId, SendKey, TransferId
from kvpush.protocol.messages import MAX_TABLE_BYTES, Accepted, Commit, Failed, Ping, Pong, Quiet, Register
from kvpush.protocol.transitions import ReceiveState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
D = RequestId("d")
RELEASED = ReportReleased(D)


# What P has forgotten, or never got


def test_a_registration_that_got_lost_is_sent_again() -> None:
    stage = Stage()
    [d] = stage.d
    stage.request()
    stage.register(parts=2)
    stage.mail.clear()
    stage.wait(TIMING.ping_interval_s + 0.5, deliver=True)
    assert d.machine.receive(D).state is ReceiveState.ACCEPTED
    assert stage.p[0].machine.send(KEY).attempt == 1


def test_a_rank_whose_registration_got_lost_is_asked_again_though_another_has_committed() -> None:
    stage = Stage(p_ranks=2)
    stage.compute_all(stage.request())
    stage.register()
    stage.mail = [letter for letter in stage.mail if letter.receiver is stage.p[0]]
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.wait(TIMING.ping_interval_s + 0.5, deliver=True)
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 2000)]


def test_a_lost_commit_is_repeated_when_d_asks() -> None:
    stage = streaming()
    stage.compute_all(RequestId("p"))
    stage.land_all()
    stage.mail.clear()
    assert stage.p[0].machine.idle
    stage.wait(TIMING.ping_interval_s + 0.5, deliver=True)
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_lost_failure_is_repeated_when_d_asks(in_flight: bool) -> None:
    """Also while writes keep P from saying quiet, or D would wait for ever."""
    stage = streaming()
    if not in_flight:
        stage.land_all()
    stage.engine("on_aborted", RequestId("p"))
    stage.mail.clear()
    stage.wait(TIMING.ping_interval_s + 0.5, deliver=True)
    assert stage.d[0].log == [ReportFailed(D, "aborted")] + ([] if in_flight else [RELEASED])


def test_a_peer_that_has_forgotten_what_it_accepted_is_a_failure() -> None:
    stage = streaming()
    [old], [d] = stage.p, stage.d
    stage.land_all()
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    ping = stage.take(Ping).message
    assert isinstance(ping, Ping)
    stage.do(d, d.machine.on_message(old.agent, Pong(ping.seq, []), stage.now_s))
    assert d.log == [ReportFailed(D, "forgotten")]
    stage.flush()
    assert d.log == [ReportFailed(D, "forgotten"), RELEASED]


def test_a_pong_that_left_before_the_registration_came_is_no_failure() -> None:
    """The ping overtook the registration; its answer arrives after the acceptance."""
    stage = Stage()
    [d] = stage.d
    stage.request()
    stage.register()
    register = stage.take(Register)
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    stage.arrive(stage.find(Ping)[0])
    pong = stage.take(Pong)
    assert pong.message == Pong(1, [])
    stage.arrive(register)
    stage.flush()
    assert d.machine.receive(D).state is ReceiveState.ACCEPTED
    stage.arrive(pong)
    assert d.log == []
    assert not stage.find(Register)


def test_a_pong_about_an_earlier_attempt_says_nothing() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    ping = stage.take(Ping).message
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    assert isinstance(ping, Ping)
    stage.mail.clear()
    stage.do(d, d.machine.on_message(p.agent, Pong(ping.seq, []), stage.now_s))
    assert not stage.mail
    assert d.log == []


def test_a_pong_counts_once_and_strangers_do_not_count() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.register()
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    stage.mail.clear()
    assert d.machine.on_message(p.agent, Pong(77, []), stage.now_s) == []
    assert len(d.machine.on_message(p.agent, Pong(1, []), stage.now_s)) == 1
    assert d.machine.on_message(p.agent, Pong(1, []), stage.now_s) == []


def test_an_earlier_use_of_the_key_is_not_taken_for_a_lease() -> None:
    """The registration of the second use got lost; P remembers the end of the first one under the same key."""
    stage = Stage()
    stage.compute_all(stage.request("p0"))
    stage.register("d0")
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.request("p1")
    stage.register("d1")
    stage.mail.clear()
    stage.wait(TIMING.ping_interval_s + 0.5, deliver=True)
    assert stage.d[0].machine.receive(RequestId("d1")).state is ReceiveState.ACCEPTED


# What makes no sense


def test_messages_from_who_was_not_asked_are_dropped() -> None:
    stage = streaming()
    [d] = stage.d
    for message in (Commit(KEY, 1, 100, 1, 1), Quiet(KEY, 1), Failed(KEY, 1, "x", quiet=True), Accepted(KEY, 1)):
        with pytest.raises(ProtocolError, match="stranger was not asked") as caught:
            d.machine.on_message(AgentName("stranger"), message, stage.now_s)
        assert caught.value.fault == "peer"
    assert d.machine.receive(D).active
    assert d.log == []


@pytest.mark.parametrize("message", [Commit(KEY, 2, 100, 1, 1), Quiet(KEY, 2), Failed(KEY, 2, "x", quiet=True)])
def test_an_attempt_that_was_never_made_is_a_fault(message: Quiet) -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    with pytest.raises(ProtocolError, match="attempt 2 of t#0/pp0tp0, the last one is 1"):
        d.machine.on_message(p.agent, message, stage.now_s)
    assert d.machine.receive(D).active


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("num_tokens", [99, 101])
def test_a_commit_of_something_else_is_a_fault(num_tokens: int, fenced: bool) -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    if fenced:
        stage.cancel(D)
    with pytest.raises(ProtocolError, match=f"commit of {num_tokens} tokens, 100 are owed"):
        d.machine.on_message(p.agent, Commit(KEY, 1, num_tokens, 1, 1), stage.now_s)
    assert d.machine.receive(D) is not None
    assert RELEASED not in d.log


def test_messages_about_what_is_not_there_do_nothing() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    for message in (Commit(KEY, 1, 100, 1, 1), Quiet(KEY, 1), Failed(KEY, 1, "x", quiet=True), Accepted(KEY, 1)):
        assert d.machine.on_message(p.agent, message, stage.now_s) == []


def test_an_acceptance_after_the_end_does_nothing() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.cancel(D)
    assert d.machine.on_message(p.agent, Accepted(KEY, 1), stage.now_s) == []
    assert d.machine.receive(D).state is ReceiveState.FAILING


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"request_id": RequestId("d")}, "is registered already"),
        ({"key": SendKey(TransferId("u"), 0)}, "is registered already"),
        ({"blocks": []}, "is empty"),
        ({"blocks": [[b"x"], [b"x", b"y"]]}, "differ in groups"),
        ({"blocks": [[b"x" * (MAX_TABLE_BYTES + 1)]]}, "exceeds"),
        ({"blocks": [[]]}, "0 KV cache groups"),
        ({"blocks": [[b"x"]] * 257}, "at most 256"),
        ({"ranks": []}, "no rank is expected"),
        ({"first_token": 100}, "first_token 100"),
        ({"first_token": -1}, "first_token"),
        ({"consumers": 0}, "consumers"),
        ({"consumers": 1, "key": SendKey(TransferId("v"), 1)}, "consumer 1 of 1"),
        ({"key": SendKey(TransferId("x" * 300), 0)}, "longer than 256"),
        ({"key": SendKey(TransferId(""), 0)}, "empty"),
        ({"targets": {address(0, "p"): 0}, "ranks": [address(0, "p")]}, "targets"),
    ],
    ids=str,
)
def test_a_registration_that_cannot_be_is_refused_and_nobody_hears_of_it(values: dict[str, object], says: str) -> None:
    stage = Stage()
    [d] = stage.d
    stage.register("d", "u")
    stage.mail.clear()
    fields = {
        "request_id": RequestId("new"), "key": KEY, "prompt": PROMPT, "first_token": 0, "blocks": [[b"x"]],
        "consumers": 2, "ranks": [stage.p[0].address], "now_s": stage.now_s,
    }  # fmt: skip
    with pytest.raises(ProtocolError, match=says) as caught:
        d.machine.register(**(fields | values))
    assert caught.value.fault == "local"
    assert d.machine.receive(RequestId("new")) is None
    assert d.machine.wants_sent(Register(SendKey(TransferId("u"), 0), 1, PROMPT, 0, [b"x"], d.address))
    [action] = d.machine.register(**fields)
    assert action.message.attempt == 2  # no number was used up


def test_a_key_is_free_again_only_when_its_memory_is() -> None:
    stage = streaming()
    [d] = stage.d
    stage.cancel(D)
    with pytest.raises(ProtocolError, match="registered already"):
        stage.register("d2")
    stage.land_all()
    stage.flush()
    stage.register("d2")
    assert d.machine.receive(RequestId("d2")).active


def test_a_release_that_cannot_be_sent_uses_no_number() -> None:
    stage = Stage()
    [d] = stage.d
    with pytest.raises(ValueError, match="transfer_id is empty"):
        d.machine.release(SendKey(TransferId(""), 0), [stage.p[0].address])


def test_verify_is_asked_for_only_when_there_are_digests() -> None:
    stage = streaming()
    stage.compute_all(RequestId("p"))
    stage.land(stage.writes[0])
    stage.land(stage.writes[0], b"x")
    stage.flush()
    assert [type(action) for action in stage.d[0].log] == [Verify]


def test_a_pong_about_a_rank_that_has_committed_since_is_no_failure() -> None:
    """Its tombstone has expired, so it knows nothing any more; the other rank still writes."""
    stage = Stage(p_ranks=2)
    [d] = stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    [ping] = [letter.message for letter in stage.find(Ping) if letter.receiver is stage.p[0]]
    assert isinstance(ping, Ping)
    stage.mail.clear()
    stage.land(stage.writes[0])
    stage.flush()
    stage.do(d, d.machine.on_message(stage.p[0].agent, Pong(ping.seq, []), stage.now_s))
    assert d.log == []
    assert not stage.mail


def test_no_answer_of_one_rank_though_another_has_committed() -> None:
    """The second rank lives and knows the registration, and never accepts it."""
    stage = Stage(p_ranks=2)
    [d] = stage.d
    stage.request(ranks=stage.p[:1])
    stage.engine("on_tokens", RequestId("p"), 100, ranks=stage.p[:1])
    stage.register()
    stage.flush()
    stage.land_all()
    stage.flush()
    silent = stage.p[1]
    for _ in range(int(TIMING.rendezvous_timeout_s + TIMING.peer_timeout_s)):
        stage.now_s += 1.0
        stage.do(d, d.machine.on_tick(stage.now_s))
        for letter in stage.find(Ping):
            stage.mail.remove(letter)
            stage.do(d, d.machine.on_message(silent.agent, Pong(letter.message.seq, [KEY]), stage.now_s))  # type: ignore[union-attr]
    assert d.log == []
    stage.now_s += 1.0
    stage.do(d, d.machine.on_tick(stage.now_s))
    assert d.log == [ReportFailed(D, "no_answer")]
