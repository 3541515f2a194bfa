"""Whatever arrives at a live core is counted, and neither raises nor hurts who comes after it."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_world import TIMING, World, identity

from kvpush.plan.block_table import encode_blocks
from kvpush.protocol import messages
from kvpush.protocol.ids import PeerAddress, SendKey, TransferId
from kvpush.protocol.messages import (
    Accepted,
    Announce,
    Cancel,
    Commit,
    Failed,
    Lease,
    Message,
    PieceDigest,
    Ping,
    Pong,
    Quiet,
    Register,
    Release,
    encode,
)

pytestmark = pytest.mark.unit

HEADER = messages.MAGIC + bytes([messages.VERSION])
SENDER = PeerAddress("X", 1000)
TOKENS = 10  # of the honest transfer

names = st.sampled_from(["t", "u"]).map(TransferId)
keys = st.builds(SendKey, names, st.integers(0, 2))
attempts = st.integers(1, 4) | st.just(2**62)
prompts = st.sampled_from([identity("p", TOKENS), identity("q", TOKENS), identity("p", 3)])
tables = st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True).map(lambda ids: [encode_blocks(ids)])
digests = st.builds(
    lambda first, length, digest: PieceDigest(first, first + length, digest),
    st.integers(0, 20), st.integers(1, 2**20), st.binary(min_size=1, max_size=32),
)  # fmt: skip
known: st.SearchStrategy[Message] = st.one_of(
    st.builds(Announce, names, prompts, st.just(SENDER)),
    st.builds(
        Register, keys, attempts, prompts, st.integers(0, 2), tables | st.lists(st.binary(max_size=20), min_size=1),
        st.just(SENDER), st.just(3), st.integers(1, 3),
    ),
    st.builds(Release, keys, attempts, st.just(SENDER), st.booleans()),
    st.builds(Cancel, keys, attempts, st.just(SENDER)),
    st.builds(Ping, st.integers(0, 9), st.just(SENDER), st.lists(st.builds(Lease, keys, attempts), max_size=3)),
    st.builds(Pong, st.integers(0, 9), st.lists(keys, max_size=3)),
    st.builds(Accepted, keys, attempts),
    st.builds(Commit, keys, attempts, st.sampled_from([TOKENS, 3, 2**62]), st.just(1), st.just(1),
              st.lists(digests, max_size=3)),
    st.builds(Failed, keys, attempts, st.text(max_size=9), st.booleans()),
    st.builds(Quiet, keys, attempts),
)  # fmt: skip


def _damaged(message: Message, draw: random.Random) -> bytes:
    payload = bytearray(encode(message))
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(payload))
        payload[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
    return bytes(payload)


bombs = st.sampled_from(
    [
        *(HEADER + more for more in (b"", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")),
        *(HEADER + more for more in (b"\x91" * 60_000, b"\x81\xa1t" * 15_000, b"\xa1" * 65_000)),
        *(HEADER + msgspec.msgpack.encode(value) for value in ({"t": ["register"]}, {"t": "pong", "seq": 2**63})),
        *(b"", b"\x00" * 2**20),
    ]
)
payloads = st.one_of(
    known.map(encode), st.builds(_damaged, known, st.randoms(use_true_random=False)), st.binary(max_size=80), bombs
)


@given(st.lists(st.tuples(st.sampled_from("PD"), payloads), min_size=1, max_size=25), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_strangers_messages_are_counted_and_hurt_nobody_who_comes_later(
    sent: list[tuple[str, bytes]], registered: bool, integrity: bool
) -> None:
    world = World("P", "D", "X", integrity=integrity)
    # What X has registered may be written, and X keeps no account of it.
    world.fabric.on_land = lambda writer, target, *rest: target == "X-0" or world._on_land(writer, target, *rest)
    received = world.fetch("D", "t", TOKENS) if registered else None
    world.run(0.02)
    for host in "PD":
        world["X"].transport.connect(world[host].transport.metadata())
    before = {host: _counted(world, host) for host in "PD"}
    for host, payload in sent:
        world["X"].transport.notify(world[host].agent, payload)
    world.run(0.02)
    for host in "PD":
        arrived = sum(other == host for other, _ in sent)
        assert _counted(world, host) - before[host] >= arrived
        assert world[host].core.counters.get("messages_dropped", "internal") == 0
    prefilled = world.offer("P", "t", TOKENS)
    world.prefill("P", prefilled, TOKENS)
    world.finish("P", prefilled)
    world.fabric.kill("X-0")
    longest_s = TIMING.announced_timeout_s + TIMING.rendezvous_timeout_s + TIMING.peer_timeout_s + 5
    world.until(lambda: prefilled.ended == ["Sent"], longest_s, step_s=0.05)
    if received is not None:
        # Its own P is the only one that it listens to, so nobody else can make it end.
        world.until(lambda: bool(received.ended), longest_s, step_s=0.05)
        if received.ended == ["LoadFailed"]:
            world.until(lambda: received.ended == ["LoadFailed", "Released"], longest_s, step_s=0.05)
    again = world.fetch("D", "later", TOKENS)
    prefilled = world.offer("P", "later", TOKENS)
    world.prefill("P", prefilled, TOKENS)
    world.finish("P", prefilled)
    world.until(lambda: again.ended == ["Received"] and prefilled.ended == ["Sent"], 5)
    world.until(lambda: world["P"].core.idle and world["D"].core.idle, longest_s, step_s=0.05)
    world.check_idle("P", "D")


def _counted(world: World, host: str) -> int:
    """Messages that a core has counted; one that makes no sense is counted as received and as dropped."""
    counters = world[host].core.counters
    return counters.total("messages_received") + counters.get("messages_dropped", "malformed")
