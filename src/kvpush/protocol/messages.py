"""The messages of the push protocol and their wire form.

A message is a msgspec struct in a tagged union, msgpack behind a magic and a version, at most 64 KiB. They travel as
notifications between ranks; the transport adds the sender's agent name, so no message has to carry it.
Decoding never raises anything but `MalformedMessage`: what arrives from the network is counted and dropped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvpush.protocol.ids import MAX_RANK, PeerAddress, SendKey, TransferId, check_address, check_id
from kvpush.protocol.prompt import PromptIdentity

MAGIC = b"kvp"
VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TABLE_BYTES = 60 * 1024
"""Encoded block tables in one registration: leaves room for the longest ids and addresses around them."""
MAX_CONSUMERS = 1024
MAX_TARGETS = 1024
MAX_PARTS = 256
MAX_GROUPS = 64
MAX_DIGEST_BYTES = 32
MAX_REASON = 120
MAX_SLOTS = 4096
"""Staging slots of one rank of D."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Attempt = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
Use = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class MalformedMessage(ValueError):
    """Bytes that are no message of this protocol version; the text says what is wrong with them."""


def check_key(key: SendKey) -> None:
    """Raises ValueError unless the key can stand in a message."""
    check_id(key.transfer_id, "transfer_id")
    if not 0 <= key.consumer < MAX_CONSUMERS:
        raise ValueError(f"consumer must be 0 to {MAX_CONSUMERS - 1}, got {key.consumer}")
    for rank in (key.pp_rank, key.tp_rank):
        if not 0 <= rank <= MAX_RANK:
            raise ValueError(f"the ranks of a key must be 0 to {MAX_RANK}, got {rank}")


def reason_text(reason: str) -> str:
    """A reason in a form that fits into a message, whatever it was made from."""
    return reason.encode("utf-8", "replace").decode()[:MAX_REASON]


class _Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Base of all messages; checks the names that they carry."""

    def __post_init__(self) -> None:
        key: SendKey | None = getattr(self, "key", None)
        sender: PeerAddress | None = getattr(self, "sender", None)
        if key is not None:
            check_key(key)
        if sender is not None:
            check_address(sender, "the sender")
            if key is not None and key != key.at(sender):
                raise ValueError(f"{sender} speaks for another rank: {key}")


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registration that D counts on."""

    key: SendKey
    attempt: Attempt


class Announce(_Message, frozen=True, tag="announce"):
    """D to P: D's scheduler has the request, but no blocks for it yet."""

    transfer_id: TransferId
    prompt: PromptIdentity
    sender: PeerAddress

    def __post_init__(self) -> None:
        super().__post_init__()
        check_id(self.transfer_id, "transfer_id")


class Register(_Message, frozen=True, tag="register"):
    """D to P: write this prompt's KV into these blocks.

    attempt: the number of this registration among all that the sending rank ever made, so that nothing that was meant
    for an earlier use of the same transfer id can be taken for this one. blocks: one encoded block table per KV cache
    group, of part `part` of `parts` (a long table is split). first_token: the first token that D does not hold.
    consumers: how many D requests share the transfer. targets: to how many ranks of the sender's engine this rank of P
    writes for this consumer, the sender included. sender: where P learns how to reach D. direct: P may write into the
    blocks themselves; otherwise only into the staging slots that it was granted.
    """

    key: SendKey
    attempt: Attempt
    prompt: PromptIdentity
    first_token: Count
    blocks: list[bytes]
    sender: PeerAddress
    consumers: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONSUMERS)] = 1
    targets: Annotated[int, msgspec.Meta(ge=1, le=MAX_TARGETS)] = 1
    part: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)] = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1
    direct: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # What only decoding checks would let this side send what the other one drops.
        for name, value, most in (("consumers", self.consumers, MAX_CONSUMERS), ("targets", self.targets, MAX_TARGETS)):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be 1 to {most}, got {value}")
        if not 1 <= self.parts <= MAX_PARTS or not 0 <= self.part < self.parts:
            raise ValueError(f"part {self.part} of {self.parts}, at most {MAX_PARTS} are allowed")
        if not 1 <= len(self.blocks) <= MAX_GROUPS:
            raise ValueError(f"{len(self.blocks)} KV cache groups, must be 1 to {MAX_GROUPS}")
        if self.first_token < 0:
            raise ValueError(f"first_token must not be negative, got {self.first_token}")
        if self.first_token >= self.prompt.num_tokens:
            raise ValueError(
                f"first_token {self.first_token} is not below the prompt's {self.prompt.num_tokens} tokens"
            )
        if self.key.consumer >= self.consumers:
            raise ValueError(f"consumer {self.key.consumer} of {self.consumers}")


class Release(_Message, frozen=True, tag="release"):
    """D to P: this consumer needs nothing (its cache holds the prompt, or the request was rejected).

    attempt: numbered like a registration, so that a late copy is not taken for a new use of the transfer id.
    all_consumers: nor does any other one that has not registered.
    """

    key: SendKey
    attempt: Attempt
    sender: PeerAddress
    all_consumers: bool = False


class Cancel(_Message, frozen=True, tag="cancel"):
    """D to P: stop writing for all attempts up to this one, and say `Quiet` when nothing is in flight."""

    key: SendKey
    attempt: Attempt
    sender: PeerAddress


class Ping(_Message, frozen=True, tag="ping"):
    """D to P: are you there, and do you know these? Keeps the lease of every transfer that it names."""

    seq: Count
    sender: PeerAddress
    registered: list[Lease] = []
    announced: list[TransferId] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        for lease in self.registered:
            check_key(lease.key)
        for transfer_id in self.announced:
            check_id(transfer_id, "transfer_id")


class Grant(_Message, frozen=True, tag="grant"):
    """D to P: these staging slots are yours to write, until your process ends."""

    sender: PeerAddress
    slots: Annotated[list[Slot], msgspec.Meta(max_length=MAX_SLOTS)]


class Credit(_Message, frozen=True, tag="credit"):
    """D to P: what use `use` of a slot has brought is unpacked, or not wanted; the slot may be written again."""

    sender: PeerAddress
    slot: Slot
    use: Use


class Staged(_Message, frozen=True, tag="staged"):
    """P to D: blocks [first_block, first_block + num_blocks) of the registration's table stand packed in a slot.

    use: counts up with every use of a slot by this incarnation, so that repeated and late messages are told apart.
    """

    key: SendKey
    attempt: Attempt
    slot: Slot
    use: Use
    first_block: Count
    num_blocks: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Pong(_Message, frozen=True, tag="pong"):
    """P to D: the answer; `known` are those of the ping's registrations that P holds, or whose end it remembers."""

    seq: Count
    known: list[SendKey] = []


class Accepted(_Message, frozen=True, tag="accepted"):
    """P to D: registration and request have met, and the prompts are equal."""

    key: SendKey
    attempt: Attempt


class PieceDigest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Digest of tokens [first_token, end_token) of one rank's KV, taken when the piece was pushed."""

    first_token: int
    end_token: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.first_token < self.end_token < 2**31:
            raise ValueError(f"a piece cannot hold tokens {self.first_token} to {self.end_token}")
        if not 1 <= len(self.digest) <= MAX_DIGEST_BYTES:
            raise ValueError(f"a digest has 1 to {MAX_DIGEST_BYTES} bytes, got {len(self.digest)}")


class Commit(_Message, frozen=True, tag="commit"):
    """P to D: every byte that this P rank owes for tokens [first_token, num_tokens) has landed.

    staged_blocks: how many blocks of this attempt have come by way of staging slots, all of which D gave credit for.
    """

    key: SendKey
    attempt: Attempt
    num_tokens: Count
    num_bytes: Count
    num_writes: Count
    digests: list[PieceDigest] = []
    staged_blocks: Count = 0


class Failed(_Message, frozen=True, tag="failed"):
    """P to D: will not deliver. quiet: nothing is in flight and nothing will be posted (else `Quiet` follows)."""

    key: SendKey
    attempt: Attempt
    reason: Text
    quiet: bool


class Quiet(_Message, frozen=True, tag="quiet"):
    """P to D: for all attempts up to this one nothing is in flight and nothing will be posted."""

    key: SendKey
    attempt: Attempt


ToProducer = Announce | Register | Release | Cancel | Ping | Grant | Credit
ToConsumer = Accepted | Commit | Failed | Quiet | Pong | Staged
Message = ToProducer | ToConsumer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_HEADER = MAGIC + bytes([VERSION])


def encode(message: Message) -> bytes:
    """The wire form. Raises ValueError if it would exceed 64 KiB (the caller splits long block tables)."""
    payload = _HEADER + _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(payload)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return payload


def decode(payload: bytes) -> Message:
    """The message in `payload`. Raises MalformedMessage, and nothing else, for any other bytes."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(payload)} bytes exceed {MAX_MESSAGE_BYTES}")
    if payload[:3] != MAGIC:
        raise MalformedMessage("no kvpush message (wrong magic)")
    if len(payload) < 4 or payload[3] != VERSION:
        raise MalformedMessage(
            f"protocol version {payload[3] if len(payload) > 3 else 'missing'}, this side speaks {VERSION}"
        )
    try:
        return _decoder.decode(memoryview(payload)[4:])
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(str(error)) from None
