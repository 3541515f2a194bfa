"""When a request of P ends, what the engine may not say, and what goes under pressure."""

from __future__ import annotations

import pytest
from protocol_cases import PROMPT, TIMING, Stage, T, pieces, streaming

from kvpush.protocol.actions import ReportFailed, ReportReceived, ReportReleased, ReportSent, SendEnded, TransferUnknown
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.protocol.messages import MAX_CONSUMERS, Failed

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


# The end of a request


def test_an_aborted_request_waits_for_its_writes_and_then_for_a_bounded_time() -> None:
    stage = streaming()
    [p] = stage.p
    stage.engine("on_aborted", P)
    assert not p.reports(ReportSent)
    stage.wait(TIMING.abort_drain_s)
    assert not p.reports(ReportSent)
    stage.wait(0.5)
    assert p.reports(ReportSent) == [ReportSent(P)]
    assert p.machine.send(KEY).poisoned
    stage.land_all()
    stage.flush()
    assert stage.d[0].log[-1] == ReportReleased(D)
    assert len(p.reports(ReportSent)) == 1
    assert stage.idle()


def test_the_drain_is_counted_from_the_failure_not_from_the_finish() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.compute_all(P)
    stage.wait(TIMING.abort_drain_s * 5, deliver=True)
    stage.do(p, p.machine.on_unreachable(d.agent, "gone", stage.now_s))
    stage.wait(TIMING.abort_drain_s / 2)
    assert not p.reports(ReportSent)
    stage.wait(TIMING.abort_drain_s)
    assert p.reports(ReportSent)


def test_an_aborted_request_gives_its_blocks_back_at_once_if_nothing_reads_them() -> None:
    stage = streaming()
    stage.land_all()
    [p] = stage.p
    stage.do(p, p.machine.on_aborted(P, stage.now_s, "client left"))
    assert p.reports(ReportSent)
    assert stage.take(Failed).message == Failed(KEY, 1, "client left", quiet=True)


def test_who_comes_after_an_abort_is_told_at_once() -> None:
    stage = Stage()
    stage.engine("on_aborted", stage.request())
    stage.register()
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "aborted"), ReportReleased(D)]
    assert stage.idle()


def test_an_abort_while_a_sibling_writes() -> None:
    """sibling-in-flight at P: one write fails, the other one still reads the blocks."""
    stage = streaming()
    stage.compute_all(P)
    first, second = stage.writes
    stage.break_write(first)
    assert not stage.p[0].reports(ReportSent)
    stage.land(second)
    assert stage.p[0].reports(ReportSent)


def test_push_frees_promptly() -> None:
    stage = streaming()
    stage.compute_all(P)
    stage.land_all()
    assert stage.p[0].reports(ReportSent)  # before D has heard of anything


def test_the_engine_says_things_twice() -> None:
    stage = streaming()
    [p] = stage.p
    stage.compute_all(P)
    stage.engine("on_finished", P)
    stage.engine("on_aborted", P)
    stage.engine("on_aborted", P)
    stage.land_all()
    assert len(p.reports(ReportSent)) == 1
    assert len(p.reports(SendEnded)) == 1


# Calls that are wrong


@pytest.mark.parametrize(
    ("call", "values"),
    [("on_tokens", (1,)), ("on_preempted", ()), ("on_finished", ()), ("on_aborted", ()), ("on_poisoned", ())],
)
def test_a_request_that_is_not_known_is_a_local_fault(call: str, values: tuple[int, ...]) -> None:
    stage = Stage()
    with pytest.raises(ProtocolError, match="request p is not known") as caught:
        stage.engine(call, P, *values)
    assert caught.value.fault == "local"


@pytest.mark.parametrize("ready", [-1, 101])
def test_more_tokens_than_the_prompt_has_are_a_local_fault(ready: int) -> None:
    stage = Stage()
    stage.request()
    with pytest.raises(ProtocolError, match=f"{ready} tokens of p, its prompt has 100"):
        stage.engine("on_tokens", P, ready)


@pytest.mark.parametrize(
    ("name", "transfer_id", "consumers", "says"),
    [
        ("p", "u", 1, "request p is known already"),
        ("q", "t", 1, "transfer t already has a request"),
        ("q", "u", 0, "0 consumers, 1 to"),
        ("q", "u", MAX_CONSUMERS + 1, "1025 consumers"),
        ("q", "u", 10**12, "consumers"),
        ("q", "", 1, "transfer_id is empty"),
        ("q", "x" * 300, 1, "longer than 256"),
        ("q", "a\nb", 1, "unprintable"),
    ],
)
def test_a_request_that_cannot_be_handed_over_is_refused(
    name: str, transfer_id: str, consumers: int, says: str
) -> None:
    """duplicate-transfer-id at P: the first one is unharmed."""
    stage = Stage()
    stage.request()
    with pytest.raises(ProtocolError, match=says) as caught:
        stage.request(name, transfer_id, consumers=consumers)
    assert caught.value.fault == "local"
    stage.register()
    stage.flush()
    stage.compute_all(P)
    stage.land_all()
    stage.flush()
    assert stage.d[0].reports(ReportReceived)
    assert stage.idle()


@pytest.mark.parametrize("call", ["on_written", "on_write_failed", "on_not_posted"])
def test_a_piece_that_is_not_in_flight_is_a_local_fault(call: str) -> None:
    stage = streaming()
    [p] = stage.p
    number = stage.writes[0].piece.piece
    values: dict[str, tuple[object, ...]] = {"on_written": (10, None), "on_write_failed": ("x",), "on_not_posted": ()}
    for key, piece in ((KEY, number + 1), (SendKey(TransferId("u"), 0), number)):
        with pytest.raises(ProtocolError, match="is not in flight") as caught:
            getattr(p.machine, call)(key, piece, *values[call], stage.now_s)
        assert caught.value.fault == "local"
    assert p.machine.in_flight(P) == 1
    stage.land_all()
    with pytest.raises(ProtocolError, match="is not in flight"):
        getattr(p.machine, call)(KEY, number, *values[call], stage.now_s)


def test_a_block_has_a_size() -> None:
    with pytest.raises(ValueError, match="block_size must be positive, got 0"):
        Stage(block_size=0)


# Pressure


def test_pressure_drops_the_oldest_request_that_nobody_has_registered_for() -> None:
    """both-pools-full: P cannot admit the head of its queue."""
    stage = Stage()
    [p] = stage.p
    for number in range(4):
        stage.request(f"p{number}", f"t{number}")
        stage.now_s += 1.0
    for number in (2, 0, 1):  # the order in which they finish; the last one computes
        stage.compute_all(RequestId(f"p{number}"))
        stage.now_s += 1.0
    stage.register("d2", "t2")
    stage.flush()
    for expected in ("0", "1"):
        p.log.clear()
        stage.do(p, p.machine.on_pressure(stage.now_s))
        assert p.log == [TransferUnknown(TransferId(f"t{expected}"), "pressure"), ReportSent(RequestId(f"p{expected}"))]
    assert p.machine.on_pressure(stage.now_s) == []
    stage.register("late", "t0")
    stage.flush()
    assert stage.d[0].log == [ReportFailed(RequestId("late"), "pressure"), ReportReleased(RequestId("late"))]


def test_pressure_also_drops_what_was_announced() -> None:
    """D announces because it is full itself: waiting for it would be the cycle."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.do(d, d.machine.announce(T, PROMPT, [p.address], stage.now_s))
    stage.flush()
    stage.do(p, p.machine.on_pressure(stage.now_s))
    assert p.reports(ReportSent)


def test_pressure_drops_a_request_whose_first_consumer_has_been_served() -> None:
    stage = Stage()
    [p] = stage.p
    stage.compute_all(stage.request(consumers=2))
    stage.register("d0", consumers=2)
    stage.flush()
    assert p.machine.on_pressure(stage.now_s) == []
    stage.land_all()
    stage.do(p, p.machine.on_pressure(stage.now_s))
    assert p.reports(ReportSent)
    stage.flush()
    assert stage.d[0].reports(ReportReceived)
    assert stage.idle()


def test_a_send_without_a_write_in_flight_posts_nothing_from_poisoned_blocks() -> None:
    """Poison alone says that the blocks are gone; the preemption that follows may take a moment."""
    stage = Stage(engines=2, connected=False)
    [p] = stage.p
    stuck, idle = stage.d
    stage.request(consumers=2)
    for consumer, rank in enumerate(stage.d):
        stage.register(f"d{consumer}", consumer=consumer, consumers=2, ranks=[rank])
    stage.flush()
    stage.do(p, p.machine.on_connected(stuck.agent, stage.now_s))
    stage.engine("on_tokens", P, 32)
    stage.engine("on_poisoned", P)
    stage.do(p, p.machine.on_connected(idle.agent, stage.now_s))
    stage.wait(0.5)
    assert pieces(stage.writes) == [(0, 32)]


def test_a_finished_request_that_is_poisoned_fails_those_without_a_write_too() -> None:
    stage = Stage(connected=False)
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.do(p, p.machine.on_poisoned(P, stage.now_s))
    stage.flush()
    assert d.log == [ReportFailed(D, "poisoned"), ReportReleased(D)]
    assert p.reports(ReportSent)
    assert stage.idle()


def test_a_request_is_not_given_back_while_a_send_of_it_could_go_on() -> None:
    """Whatever the counting of consumers says."""
    stage = Stage(connected=False)
    [p] = stage.p
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    local = p.machine._rendezvous.by_request(P)
    local.claims.close("a defect")
    assert p.machine._sends.settle(local) == []
