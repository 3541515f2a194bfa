"""Integrity: who is sampled, which faults the digests tell, and what they do to a transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_world import BLOCK, SLOT, TIMING, Faults, Request, World, failure

from kvpush.protocol.ids import TransferId
from kvpush.protocol.messages import PieceDigest
from kvpush.transfer.hashing import Hashing, InlineHasher, Words, hash_memory
from kvpush.transfer.integrity import DIGEST_WAIT_S, Check, Digester, Verdict, is_sampled

pytestmark = pytest.mark.unit

LAYERS, NUM_BLOCKS = 3, 24
SOURCE, TARGET = [9, 3, 4, 20, 11], [7, 8, 2, 21, 0]
NUM_TOKENS = 4 * BLOCK + 2


class Rank:
    """A cache of random bytes, and what digests it."""

    def __init__(self, share: float = 1.0) -> None:
        random = np.random.default_rng(1)
        self.memory = random.integers(1, 256, (LAYERS, NUM_BLOCKS, 2, BLOCK, 12), np.uint8)
        self.digester = Digester(InlineHasher(self._hash), BLOCK, share)

    def _hash(self, blocks: Sequence[int], _: object) -> Words:
        return hash_memory(list(self.memory), blocks, lambda: False)

    def digest(self, first: int, end: int, *, stable_tail: bool = True) -> PieceDigest:
        hashing = self.digester.start(SOURCE, first, end, stable_tail=stable_tail)
        assert hashing is not None
        digest = hashing.take()
        assert digest is not None
        return digest

    def verdict(self, digests: Sequence[PieceDigest], first: int = 0, end: int = NUM_TOKENS) -> Verdict:
        return self.digester.check(TARGET, first, end, digests).verdict()


@pytest.fixture
def p() -> Rank:
    return Rank()


@pytest.fixture
def d(p: Rank) -> Rank:
    """Holds what P holds, in other blocks; all else is different."""
    rank = Rank()
    rank.memory[:] ^= 0xA5
    rank.memory[:, TARGET] = p.memory[:, SOURCE]
    return rank


# Who is sampled


@given(st.text(min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_whoever_is_in_a_share_is_in_every_larger_one(transfer_id: str, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert is_sampled(TransferId(transfer_id), less) <= is_sampled(TransferId(transfer_id), more)
    assert is_sampled(TransferId(transfer_id), 1.0)
    assert not is_sampled(TransferId(transfer_id), 0.0)


def test_a_share_is_met() -> None:
    ids = [TransferId(f"{number:032x}") for number in range(20_000)]
    assert 140 < sum(is_sampled(name, 0.01) for name in ids) < 260
    assert 9_600 < sum(is_sampled(name, 0.5) for name in ids) < 10_400


# What digests tell


def test_digests_of_pieces_in_any_order_cover_a_prompt(p: Rank, d: Rank) -> None:
    digests = [p.digest(2 * BLOCK, NUM_TOKENS), p.digest(0, 2 * BLOCK)]
    assert d.verdict(digests) == "ok"
    assert d.verdict([p.digest(BLOCK, NUM_TOKENS)], first=BLOCK) == "ok"


def test_a_last_block_that_p_goes_on_writing_to_is_left_out(p: Rank, d: Rank) -> None:
    digests = [p.digest(0, NUM_TOKENS, stable_tail=False)]
    assert digests[0].end_token == 4 * BLOCK
    d.memory[:, TARGET[4]] = 0
    assert d.verdict(digests) == "ok"
    assert p.digester.start(SOURCE, 4 * BLOCK, NUM_TOKENS, stable_tail=False) is None
    assert p.digest(0, 4 * BLOCK, stable_tail=False) == p.digest(0, 4 * BLOCK)


def test_what_p_could_not_digest_leaves_the_rest_checked(p: Rank, d: Rank) -> None:
    digests = [p.digest(0, BLOCK), p.digest(2 * BLOCK, NUM_TOKENS)]
    assert d.verdict(digests) == "partial"
    assert d.verdict(digests[:1]) == "partial"
    d.memory[1, TARGET[2], 1, 3, 3] ^= 1
    assert d.verdict(digests) == "mismatch"


@pytest.mark.parametrize(
    "fault",
    ["swapped blocks", "swapped layers", "shifted tokens", "zeros", "stale block", "one bit", "last slot", "rotated"],
)
def test_every_fault_is_seen(p: Rank, d: Rank, fault: str) -> None:
    memory, (one, other) = d.memory, TARGET[1:3]
    match fault:
        case "swapped blocks":
            memory[:, [one, other]] = memory[:, [other, one]]
        case "swapped layers":
            memory[[0, 2]] = memory[[2, 0]]
        case "shifted tokens":
            memory[:, one] = np.roll(memory[:, one], 1, axis=2)
        case "zeros":
            memory[1, other] = 0
        case "stale block":
            memory[:, one] ^= 0xA5
        case "one bit":
            memory[2, other, 1, 2, 5] ^= 0x80
        case "last slot":  # behind the prompt, but pushed
            memory[0, TARGET[4], 0, 3, 0] ^= 1
        case "rotated":
            memory[:, TARGET] = memory[:, TARGET[1:] + TARGET[:1]]
    assert d.verdict([p.digest(0, NUM_TOKENS)]) == "mismatch"
    assert d.verdict([p.digest(0, BLOCK), p.digest(BLOCK, NUM_TOKENS)]) == "mismatch"


@pytest.mark.parametrize(
    "tokens",
    [
        [(0, BLOCK), (0, BLOCK)],  # twice
        [(0, 2 * BLOCK), (BLOCK, 3 * BLOCK)],  # one over the other
        [(1, BLOCK)],  # inside a block
        [(0, BLOCK + 1)],
        [(0, 5 * BLOCK)],  # more than is owed
        [(0, 2**30)],
        [(8 * BLOCK, 9 * BLOCK)],
    ],
)
def test_digests_of_anything_but_what_is_owed_are_no_match(d: Rank, tokens: list[tuple[int, int]]) -> None:
    assert d.verdict([PieceDigest(first, end, b"x") for first, end in tokens]) == "mismatch"


def test_a_digest_of_what_d_had_already_is_no_match(p: Rank, d: Rank) -> None:
    assert d.verdict([p.digest(0, NUM_TOKENS)], first=BLOCK) == "mismatch"


def test_who_cannot_hash_says_so(p: Rank) -> None:
    def broken(blocks: object, cancelled: object) -> Words:
        raise MemoryError("no room on the device")

    digester = Digester(InlineHasher(broken), BLOCK, 1.0)
    hashing = digester.start(SOURCE, 0, BLOCK, stable_tail=True)
    assert hashing is not None
    assert hashing.take() is None
    check: Check = digester.check(TARGET, 0, NUM_TOKENS, [p.digest(0, NUM_TOKENS)])
    assert (check.done(), check.verdict()) == (True, "unchecked")


# In a transfer


def _prefilled(world: World, num_tokens: int, *, decodes: bool = False) -> tuple[Request, Request]:
    received = world.fetch("D", "t", num_tokens)
    sent = world.offer("P", "t", num_tokens, decodes=decodes)
    world.run(0.02)
    world.prefill("P", sent, num_tokens)
    return sent, received


def _decode(world: World, sent: Request, token: int) -> None:
    """P writes the KV of a token that it made itself."""
    assert sent.blocks is not None
    world["P"].memory[:, sent.blocks[token // BLOCK], token % BLOCK] = token


@pytest.mark.parametrize("num_tokens", [BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK])
def test_p_may_decode_on_while_its_last_block_is_pushed(num_tokens: int) -> None:
    """The slots behind the prompt change between the write, its digest and D's check."""
    world = World("P", "D", integrity=True, faults=Faults(write_delay_s=(0.01, 0.01), bytes_per_s=1e12, pieces=4))
    sent, received = _prefilled(world, num_tokens, decodes=True)
    for token in range(num_tokens, -(-num_tokens // BLOCK) * BLOCK):
        _decode(world, sent, token)
        world.run(0.004)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world["D"].core.counters.get("integrity", "ok") == 1
    world.check_idle()


def test_of_a_prompt_shorter_than_a_block_that_p_decodes_on_nothing_can_be_digested() -> None:
    world = World("P", "D", integrity=True)
    sent, received = _prefilled(world, BLOCK - 1, decodes=True)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world["D"].core.counters.get("integrity", "not_sent") == 1


def test_p_keeps_its_blocks_until_they_are_digested() -> None:
    world = World("P", "D", integrity=True)
    hasher = Held(world)
    sent, received = _prefilled(world, 2 * BLOCK)
    world.finish("P", sent)
    world.run(0.1)
    assert world.num_landed == 2 * BLOCK * SLOT * len(world["P"].memory)
    assert (sent.ended, received.ended) == ([], [])
    hasher.release()
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world["D"].core.counters.get("integrity", "ok") == 1
    world.check_idle()


def test_a_preemption_does_not_wait_for_a_digest_and_fails_nothing() -> None:
    """The write is over; only its digest still reads. The digest is given up, the rest of the prompt goes on."""
    world = World("P", "D", integrity=True)
    hasher = Held(world)
    sent, received = _prefilled(world, 2 * BLOCK)
    world.run(0.05)
    world["P"].fence.close([sent.request_id])
    world.run(0.001)
    assert not world.preempt("P", sent)
    world.run(0.02)
    assert hasher.cancelled == 1
    assert world["P"].core.counters.get("integrity", "given_up") == 1
    hasher.release()
    world.until(lambda: received.ended == ["Received"], 1)  # it had all landed
    assert world["D"].core.counters.get("integrity", "not_sent") == 1
    world.prefill("P", sent, 2 * BLOCK, replace=True)
    world.finish("P", sent)
    world.until(lambda: sent.ended == ["Sent"], 1)
    world.check_idle()


def test_a_digest_that_takes_too_long_is_given_up() -> None:
    world = World("P", "D", integrity=True)
    Held(world)
    sent, received = _prefilled(world, 2 * BLOCK)
    world.finish("P", sent)
    took_s = world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 20, step_s=0.01)
    assert abs(took_s - min(DIGEST_WAIT_S, TIMING.write_timeout_s / 2)) < 0.5
    assert world["P"].core.counters.get("integrity", "given_up") == 1
    world.check_idle()


def test_d_lets_go_of_a_request_whose_client_leaves_during_the_check() -> None:
    world = World("P", "D", integrity=True)
    hasher = Held(world, "D")
    sent, received = _prefilled(world, 2 * BLOCK)
    world.finish("P", sent)
    world.until(lambda: sent.ended == ["Sent"], 1)
    world.run(0.02)
    assert world["D"].core._consumer_side._checks
    assert received.ended == []
    world.cancel("D", received)
    world.until(lambda: received.ended == ["Released"], 1)
    assert hasher.cancelled == 1
    hasher.release()
    world.run(0.05)
    assert received.ended == ["Released"]
    world.check_idle()


def test_nothing_is_digested_of_what_is_not_sampled() -> None:
    world = World("P", "D", integrity=True)
    for host in ("P", "D"):
        world[host].core._producer_side._pieces._digester._share = 0.0  # type: ignore[union-attr]
        world[host].core._consumer_side._digester._share = 0.0  # type: ignore[union-attr]
    sent, received = _prefilled(world, 2 * BLOCK)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world["D"].core.counters.total("integrity") == 0


@pytest.mark.paths("direct")
def test_d_checks_what_comes_whatever_its_own_share_is() -> None:
    world = World("P", "D", integrity=True, faults=Faults(write_delay_s=(0.3, 0.3), bytes_per_s=1e12, pieces=8))
    world["D"].core._consumer_side._digester._share = 0.0  # type: ignore[union-attr]
    sent, received = _prefilled(world, 16)
    world.finish("P", sent)
    world.until(lambda: world.num_landed == 16 * SLOT * len(world["D"].memory), 1)
    assert received.blocks is not None
    world["D"].memory[1, received.blocks[1], 0, 0] ^= 1
    world.until(lambda: bool(received.ended), 1)
    assert failure(received) == "integrity"


class Held:
    """Hashes of one engine that are not done before `release`, and then read memory as it is."""

    def __init__(self, world: World, host: str = "P") -> None:
        self._memory = world[host].memory
        self._released = False
        self.cancelled = 0
        core = world[host].core
        assert core._consumer_side._digester is not None
        core._consumer_side._digester._hasher = self  # P's half has the same one

    def start(self, blocks: Sequence[int]) -> Hashing:
        return _HeldHashing(self, tuple(blocks))

    def close(self) -> None: ...

    def release(self) -> None:
        self._released = True


class _HeldHashing:
    def __init__(self, owner: Held, blocks: tuple[int, ...]) -> None:
        self._owner, self._blocks = owner, blocks

    def done(self) -> bool:
        return self._owner._released

    def result(self) -> Words:
        return hash_memory(list(self._owner._memory), self._blocks, lambda: False)

    def cancel(self) -> None:
        self._owner.cancelled += 1
