"""What strangers send to a live server: it counts it, ends the connection and goes on answering."""

import contextlib
import random
import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidechannel_cases import (
    SECRET,
    connect,
    ended,
    patient,
    question,
    read_frame,
    serving,
    still_answers,
    takes_at_most,
    until,
)
from test_sidechannel_responder import sealed_garbage, sealed_queries

from kvpush.transfer.sidechannel.envelope import MAGIC, VERSION
from kvpush.transfer.sidechannel.responder import MAX_QUESTION_BYTES

pytestmark = pytest.mark.unit

MIB = 1024 * 1024
SESSION = "kvpush.transfer.sidechannel.session"


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def live(request):
    with serving(request.param) as server:
        yield server, request.param


frames = st.lists(st.one_of(sealed_garbage, sealed_queries), max_size=6)
rubbish = st.one_of(st.just(b""), st.binary(min_size=1, max_size=300).filter(lambda data: data[:1] != MAGIC[:1]))


@settings(patient, max_examples=30)
@given(st.lists(st.tuples(frames, rubbish), min_size=1, max_size=6))
def test_a_live_server_counts_each_message_once_and_goes_on(live, conversations) -> None:
    server, secret = live
    before = server.counters.total()
    expected = sum(len(sent) + bool(rest) for sent, rest in conversations)
    for sent, rest in conversations:
        with connect(server) as stranger, contextlib.suppress(OSError):
            stranger.sendall(b"".join(sent) + rest)
            stranger.shutdown(socket.SHUT_WR)
            while read_frame(stranger) is not None:
                pass
    until(lambda: server.counters.total() >= before + expected)
    assert server.counters.total() == before + expected
    assert server.counters.internal == 0
    still_answers(server, secret)


def test_raw_bytes_do_not_stop_a_live_server(live) -> None:
    server, secret = live
    generator = random.Random(1)
    largest = (MAX_QUESTION_BYTES - 9).to_bytes(4, "big")
    # What a connection may have got to before it sends rubbish.
    prefixes = [b"", MAGIC, MAGIC + bytes([VERSION]), MAGIC + bytes([VERSION]) + largest, question(), question()[:-1]]
    for round_ in range(120):
        with connect(server) as stranger, contextlib.suppress(OSError):
            stranger.sendall(prefixes[round_ % len(prefixes)] + generator.randbytes(generator.randint(0, 6000)))
            if round_ % 5 == 0:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends in a reset
    still_answers(server, secret)
    assert server.counters.internal == 0


@pytest.mark.parametrize("length", [0, 48, MAX_QUESTION_BYTES - 9 + 1, 4 * MIB, 2**31, 2**32 - 1])
def test_a_length_out_of_bounds_ends_the_connection_before_anything_follows(length) -> None:
    with serving() as server, connect(server) as stranger:
        with takes_at_most(2.0):
            stranger.sendall(MAGIC + bytes([VERSION]) + length.to_bytes(4, "big"))
            assert ended(stranger)
        until(lambda: server.counters.dropped == 1)
        still_answers(server)


def test_half_questions_and_drips_end_in_time(monkeypatch) -> None:
    """Each byte in time, but not the whole: the connection is closed all the same."""
    monkeypatch.setattr(f"{SESSION}.QUESTION_S", 0.6)
    with serving() as server, connect(server) as silent, connect(server) as half, connect(server) as drip:
        start_s = time.monotonic()
        half.sendall(question()[:-1])
        drip.settimeout(0.05)
        with takes_at_most(2.0):
            for byte in question() * 20:
                try:
                    drip.sendall(bytes([byte]))
                    if not drip.recv(1):
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                pytest.fail("it could go on")
            assert ended(half)
            assert ended(silent)
        assert time.monotonic() - start_s > 0.5
        until(lambda: server.counters.dropped == 2)
        assert server.counters.silent == 1
        still_answers(server)
