"""P: brings pieces to D, each by the path that suits it, and tells what has become of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.paths import GPU_COSTS, Path, PathCosts
from kvpush.plan.runs import Ints
from kvpush.protocol.actions import WritePiece
from kvpush.protocol.ids import AgentName, PeerAddress, SendKey
from kvpush.protocol.messages import Credit, Grant, PieceDigest, Staged
from kvpush.protocol.send import Send
from kvpush.transfer.counters import Counters
from kvpush.transfer.dialer import Answer
from kvpush.transfer.fence import Fence
from kvpush.transfer.integrity import Digester
from kvpush.transfer.staging.memory import Staging
from kvpush.transfer.staging.outcomes import Outcome
from kvpush.transfer.staging.stager import Stager
from kvpush.transfer.writer import Landed, PieceRefused, PieceWriter, Plan, whole_blocks
from kvpush.transport.base import Transport


@dataclass(frozen=True, slots=True)
class PathConfig:
    """path: what the user wants. costs: what `auto` decides by. staging: None where there is none."""

    path: Path
    costs: PathCosts
    staging: Staging | None = None


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
        self._counters = counters
        self._writer = PieceWriter(transport, cache)
        self._tables: dict[SendKey, tuple[int, Ints]] = {}  # of live sends: (attempt, the consumer's block table)
        self._stager: Stager | None = None
        if config.staging is not None and config.staging.send is not None:
            self._stager = Stager(transport, config.staging.packer, config.staging.send, wanted, fence.closed)
            self._block_bytes, self._slot_bytes = config.staging.packer.block_bytes, config.staging.send.slot_bytes

    def __len__(self) -> int:
        """Pieces that have not ended."""
        return len(self._writer) + (len(self._stager) if self._stager is not None else 0)

    @property
    def idle(self) -> bool:
        return not len(self._writer) and (self._stager is None or not self._stager.busy)

    def post(self, piece: WritePiece, send: Send, answer: Answer, source: list[int], now_s: float) -> None:
        """Sends a piece on its way. source: block ids of the request at P. Raises PieceRefused or PieceLost."""
        direct, target = send.registration.direct, answer.geometry
        stager = self._stager if answer.staging is not None and self._path != "direct" else None
        if stager is not None and direct and not stager.granted(piece.agent):
            stager = None  # the grant has not come yet
        if not direct and stager is None:
            raise PieceRefused("D takes only staged transfers, and this side has no staging memory")
        if stager is not None and (self._path == "staged" or not direct):
            self._stage(stager, piece, send, answer, source, now_s)
            return
        plan = self._writer.plan(piece, source, target, self._table(piece, send, target))
        if stager is not None and self._staging_pays(stager, plan):
            self._stage(stager, piece, send, answer, source, now_s)
            return
        digest = self._digest(source, piece.first_token, piece.end_token)
        self._writer.post(piece, plan, target, digest, now_s)
        self._counters.add("pieces", "direct")

    def poll(self, now_s: float) -> list[Landed | Outcome]:
        """What has become of pieces since the last call, in order."""
        ended: list[Landed | Outcome] = [*self._writer.poll(now_s)]
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

    def _stage(
        self, stager: Stager, piece: WritePiece, send: Send, answer: Answer, source: list[int], now_s: float
    ) -> None:
        assert answer.staging is not None
        size = self._cache.block_size
        if not alike(self._cache, answer.geometry):
            raise PieceRefused("the caches differ in layout, so that blocks cannot be packed")
        try:
            first, end = whole_blocks(piece.first_token, piece.end_token, size)
            blocks = np.array(source[first // size : end // size], dtype=np.int64)
            if len(blocks) < (end - first) // size:
                raise ValueError(f"{len(blocks)} blocks for tokens {first} to {end}")
            digest = partial(self._digest, source)
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

    def _digest(self, source: list[int], first_token: int, end_token: int) -> PieceDigest | None:
        return None if self._digester is None else self._digester.piece(source, first_token, end_token)


def alike(mine: CacheGeometry, theirs: CacheGeometry) -> bool:
    """Whether a packed block means the same at both sides."""
    return all(
        getattr(mine, name) == getattr(theirs, name) for name in ("content_bytes", "num_heads", "block_size")
    ) and len(mine.bases) == len(theirs.bases)
