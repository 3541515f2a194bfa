"""Frames are authentic or refused; challenges are fresh or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidechannel_cases import OTHER_SECRET, SECRET, patient

from kvpush.transfer.sidechannel.envelope import (
    CHALLENGE_LIFETIME_S,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    BadMac,
    Challenges,
    NotAnEnvelope,
    OtherVersion,
    frame_bytes,
    new_nonce,
    seal,
    secret_from_environment,
    unseal,
)

pytestmark = pytest.mark.unit
REFUSED = (NotAnEnvelope, OtherVersion, BadMac)
secrets = st.sampled_from([None, SECRET])
directions = st.sampled_from(["query", "answer"])
nonces = st.binary(min_size=16, max_size=16)


@patient
@given(directions, nonces, st.binary(max_size=200), secrets)
def test_what_is_sealed_is_unsealed(direction, nonce, payload, secret) -> None:
    assert unseal(direction, seal(direction, nonce, payload, secret), secret) == (nonce, payload)


@patient
@given(directions, nonces, st.binary(max_size=60), st.data())
def test_no_changed_byte_is_accepted(direction, nonce, payload, data) -> None:
    frame = bytearray(seal(direction, nonce, payload, SECRET))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(REFUSED):
        unseal(direction, bytes(frame), SECRET)


@patient
@given(directions, nonces, st.binary(max_size=60), st.data())
def test_no_shortened_or_lengthened_frame_is_accepted(direction, nonce, payload, data) -> None:
    frame = seal(direction, nonce, payload, SECRET)
    other = data.draw(
        st.one_of(
            st.integers(0, len(frame) - 1).map(lambda length: frame[:length]),
            st.binary(min_size=1, max_size=9).map(lambda more: frame + more),
        )
    )
    with pytest.raises(REFUSED):
        unseal(direction, other, SECRET)


@patient
@given(st.one_of(st.binary(max_size=300), st.binary(max_size=100).map(lambda tail: MAGIC + bytes([VERSION]) + tail)))
def test_random_bytes_raise_nothing_else(frame) -> None:
    for secret in (None, SECRET):
        try:
            nonce, payload = unseal("query", frame, secret)
        except REFUSED:
            continue
        assert secret is None
        assert len(nonce) == 16
        assert payload == frame[HEADER_BYTES:]


@patient
@given(nonces, st.binary(max_size=200), secrets, st.binary(max_size=40), st.integers(0, 300))
def test_a_reader_needs_no_byte_after_the_frame_and_reads_none(nonce, payload, secret, following, limit) -> None:
    """Whatever follows: what is asked for adds up to the frame, or is refused because it exceeds the limit."""
    frame = seal("query", nonce, payload, secret)
    stream, read = frame + following, b""
    try:
        while (size := frame_bytes(read, limit)) != len(read):
            assert size > len(read)
            assert size <= max(limit, 9)
            read = stream[:size]
    except NotAnEnvelope:
        assert len(frame) > limit
        assert len(read) == 9
        return
    assert read == frame


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (b"G", NotAnEnvelope),
        (b"KVS" + b"K", NotAnEnvelope),
        (MAGIC + b"\x00", OtherVersion),
        (MAGIC + bytes([VERSION]) + b"\xff\xff\xff\xff", NotAnEnvelope),
        (MAGIC + bytes([VERSION]) + (HEADER_BYTES - 9 - 1).to_bytes(4, "big"), NotAnEnvelope),
        (MAGIC + bytes([VERSION]) + (1000 - 9 + 1).to_bytes(4, "big"), NotAnEnvelope),
    ],
)
def test_what_cannot_become_a_frame_is_refused_at_the_first_byte_that_shows_it(start, error) -> None:
    with pytest.raises(error):
        frame_bytes(start, 1000)
    # All that went before could still have become one.
    for length in range(len(start)):
        assert length < frame_bytes(start[:length], 1000) <= 9


def test_a_question_is_no_answer() -> None:
    with pytest.raises(BadMac, match="different"):
        unseal("answer", seal("query", new_nonce(), b"payload", SECRET), SECRET)


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (SECRET, OTHER_SECRET, "different values of KVPUSH_SECRET"),
        (SECRET, None, "the other side has KVPUSH_SECRET, this side has none"),
        (None, SECRET, "this side has KVPUSH_SECRET, the other side has none"),
    ],
)
def test_the_text_says_which_secret_is_wrong(theirs, ours, text) -> None:
    nonce = new_nonce()
    with pytest.raises(BadMac, match=text) as caught:
        unseal("query", seal("query", nonce, b"payload", theirs), ours)
    assert caught.value.nonce == nonce


def test_another_version_is_told_from_garbage_whatever_follows() -> None:
    for tail in (b"", b"x", bytes(500)):
        with pytest.raises(OtherVersion, match="version 9, this side 1") as caught:
            unseal("query", MAGIC + b"\x09" + tail, SECRET)
        assert caught.value.version == 9


def test_a_challenge_is_good_for_its_lifetime_and_for_its_issuer_only() -> None:
    mine, other = Challenges(), Challenges()
    challenge = mine.issue(1000.0)
    assert mine.good(challenge, 1000.0)
    assert mine.good(challenge, 1000.0 + CHALLENGE_LIFETIME_S)
    assert not mine.good(challenge, 1000.1 + CHALLENGE_LIFETIME_S)
    assert not mine.good(challenge, 999.0)
    assert not other.good(challenge, 1000.0)
    assert not mine.good(b"", 1000.0)


@patient
@given(st.data(), st.floats(0, 1e9))
def test_no_changed_challenge_is_good(data, now_s) -> None:
    challenges = Challenges()
    changed = bytearray(challenges.issue(now_s))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    assert challenges.good(challenges.issue(now_s), now_s)
    assert not challenges.good(bytes(changed), now_s)


@pytest.mark.parametrize(
    ("value", "secret"), [(None, None), ("", None), (" \n", None), ("s3\n", b"s3"), ("ä", b"\xc3\xa4")]
)
def test_the_secret_comes_from_the_environment(monkeypatch, value, secret) -> None:
    monkeypatch.delenv("KVPUSH_SECRET", raising=False)
    if value is not None:
        monkeypatch.setenv("KVPUSH_SECRET", value)
    assert secret_from_environment() == secret
