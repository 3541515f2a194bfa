"""What travels between the scheduler half and the worker halves of the connector."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpush.transfer.commands import Command, Progress
from kvpush.transfer.quarantine import Quarantine, Rank
from kvpush.transfer.trace import RankTrace


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One engine step. before: commands that leave before the forward; after: what the forward makes ready."""

    before: list[Command] = field(default_factory=list)
    after: list[Progress] = field(default_factory=list)


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """A worker's RankInfo, encoded: what the side channel tells peers about this rank."""

    rank: bytes


@dataclass
class RankNews(KVConnectorWorkerMetadata):
    """What workers tell the scheduler half after a step.

    quarantines: of ranks where that has changed. failed: requests whose load has failed; reports follow. traces: the
    records of the requests that are reported in this step.
    """

    quarantines: dict[Rank, Quarantine] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    traces: list[RankTrace] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankNews:
        """The news of several ranks as one; each speaks of itself."""
        assert isinstance(other, RankNews)
        return RankNews(
            {**self.quarantines, **other.quarantines}, self.failed | other.failed, [*self.traces, *other.traces]
        )
