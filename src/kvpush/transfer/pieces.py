"""P: brings pieces to D, each by the path that suits it, and tells what has become of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.paths import GPU_COSTS, Path, PathCosts
from kvpush.plan.runs import Ints
from kvpush.protocol.actions import WritePiece
from kvpush.protocol.ids import AgentName, PeerAddress, SendKey
from kvpush.protocol.messages import Credit, Grant, Staged
from kvpush.protocol.send import Send
from kvpush.transfer.counters import Counters
from kvpush.transfer.dialer import Answer
from kvpush.transfer.fence import Fence
from kvpush.transfer.integrity import Digester, PieceHashing
from kvpush.transfer.packing.base import PackingError, packed_block_bytes
from kvpush.transfer.peer_caches import OpenPeer, PeerCaches
from kvpush.transfer.staging.memory import Staging
from kvpush.transfer.staging.outcomes import Outcome
from kvpush.transfer.staging.stager import Digest, Stager
from kvpush.transfer.writer import Landed, PieceCost, PieceRefused, PieceWriter, Plan, whole_blocks
from kvpush.transport.base import Transport


@dataclass(frozen=True, slots=True)
class PathConfig:
    """path: what the user wants; `peer` is as `auto`, and says why where no cache can be mapped. costs: what `auto`
    decides by. staging, open_peer: None where there is none. background: whether mapping may take a thread."""

    path: Path
    costs: PathCosts
    staging: Staging | None = None
    open_peer: OpenPeer | None = None
    background: bool = True


DIRECT = PathConfig("direct", GPU_COSTS)
"""Without staging memory there is nothing to choose."""


class Pieces:
    """Owned by the transfer thread. wanted: whether the protocol still wants a piece."""

    def __init__(
        self,
        config: PathConfig,
        cache: CacheGeometry,
        transport: Transport,
        fence: Fence,
        digester: Digester | None,
        counters: Counters,
        wanted: Callable[[WritePiece], bool],
    ) -> None:
        self._path, self._costs = config.path, config.costs
        self._cache = cache
        self._digester = digester
        self._fence = fence
        self._wanted = wanted
        self._counters = counters
        self._writer = PieceWriter(transport, cache)
        self._tables: dict[SendKey, tuple[int, Ints]] = {}  # of live sends: (attempt, the consumer's block table)
        self._peers: PeerCaches | None = None
        if config.open_peer is not None and config.path in ("auto", "peer"):
            self._peers = PeerCaches(config.open_peer, background=config.background)
        self._stager: Stager | None = None
        if config.staging is not None and config.staging.send is not None:
            self._stager = Stager(
                transport, config.staging.packer, config.staging.send, wanted, fence.closed, self._awaits_digest
            )
            self._block_bytes, self._slot_bytes = config.staging.packer.block_bytes, config.staging.send.slot_bytes

    def __len__(self) -> int:
        """Pieces that have not ended."""
        return len(self._writer) + (len(self._stager) if self._stager is not None else 0)

    @property
    def idle(self) -> bool:
        return not len(self) and (self._stager is None or not self._stager.busy)

    def meet(self, agent: AgentName, answer: Answer | None) -> None:
        """A consumer is connected."""
        if self._peers is not None and answer is not None:
            self._peers.meet(agent, answer)

    def drop(self, agent: AgentName) -> None:
        """Its connection is gone."""
        if self._peers is not None:
            self._peers.drop(agent)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()

    def post(
        self, piece: WritePiece, send: Send, answer: Answer, source: list[int], now_s: float, *, stable_tail: bool
    ) -> None:
        """Sends a piece on its way. source: block ids of the request at P. Raises PieceRefused or PieceLost.

        stable_tail: nobody goes on writing behind the prompt into its last block.
        """
        digest = partial(self._digest, piece, source, stable_tail)
        direct, target = send.registration.direct, answer.geometry
        if self._peers is not None and direct and self._peers.ready(piece.agent):
            self._store(self._peers, piece, send, target, source, digest, now_s)
            return
        stager = self._stager if answer.staging is not None and self._path != "direct" else None
        if stager is not None and direct and not stager.granted(piece.agent):
            stager = None  # the grant has not come yet
        if not direct and stager is None:
            raise PieceRefused("D takes only staged transfers, and this side has no staging memory")
        if stager is not None and (self._path == "staged" or not direct):
            self._stage(stager, piece, send, answer, source, digest, now_s)
            return
        plan = self._writer.plan(piece, source, target, self._table(piece, send, target))
        if stager is not None and self._staging_pays(stager, plan):
            self._stage(stager, piece, send, answer, source, digest, now_s)
            return
        self._writer.post(piece, plan, target, now_s, partial(digest, piece.first_token, piece.end_token))
        self._counters.add("pieces", "direct")

    def poll(self, now_s: float) -> list[Landed | Outcome]:
        """What has become of pieces since the last call, in order."""
        ended: list[Landed | Outcome] = [*self._writer.poll(now_s, self._awaits_digest)]
        if self._peers is not None:
            self._peers.sweep(self._writer.writes_to)
        if self._stager is not None:
            ended += self._stager.poll(now_s)
        return ended

    def hear(self, agent: AgentName, message: Grant | Credit, answer: Answer | None) -> None:
        """What D says about its slots."""
        if self._stager is None:
            return
        match message:
            case Grant():
                self._stager.grant(agent, message.slots, answer.staging if answer is not None else None)
            case Credit():
                self._stager.credit(agent, message.slot, message.use)

    def overdue(self, now_s: float) -> list[tuple[AgentName, PeerAddress, Staged]]:
        """What D has to be told again."""
        return [] if self._stager is None else self._stager.overdue(now_s)

    def gone(self, agent: AgentName) -> None:
        """An incarnation of a consumer is proven gone."""
        if self._stager is not None:
            self._stager.forget(agent)

    def forget(self, key: SendKey) -> None:
        """A send has ended."""
        self._tables.pop(key, None)

    def _staging_pays(self, stager: Stager, plan: Plan) -> bool:
        num_bytes = plan.runs.num_bytes
        parts = -(-num_bytes // (self._slot_bytes // self._block_bytes * self._block_bytes))
        staged_s = self._costs.staged(num_bytes, parts, stager.queued_bytes)
        return staged_s < self._costs.direct(len(plan.runs), num_bytes)

    def _store(
        self,
        peers: PeerCaches,
        piece: WritePiece,
        send: Send,
        target: CacheGeometry,
        source: list[int],
        digest: Digest,
        now_s: float,
    ) -> None:
        size = self._cache.block_size
        blocks, first, end = self._blocks(piece, source)
        table = self._table(piece, send, target)
        if len(table) < end // size:
            raise PieceRefused(f"{len(table)} blocks are registered, {end // size} are needed")
        start_s = time.perf_counter()
        try:
            event = peers.copy(piece.agent, blocks, table[first // size : end // size])
        except (PackingError, ValueError) as error:
            raise PieceRefused(str(error)) from None
        took_s = time.perf_counter() - start_s
        cost = PieceCost(num_runs=1, plan_s=0.0, post_s=took_s, cpu_s=took_s)
        num_bytes = len(blocks) * packed_block_bytes(self._cache)
        self._writer.follow(piece, event, num_bytes, cost, now_s, partial(digest, piece.first_token, piece.end_token))
        self._counters.add("pieces", "peer")

    def _blocks(self, piece: WritePiece, source: list[int]) -> tuple[Ints, int, int]:
        """The blocks at P that hold a piece, and the tokens that they begin and end with. Raises PieceRefused."""
        size = self._cache.block_size
        try:
            first, end = whole_blocks(piece.first_token, piece.end_token, size)
        except ValueError as error:
            raise PieceRefused(str(error)) from None
        blocks = np.array(source[first // size : end // size], dtype=np.int64)
        if len(blocks) < (end - first) // size:
            raise PieceRefused(f"{len(blocks)} blocks for tokens {first} to {end}")
        return blocks, first, end

    def _stage(
        self,
        stager: Stager,
        piece: WritePiece,
        send: Send,
        answer: Answer,
        source: list[int],
        digest: Digest,
        now_s: float,
    ) -> None:
        assert answer.staging is not None
        size = self._cache.block_size
        if not alike(self._cache, answer.geometry):
            raise PieceRefused("the caches differ in layout, so that blocks cannot be packed")
        blocks, _, _ = self._blocks(piece, source)
        try:
            address = send.registration.address
            stager.start(piece, blocks, answer.staging, address, size, digest, now_s)
        except ValueError as error:
            raise PieceRefused(str(error)) from None
        self._counters.add("pieces", "staged")

    def _table(self, piece: WritePiece, send: Send, target: CacheGeometry) -> Ints:
        attempt, table = self._tables.get(piece.key, (0, None))
        if table is None or attempt != piece.attempt:
            table = self._writer.target_blocks(send.registration, target)
            self._tables[piece.key] = (piece.attempt, table)
        return table

    def _digest(
        self, piece: WritePiece, source: list[int], stable_tail: bool, first_token: int, end_token: int
    ) -> PieceHashing | None:
        if self._digester is None or not self._digester.chooses(piece.key.transfer_id):
            return None
        return self._digester.start(source, first_token, end_token, stable_tail=stable_tail)

    def _awaits_digest(self, piece: WritePiece, waited_s: float) -> bool:
        """Whether a piece should wait for its digest: not if the engine needs the blocks, nor if it has failed."""
        assert self._digester is not None
        if self._wanted(piece) and waited_s < self._digester.wait_s and not self._fence.closed(piece.request_id):
            return True
        self._counters.add("integrity", "given_up")
        return False


def alike(mine: CacheGeometry, theirs: CacheGeometry) -> bool:
    """Whether a packed block means the same at both sides."""
    return all(
        getattr(mine, name) == getattr(theirs, name) for name in ("content_bytes", "num_heads", "block_size")
    ) and len(mine.bases) == len(theirs.bases)
