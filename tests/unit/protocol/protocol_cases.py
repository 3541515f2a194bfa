"""What the tests of the protocol share: values, strategies, and a stage on which machines meet message by message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from kvpush.protocol.actions import Action, Connect, SendTo, WritePiece
from kvpush.protocol.consumer import Consumer
from kvpush.protocol.ids import MAX_RANK, AgentName, PeerAddress, RequestId, SendKey, TransferId
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
    decode,
    encode,
)
from kvpush.protocol.producer import Producer
from kvpush.protocol.prompt import PromptIdentity, prompt_identity
from kvpush.protocol.timing import Timing

BLOCK_SIZE = 16
PROMPT = prompt_identity(list(range(100)))
OTHER = prompt_identity(list(range(1, 101)))
T = TransferId("t")
TIMING = Timing()


def address(rank: int = 0, host: str = "d", port: int = 1) -> PeerAddress:
    return PeerAddress(host, port, 0, rank)


# Values that may stand in a message. Strategies are built once: building them for each draw takes most of the time.

names = st.text("abcXYZ019-_:. é漢", min_size=1, max_size=20)
transfer_ids = names.map(TransferId)
consumers = st.integers(0, 1023)
ranks = st.integers(0, MAX_RANK)
addresses = st.builds(PeerAddress, names, st.integers(1, 65535), ranks, ranks)
prompts = st.builds(PromptIdentity, st.integers(1, 2**31 - 1), st.binary(min_size=16, max_size=16))
counts = st.integers(0, 2**62)
attempts = st.integers(1, 2**62)
digests = st.builds(
    lambda first, length, digest: PieceDigest(first, first + length, digest),
    st.integers(0, 2**30), st.integers(1, 2**20), st.binary(min_size=1, max_size=32),
)  # fmt: skip
keys = st.builds(SendKey, transfer_ids, consumers, ranks, ranks)


def _register(
    key: SendKey, attempt: int, prompt: PromptIdentity, blocks: list[bytes], sender: PeerAddress, numbers: list[int]
) -> Register:
    first, more, targets, part, later = numbers
    return Register(
        key=key.at(sender),
        attempt=attempt,
        prompt=prompt,
        first_token=first % prompt.num_tokens,
        blocks=blocks,
        sender=sender,
        consumers=min(1024, key.consumer + 1 + more),
        targets=targets + 1,
        part=part % 128,
        parts=part % 128 + later % 128 + 1,
    )


small_numbers = st.lists(st.integers(0, 1000), min_size=5, max_size=5)
tables = st.lists(st.binary(max_size=50), min_size=1, max_size=4)
registers = st.builds(_register, keys, attempts, prompts, tables, addresses, small_numbers)
messages: st.SearchStrategy[Message] = st.one_of(
    registers,
    st.builds(Announce, transfer_ids, prompts, addresses),
    st.builds(lambda key, *rest: Release(key.at(rest[1]), *rest), keys, attempts, addresses, st.booleans()),
    st.builds(lambda key, *rest: Cancel(key.at(rest[1]), *rest), keys, attempts, addresses),
    st.builds(
        Ping,
        counts,
        addresses,
        st.lists(st.builds(Lease, keys, attempts), max_size=3),
        st.lists(transfer_ids, max_size=3),
    ),
    st.builds(Pong, counts, st.lists(keys, max_size=3)),
    st.builds(Accepted, keys, attempts),
    st.builds(Commit, keys, attempts, counts, counts, counts, st.lists(digests, max_size=3)),
    st.builds(Failed, keys, attempts, st.text(st.characters(codec="utf-8"), max_size=40), st.booleans()),
    st.builds(Quiet, keys, attempts),
)


# The stage


@dataclass(eq=False)
class Rank:
    """One machine, what it has asked for besides messages and writes, and its name in this life."""

    agent: AgentName
    address: PeerAddress
    machine: Any
    log: list[Action] = field(default_factory=list)

    def reports(self, kind: type) -> list[Any]:
        return [action for action in self.log if isinstance(action, kind)]


@dataclass(eq=False)
class Letter:
    """A message that has left; it arrives when the test says so."""

    sender: Rank
    receiver: Rank
    message: Message


@dataclass(eq=False)
class Post:
    """A piece in flight."""

    rank: Rank
    piece: WritePiece


class Stage:
    """P ranks and D ranks between which nothing moves by itself: tests deliver, lose or repeat what lies in `mail`.

    connected: P connects at once; otherwise Connect waits in the log.
    """

    def __init__(
        self,
        p_ranks: int = 1,
        d_ranks: int = 1,
        timing: Timing = TIMING,
        *,
        engines: int = 1,
        connected: bool = True,
        **options: Any,
    ) -> None:
        self.now_s = 1000.0
        self.timing = timing
        self.options = {"block_size": BLOCK_SIZE, **options}
        self.connected = connected
        self.mail: list[Letter] = []
        self.writes: list[Post] = []
        self.at: dict[PeerAddress, Rank] = {}
        self.lives = 0
        self.p = [self.start_p(PeerAddress("p", 1, 0, rank)) for rank in range(p_ranks)]
        self.d = [self.start_d(PeerAddress(f"d{e}", 1, 0, rank)) for e in range(engines) for rank in range(d_ranks)]

    def start_p(self, at: PeerAddress) -> Rank:
        return self._start(at, Producer(self.timing, **self.options))

    def start_d(self, at: PeerAddress) -> Rank:
        return self._start(at, Consumer(self.timing, at))

    def _start(self, at: PeerAddress, machine: Any) -> Rank:
        self.lives += 1
        rank = self.at[at] = Rank(AgentName(f"{at.host}{at.tp_rank}-life{self.lives}"), at, machine)
        return rank

    def do(self, rank: Rank, actions: Iterable[Action]) -> None:
        """Carries out actions: messages go into the mail, pieces into `writes`, all else into the rank's log."""
        for action in actions:
            if isinstance(action, SendTo):
                self._send(rank, action)
            elif isinstance(action, WritePiece):
                self.writes.append(Post(rank, action))
            elif isinstance(action, Connect) and self.connected:
                self.do(rank, rank.machine.on_connected(action.agent, self.now_s))
            else:
                rank.log.append(action)

    def _send(self, rank: Rank, action: SendTo) -> None:
        receiver = self.at.get(action.address)
        consumer = rank.machine if isinstance(rank.machine, Consumer) else None
        if receiver is None or action.agent not in (None, receiver.agent):
            if consumer is not None:
                self.do(rank, consumer.on_undelivered(action.address, action.message, "peer_restarted", self.now_s))
            return
        message = decode(encode(action.message))
        assert message == action.message
        if consumer is not None:
            assert consumer.wants_sent(message)
            self.do(rank, consumer.on_delivered(action.address, receiver.agent, message, self.now_s))
        self.mail.append(Letter(rank, receiver, message))

    def arrive(self, letter: Letter) -> None:
        """Delivers a letter, whether it lies in the mail or not (then it is a late copy)."""
        if letter in self.mail:
            self.mail.remove(letter)
        machine = letter.receiver.machine
        self.do(letter.receiver, machine.on_message(letter.sender.agent, letter.message, self.now_s))

    def find(self, *kinds: type) -> list[Letter]:
        return [letter for letter in self.mail if isinstance(letter.message, kinds)]

    def take(self, kind: type) -> Letter:
        """Takes the only letter of a kind out of the mail."""
        [letter] = self.find(kind)
        self.mail.remove(letter)
        return letter

    def flush(self, *kinds: type) -> None:
        """Delivers everything (or everything of some kinds), and what follows from it."""
        for _ in range(1000):
            letters = self.find(*kinds) if kinds else list(self.mail)
            if not letters:
                return
            self.arrive(letters[0])
        raise AssertionError("the mail never ends")

    def land(self, post: Post, digest: bytes | None = None) -> None:
        """A piece has been written: 10 bytes a token."""
        self.writes.remove(post)
        piece = post.piece
        proof = [] if digest is None else [PieceDigest(piece.first_token, piece.end_token, digest)]
        size = 10 * (piece.end_token - piece.first_token)
        self.do(post.rank, post.rank.machine.on_written(piece.key, piece.piece, size, proof, self.now_s))

    def land_all(self) -> None:
        while self.writes:
            self.land(self.writes[0])

    def break_write(self, post: Post, reason: str = "write_failed") -> None:
        self.writes.remove(post)
        piece = post.piece
        self.do(post.rank, post.rank.machine.on_write_failed(piece.key, piece.piece, reason, self.now_s))

    def wait(
        self, seconds: float, *, step_s: float = 0.5, ranks: list[Rank] | None = None, deliver: bool = False
    ) -> None:
        """Lets time pass with ticks; pings and pongs get lost unless `deliver`."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + step_s)
            for rank in self.at.values() if ranks is None else ranks:
                self.do(rank, rank.machine.on_tick(self.now_s))
            if deliver:
                self.flush()
            else:
                self.mail = [letter for letter in self.mail if not isinstance(letter.message, Ping | Pong)]

    # The engines

    def request(
        self,
        name: str = "p",
        transfer_id: str = T,
        prompt: PromptIdentity = PROMPT,
        consumers: int = 1,
        ranks: list[Rank] | None = None,
    ) -> RequestId:
        request_id = RequestId(name)
        for rank in self.p if ranks is None else ranks:
            self.do(rank, rank.machine.on_request(request_id, TransferId(transfer_id), prompt, consumers, self.now_s))
        return request_id

    def engine(self, call: str, request_id: RequestId, *values: Any, ranks: list[Rank] | None = None) -> None:
        """An event of P's engine at every rank: engine("on_tokens", request, 32)."""
        for rank in self.p if ranks is None else ranks:
            method: Callable[..., list[Action]] = getattr(rank.machine, call)
            self.do(rank, method(request_id, *values, self.now_s))

    def compute_all(self, request_id: RequestId, prompt: PromptIdentity = PROMPT) -> None:
        self.engine("on_tokens", request_id, prompt.num_tokens)
        self.engine("on_finished", request_id)

    def register(
        self,
        name: str = "d",
        transfer_id: str = T,
        prompt: PromptIdentity = PROMPT,
        consumer: int = 0,
        consumers: int = 1,
        first_token: int = 0,
        ranks: list[Rank] | None = None,
        parts: int = 1,
    ) -> RequestId:
        """A request of D gets blocks; every rank of its engine registers with every rank of P."""
        request_id = RequestId(name)
        mine = self.d[:] if ranks is None else ranks
        targets = {rank.address: len(mine) for rank in self.p}
        blocks = [[f"{name}-{part}".encode()] for part in range(parts)]
        for rank in mine:
            actions = rank.machine.register(
                request_id, SendKey(TransferId(transfer_id), consumer), prompt, first_token, blocks, consumers,
                list(targets), self.now_s, targets,
            )  # fmt: skip
            self.do(rank, actions)
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        for rank in self.d:
            self.do(rank, rank.machine.cancel(request_id, self.now_s))

    def idle(self) -> bool:
        return all(rank.machine.idle for rank in self.at.values())


def streaming(**options: Any) -> Stage:
    """A transfer with one piece in flight to D."""
    stage = Stage(**options)
    stage.request()
    stage.register()
    stage.flush()
    stage.engine("on_tokens", RequestId("p"), 64)
    return stage


def pieces(posts: list[Post]) -> list[tuple[int, int]]:
    return [(post.piece.first_token, post.piece.end_token) for post in posts]


# One rank of P, asked by hand

AT = PeerAddress("d0", 1)
AGENT = AgentName("d00-life2")  # the D rank of a stage with one rank each


def ask(stage: Stage, message: object, agent: AgentName = AGENT) -> list[object]:
    """What the only rank of P answers to a message, without addresses; what else it asks for is carried out."""
    [p] = stage.p
    actions = p.machine.on_message(agent, message, stage.now_s)
    stage.do(p, [action for action in actions if not isinstance(action, SendTo)])
    return [action.message for action in actions if isinstance(action, SendTo)]


KEY = SendKey(T, 0)


def register(attempt: int = 1, key: SendKey = KEY, **values: object) -> Register:
    fields: dict[str, object] = {
        "key": key, "attempt": attempt, "prompt": PROMPT, "first_token": 0, "blocks": [b"d-0"], "sender": AT,
    }  # fmt: skip
    return Register(**(fields | values))  # type: ignore[arg-type]
