"""The client against peers that lie, forge, replay, stay silent or are something else."""

import pytest
from sidechannel_cases import (
    OTHER_SECRET,
    SECRET,
    engine,
    failure,
    query,
    rank,
    scripted_peer,
    tcp_peer,
)

from kvpush.transfer.sidechannel import PeerAnswer
from kvpush.transfer.sidechannel.envelope import MAGIC, VERSION, seal, unseal
from kvpush.transfer.sidechannel.messages import (
    Challenge,
    Refusal,
    WriterAnswer,
    decode_query,
    encode,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("greeting", "close", "codes"),
    [
        (b"", False, {"timeout"}),
        (b"", True, {"refused"}),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, {"malformed"}),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True, {"refused", "malformed"}),
        (bytes(range(256)) * 64, False, {"malformed"}),
        (b"K", False, {"timeout"}),
        (b"Kv", False, {"malformed"}),
        (MAGIC + bytes([VERSION]), False, {"timeout"}),
        (MAGIC + bytes([VERSION]), True, {"refused"}),
        (MAGIC + b"\x02", False, {"version"}),
        (MAGIC + bytes([VERSION]) + b"\xff\xff\xff\xff", False, {"malformed"}),
        (MAGIC + bytes([VERSION]) + bytes(4), False, {"malformed"}),
        (seal("answer", bytes(16), bytes(100), None)[:-1], False, {"timeout"}),
        (seal("answer", bytes(16), bytes(100), None)[:-1], True, {"refused"}),
    ],
)
def test_other_services_end_within_the_deadline(greeting, close, codes) -> None:
    with tcp_peer(greeting, close) as port:
        assert failure(port, timeout_s=0.3 if "timeout" in codes else 20.0).code in codes


def test_a_peer_that_stops_talking_times_out_with_how_far_it_got() -> None:
    with scripted_peer(lambda frame: None) as port:
        error = failure(port, timeout_s=0.5)
        assert error.code == "timeout"
        assert "no answer" in str(error)


def nonce_of(frame: bytes, secret: bytes | None = None) -> bytes:
    return unseal("query", frame, secret)[0]


def good_payload() -> bytes:
    return encode(PeerAnswer(engine=engine(), rank=rank()))


LIES = {
    "another rank": (
        "malformed",
        lambda f: seal("answer", nonce_of(f), encode(PeerAnswer(engine=engine(), rank=rank(1, 1))), None),
    ),
    "another engine": (
        "wrong_engine",
        lambda f: seal("answer", nonce_of(f), encode(PeerAnswer(engine=engine(engine_id="liar"), rank=rank())), None),
    ),
    "another question": (
        "malformed",
        lambda f: seal("answer", nonce_of(f), encode(WriterAnswer(engine=engine(), gone=True)), None),
    ),
    "another nonce": ("timeout", lambda f: seal("answer", bytes(16), good_payload(), None)),
    "another version": ("version", lambda f: MAGIC + b"\x02" + bytes(80)),
    "no envelope": ("malformed", lambda f: b"hello"),
    "an empty frame": ("malformed", lambda f: MAGIC + bytes([VERSION]) + bytes(4)),
    "half an answer": ("timeout", lambda f: seal("answer", nonce_of(f), good_payload(), None)[:-1]),
    "no message": ("malformed", lambda f: seal("answer", nonce_of(f), b"\xc1\xc1", None)),
    "too large": ("malformed", lambda f: seal("answer", nonce_of(f), bytes(5 * 1024 * 1024), None)),
    "endless challenges": (
        "malformed",
        lambda f: seal("answer", nonce_of(f), encode(Challenge(challenge=b"x")), None),
    ),
    "calls it malformed": (
        "malformed",
        lambda f: seal("answer", nonce_of(f), encode(Refusal(code="bad_request", message="\x1b[2J no")), None),
    ),
    "the question itself": ("malformed", lambda f: f),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_found(lie) -> None:
    code, reply = LIES[lie]
    with scripted_peer(reply) as port:
        # A short deadline only where it must pass.
        error = failure(port, expected="engine-1", timeout_s=0.6 if code == "timeout" else 20.0)
        assert error.code == code
        assert str(error).isprintable()


def test_a_recorded_answer_cannot_be_replayed() -> None:
    recorded: list[bytes] = []

    def record_then_replay(frame: bytes) -> bytes:
        if not recorded:
            recorded.append(seal("answer", nonce_of(frame, SECRET), good_payload(), SECRET))
        return recorded[0]

    with scripted_peer(record_then_replay) as port:
        assert query(port, secret=SECRET).rank == rank()
        assert failure(port, secret=SECRET, timeout_s=0.4).code == "timeout"


def test_without_the_secret_no_answer_is_believed() -> None:
    for forged in (None, OTHER_SECRET):
        with scripted_peer(
            lambda f, forged=forged: seal("answer", nonce_of(f, SECRET), good_payload(), forged)
        ) as port:
            assert failure(port, secret=SECRET, timeout_s=5.0).code == "bad_mac"


def test_the_question_carries_what_was_asked() -> None:
    seen: list[bytes] = []

    def remember(frame: bytes) -> bytes:
        seen.append(frame)
        return seal("answer", nonce_of(frame), encode(PeerAnswer(engine=engine(), rank=rank(1, 0))), None)

    with scripted_peer(remember) as port:
        query(port, 1, 0, "engine-1")
        query(port, 1, 0, "engine-1")
    first, second = (unseal("query", frame, None) for frame in seen)
    assert first[0] != second[0]
    assert first[1] == second[1]
    asked = decode_query(first[1])
    assert (asked.pp_rank, asked.tp_rank, asked.expected_engine_id) == (1, 0, "engine-1")  # type: ignore[union-attr]
