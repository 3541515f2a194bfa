"""One connection at the server's side, over a real socket pair and with an invented clock."""

import contextlib
import socket
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidechannel_cases import engine, patient, question, rank, ranks, read_frame

from kvpush.transfer.sidechannel.envelope import MAGIC, VERSION, new_nonce, seal, unseal
from kvpush.transfer.sidechannel.messages import PeerAnswer, Refusal, decode_answer
from kvpush.transfer.sidechannel.responder import MAX_QUESTION_BYTES, Responder
from kvpush.transfer.sidechannel.service import kernel_buffers
from kvpush.transfer.sidechannel.session import ANSWER_S, MAX_QUESTIONS, QUESTION_S, Session

pytestmark = pytest.mark.unit

LARGE = rank(metadata=bytes(3 * 1024 * 1024))
COUNTED = ("dropped", "silent", "unread", "answered", "version", "internal")


class Pair:
    """A session and the socket of its peer."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.peer.settimeout(5)
        self.responder = Responder(engine(), None)
        self.responder.set_ranks(ranks())
        self.session = Session(ours, self.responder, 100.0)

    def counted(self) -> dict[str, int]:
        """What is not 0 of what matters here."""
        counts = self.responder.counters.as_dict()
        assert counts["internal"] == 0
        return {name: counts[name] for name in COUNTED if counts[name]}


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        yield made
    finally:
        made.session.connection.close()
        made.peer.close()


def read_answer(peer: socket.socket) -> tuple[bytes, object]:
    frame = read_frame(peer)
    assert frame is not None
    nonce, payload = unseal("answer", frame, None)
    return nonce, decode_answer(payload)


@settings(patient, max_examples=50)
@given(st.lists(st.integers(1, 60), max_size=8), st.integers(1, 3))
def test_however_the_network_cuts_them_questions_are_answered_in_turn(sizes, count) -> None:
    nonces = [bytes([number]) * 16 for number in range(count)]
    stream = b"".join(question(nonce) for nonce in nonces)
    with pair() as it:
        for size in [*sizes, len(stream)]:
            piece, stream = stream[:size], stream[size:]
            it.peer.sendall(piece)
            for _ in range(count + 1):
                assert it.session.advance(100.0)
        for nonce in nonces:
            assert read_answer(it.peer) == (nonce, PeerAnswer(engine=engine(), rank=rank()))
        assert it.counted() == {"answered": count}


def test_a_peer_that_drips_gains_no_time() -> None:
    with pair() as it:
        for number, byte in enumerate(question()[:-1]):
            it.peer.sendall(bytes([byte]))
            assert it.session.advance(100.0 + number / 10)
            assert it.session.deadline_s == 100.0 + QUESTION_S
        it.session.close()
        assert it.counted() == {"dropped": 1}


def test_each_question_and_each_answer_has_its_own_time() -> None:
    with pair() as it:
        it.responder.set_ranks([LARGE])
        it.peer.sendall(question())
        assert it.session.advance(103.0)
        assert it.session.answering
        assert it.session.deadline_s == 103.0 + ANSWER_S
        it.peer.setblocking(False)
        while it.session.answering:
            with contextlib.suppress(BlockingIOError):
                it.peer.recv(1024 * 1024)
            assert it.session.advance(104.0)
            assert it.session.deadline_s == (103.0 + ANSWER_S if it.session.answering else 104.0 + QUESTION_S)
        assert it.session.since_s == 104.0


def test_nothing_is_read_and_nothing_copied_while_an_answer_waits() -> None:
    with pair() as it:
        it.responder.set_ranks([LARGE])
        tracemalloc.start()
        try:
            it.peer.sendall(question() * 10)
            for _ in range(50):
                assert it.session.advance(100.0)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 100_000
        assert it.counted() == {"answered": 1}
        it.session.close()
        assert it.counted() == {"answered": 1, "unread": 1}


def test_after_the_last_question_the_peer_still_gets_its_answers() -> None:
    with pair() as it:
        it.peer.sendall(question() * (MAX_QUESTIONS + 3))
        while it.session.advance(100.0) and it.counted()["answered"] < MAX_QUESTIONS:
            pass
        for _ in range(10):
            it.session.advance(100.0)  # what it was not asked for is read away, or the close would be a reset
        for _ in range(MAX_QUESTIONS):
            assert isinstance(read_answer(it.peer)[1], PeerAnswer)
        assert it.peer.recv(1) == b""
        it.peer.close()
        assert not it.session.advance(100.0)
        it.session.close()
        assert it.counted() == {"answered": MAX_QUESTIONS}


def test_another_version_is_told_ours_and_no_more_is_listened_to() -> None:
    with pair() as it:
        it.peer.sendall(MAGIC + b"\x09" + bytes(3000))
        for _ in range(5):
            assert it.session.advance(100.0)
        answer = read_answer(it.peer)[1]
        assert isinstance(answer, Refusal)
        assert answer.code == "version"
        assert it.peer.recv(1) == b""
        sent = 0
        it.peer.setblocking(False)
        while it.session.advance(100.0):
            with contextlib.suppress(BlockingIOError):
                sent += it.peer.send(question() * 100)
            assert sent < 1024 * 1024
        it.session.close()
        assert it.counted() == {"version": 1}


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"X",
        MAGIC + bytes([VERSION]) + b"\xff\xff\xff\xff",
        MAGIC + bytes([VERSION]) + (MAX_QUESTION_BYTES - 9 + 1).to_bytes(4, "big"),
        MAGIC + bytes([VERSION]) + bytes(4),
        question()[:9] + b"\x07" + question()[10:],  # neither sealed nor not
    ],
)
def test_what_is_no_question_ends_it_at_once(start) -> None:
    with pair() as it:
        it.peer.sendall(start + bytes(100))
        assert not it.session.advance(100.0)
        it.session.close()
        assert it.counted() == {"dropped": 1}


@pytest.mark.parametrize(
    ("sent", "counted"),
    [(b"", {"silent": 1}), (b"K", {"dropped": 1}), (question()[:-1], {"dropped": 1}), (question(), {"answered": 1})],
)
def test_how_a_connection_ended_is_counted(sent, counted) -> None:
    with pair() as it:
        it.peer.sendall(sent)
        it.peer.shutdown(socket.SHUT_WR)
        while it.session.advance(100.0):
            pass
        it.session.close()
        assert it.counted() == counted


def test_the_largest_question_is_read() -> None:
    with pair() as it:
        it.peer.sendall(seal("query", new_nonce(), bytes(4096), None))
        assert it.session.advance(100.0)
        answer = read_answer(it.peer)[1]
        assert isinstance(answer, Refusal)
        assert answer.code == "bad_request"


def test_a_peer_that_is_gone_is_no_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    for sent in (b"", b"K", question()):
        peer = socket.create_connection(listener.getsockname(), timeout=5)
        ours, _ = listener.accept()
        ours.setblocking(False)
        kernel_buffers(ours)
        responder = Responder(engine(), None)
        responder.set_ranks([LARGE])
        session = Session(ours, responder, 100.0)
        peer.sendall(sent)
        session.advance(100.0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # a reset
        assert not session.advance(100.0)
        session.close()
        counters = responder.counters
        assert (counters.silent, counters.dropped, counters.unread) == (sent == b"", sent == b"K", len(sent) > 1)
    listener.close()
