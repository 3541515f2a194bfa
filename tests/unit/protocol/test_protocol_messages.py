"""The wire form: everything that may be said comes back equal; everything else is refused, and nothing escapes."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import PROMPT, address, messages, registers

from kvpush.protocol import messages as wire
from kvpush.protocol.ids import PeerAddress, SendKey, TransferId
from kvpush.protocol.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TABLE_BYTES,
    Accepted,
    Announce,
    Cancel,
    Commit,
    Failed,
    Lease,
    MalformedMessage,
    Message,
    PieceDigest,
    Ping,
    Quiet,
    Register,
    Release,
    decode,
    encode,
    reason_text,
)
from kvpush.protocol.pings import MAX_NAMES
from kvpush.protocol.send import MAX_STREAMED_PIECES

pytestmark = pytest.mark.unit

KEY = SendKey(TransferId("t"), 0)
HEADER = b"kvp" + bytes([wire.VERSION])
REGISTER = Register(KEY, 1, PROMPT, 0, [b"\x00"], address())


def refused(payload: bytes) -> str:
    with pytest.raises(MalformedMessage) as caught:
        decode(payload)
    return str(caught.value)


def changed(message: Message, **values: object) -> bytes:
    """The wire form of a message with some fields replaced, as a peer without our checks would send it."""
    fields = msgspec.msgpack.decode(encode(message)[4:])
    fields.update(values)
    return HEADER + msgspec.msgpack.encode(fields)


@given(messages)
@settings(max_examples=150, deadline=None)
def test_every_message_comes_back_equal(message: Message) -> None:
    payload = encode(message)
    assert payload[:4] == HEADER
    assert decode(payload) == message
    assert type(decode(payload)) is type(message)


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_refused(payload: bytes) -> None:
    refused(payload)
    refused(HEADER + payload)


@given(messages, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_damaged_message_is_refused_or_another_valid_one(message: Message, draw: random.Random) -> None:
    payload = bytearray(encode(message))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(payload))
        payload[at] ^= 1 << draw.randrange(8)
    try:
        other = decode(bytes(payload))
    except MalformedMessage:
        return
    assert decode(encode(other)) == other  # whatever gets through can stand in a message


@given(messages, st.data())
@settings(deadline=None)
def test_a_truncated_or_longer_message_is_refused(message: Message, data: st.DataObject) -> None:
    payload = encode(message)
    refused(payload[: data.draw(st.integers(0, len(payload) - 1))])
    refused(payload + data.draw(st.binary(min_size=1, max_size=20)))


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_msgpack_of_anything_else_is_refused(value: object) -> None:
    refused(HEADER + msgspec.msgpack.encode(value))


@given(
    registers, st.sampled_from(Register.__struct_fields__), st.sampled_from([None, -1, "x", [], {}, 2**63, b"", 0.5])
)
@settings(max_examples=100, deadline=None)
def test_a_field_of_another_type_is_refused_or_allowed_by_its_type(message: Register, name: str, value: object) -> None:
    payload = changed(message, **{name: value})
    try:
        assert isinstance(decode(payload), Register)
    except MalformedMessage:
        return
    assert name in ("attempt", "first_token") or value in ("x", [], 0)


def test_a_megabyte_is_refused_without_being_read() -> None:
    assert str(MAX_MESSAGE_BYTES) in refused(HEADER + b"\x00" * 1_000_000)
    assert "1000004 bytes" in refused(HEADER + b"\xdd\xff\xff\xff\xff" + b"\x00" * 999_995)


def test_deep_nesting_is_refused() -> None:
    refused(HEADER + b"\x91" * 60_000)
    refused(HEADER + b"\x81\xa1t" * 20_000)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "magic"),
        (b"kv", "magic"),
        (b"xyz\x01", "magic"),
        (b"kvp", "version missing"),
        (b"kvp\x01" + encode(REGISTER)[4:], "version 1, this side speaks 2"),
        (b"kvp\x00", "version 0"),
        (HEADER, "truncated"),
        (HEADER + msgspec.msgpack.encode({"t": "steal", "key": ["t", 0]}), "steal"),
        (HEADER + msgspec.msgpack.encode({"key": ["t", 0], "attempt": 1}), "t"),
        (HEADER + msgspec.msgpack.encode([]), "object"),
    ],
)
def test_the_refusal_says_what_is_wrong(payload: bytes, says: str) -> None:
    assert says in refused(payload)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (changed(REGISTER, extra=1), "extra"),
        (changed(REGISTER, key=["", 0, 0, 0]), "transfer_id is empty"),
        (changed(REGISTER, key=["x" * 257, 0, 0, 0]), "longer than 256 bytes"),
        (changed(REGISTER, key=["a\nb", 0, 0, 0]), "unprintable"),
        (changed(REGISTER, key=["t", 1024, 0, 0]), "consumer must be 0 to 1023"),
        (changed(REGISTER, key=["t", -1, 0, 0]), "consumer must be 0 to 1023"),
        (changed(REGISTER, key=["t", 1, 0, 0]), "consumer 1 of 1"),
        (changed(REGISTER, key=["t", 0, 0, 70000]), "ranks of a key"),
        (changed(REGISTER, key=["t", 0, 0, 1]), "speaks for another rank"),
        (changed(REGISTER, key=["t", 0, 0, 0, 9]), "length"),
        (changed(REGISTER, key=["t"]), "length"),
        (changed(REGISTER, attempt=0), "attempt"),
        (changed(REGISTER, attempt="1"), "attempt"),
        (changed(REGISTER, first_token=100), "first_token 100 is not below"),
        (changed(REGISTER, first_token=-1), "first_token"),
        (changed(REGISTER, prompt=[0, b"x" * 16]), "num_tokens"),
        (changed(REGISTER, prompt=[2**31, b"x" * 16]), "num_tokens"),
        (changed(REGISTER, prompt=[5, b"x" * 15]), "digest must have 16 bytes"),
        (changed(REGISTER, blocks=[]), "0 KV cache groups"),
        (changed(REGISTER, blocks=[b""] * 65), "65 KV cache groups"),
        (changed(REGISTER, blocks=b"abc"), "blocks"),
        (changed(REGISTER, consumers=0), "consumers"),
        (changed(REGISTER, consumers=1025), "consumers"),
        (changed(REGISTER, targets=0), "targets"),
        (changed(REGISTER, part=1), "part 1 of 1"),
        (changed(REGISTER, parts=257), "parts"),
        (changed(REGISTER, sender=["", 1, 0, 0]), "host of the sender is empty"),
        (changed(REGISTER, sender=["h", 0, 0, 0]), "port of the sender"),
        (changed(REGISTER, sender=["h", 65536, 0, 0]), "port of the sender"),
        (changed(REGISTER, sender=["h", 1, -1, 0]), "ranks of the sender"),
        (changed(Announce(TransferId("t"), PROMPT, address()), transfer_id=""), "transfer_id is empty"),
        (changed(Ping(1, address()), registered=[[["t" * 300, 0], 1]]), "longer than 256"),
        (changed(Ping(1, address()), announced=["a\x00"]), "unprintable"),
        (changed(Ping(1, address()), seq=-1), "seq"),
        (changed(Commit(KEY, 1, 1, 1, 1), digests=[[3, 3, b"x"]]), "cannot hold tokens 3 to 3"),
        (changed(Commit(KEY, 1, 1, 1, 1), digests=[[-1, 3, b"x"]]), "cannot hold tokens -1"),
        (changed(Commit(KEY, 1, 1, 1, 1), digests=[[0, 3, b""]]), "digest has 1 to 32 bytes"),
        (changed(Commit(KEY, 1, 1, 1, 1), num_bytes=2**62 + 1), "num_bytes"),
        (changed(Failed(KEY, 1, "x", True), reason="x" * 513), "reason"),
        (changed(Failed(KEY, 1, "x", True), quiet=1), "quiet"),
        (changed(Release(KEY, 1, address()), attempt=0), "attempt"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(payload: bytes, says: str) -> None:
    assert says in refused(payload)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"consumers": 2000}, "consumers must be"),
        ({"targets": 0}, "targets must be"),
        ({"parts": 300}, "at most 256"),
        ({"part": -1}, "part -1"),
        ({"blocks": []}, "KV cache groups"),
        ({"first_token": -1}, "must not be negative"),
        ({"first_token": 100}, "not below"),
        ({"sender": PeerAddress("d", 1, 0, 3)}, "another rank"),
        ({"key": SendKey(TransferId("x" * 257), 0)}, "longer than"),
    ],
)
def test_what_would_be_refused_cannot_be_built_here(values: dict[str, object], says: str) -> None:
    fields = {name: getattr(REGISTER, name) for name in Register.__struct_fields__} | values
    with pytest.raises(ValueError, match=says):
        Register(**fields)  # type: ignore[arg-type]


def test_a_message_that_is_too_long_is_refused_before_it_leaves() -> None:
    with pytest.raises(ValueError, match="Register of"):
        encode(Register(KEY, 1, PROMPT, 0, [b"x" * MAX_MESSAGE_BYTES], address()))


def longest_key(sender: PeerAddress) -> SendKey:
    return SendKey(TransferId("x" * 256), 1023, sender.pp_rank, sender.tp_rank)


LONGEST_SENDER = PeerAddress("h" * 256, 65535, 65535, 65535)


def test_the_longest_block_table_fits_beside_the_longest_names() -> None:
    key = longest_key(LONGEST_SENDER)
    message = Register(
        key, 2**62, PROMPT, 0, [b"x" * (MAX_TABLE_BYTES // 64)] * 64, LONGEST_SENDER, 1024, 1024, 255, 256
    )
    assert decode(encode(message)) == message


def test_the_longest_ping_fits() -> None:
    leases = [Lease(longest_key(LONGEST_SENDER), 2**62)] * MAX_NAMES
    announced = [TransferId("x" * 256)] * MAX_NAMES
    message = Ping(2**62, LONGEST_SENDER, leases, announced)
    assert decode(encode(message)) == message
    assert len(encode(message)) > MAX_MESSAGE_BYTES // 2  # or the limit on names is needlessly low


def test_the_longest_commit_fits() -> None:
    digests = [PieceDigest(2**31 - 2, 2**31 - 1, b"x" * 32)] * (MAX_STREAMED_PIECES + 1)
    message = Commit(longest_key(LONGEST_SENDER), 2**62, 2**62, 2**62, 2**62, digests)
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", [Accepted(KEY, 1), Quiet(KEY, 1), Cancel(KEY, 1, address())])
def test_small_messages_are_small(message: Message) -> None:
    assert len(encode(message)) < 100


@given(st.text())
@settings(deadline=None)
def test_any_reason_fits_into_a_message(text: str) -> None:
    reason = reason_text(text)
    assert decode(encode(Failed(KEY, 1, reason, quiet=True))) == Failed(KEY, 1, reason, quiet=True)
    if len(text) <= wire.MAX_REASON and text.isprintable():
        assert reason == text


def test_a_reason_from_undecodable_bytes_fits() -> None:
    reason = reason_text(b"peer \xff\xfe".decode("utf-8", "surrogateescape"))
    assert encode(Failed(KEY, 1, reason, quiet=True))


def test_directions_do_not_overlap() -> None:
    to_producer, to_consumer = set(wire.ToProducer.__args__), set(wire.ToConsumer.__args__)
    assert to_producer.isdisjoint(to_consumer)
    assert to_producer | to_consumer == set(wire.Message.__args__)
