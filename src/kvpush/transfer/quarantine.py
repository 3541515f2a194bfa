"""How much memory of this engine writers may still reach although nobody waits for them, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

_log = logging.getLogger(__name__)

SHARE_OF_POOL = 4
"""By default a quarter of the blocks may be in quarantine: enough for several long prompts of one producer that has
stopped, while three quarters still serve requests."""

Rank = tuple[int, int]
"""(pp_rank, tp_rank)."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What one rank holds. num_blocks: blocks that a writer may still reach; writers: where these writers answered."""

    num_blocks: int = 0
    writers: tuple[str, ...] = ()


def default_max_blocks(num_blocks: int) -> int:
    """How many of a pool's blocks may be in quarantine unless the configuration says otherwise."""
    return max(1, num_blocks // SHARE_OF_POOL)


class Health:
    """Whether an engine may give memory to writers: not while more than max_blocks are in quarantine (0: no limit).

    Every rank has the same block ids, so the rank that holds most decides.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._ranks: dict[Rank, Quarantine] = {}
        self._healthy = True

    @property
    def healthy(self) -> bool:
        return self._healthy

    @property
    def num_blocks(self) -> int:
        """Blocks in quarantine, at the rank that holds most."""
        return max((rank.num_blocks for rank in self._ranks.values()), default=0)

    @property
    def trouble(self) -> str:
        """Why the engine is unhealthy, for people; "" if it is not."""
        if self._healthy:
            return ""
        writers = sorted({writer for rank in self._ranks.values() for writer in rank.writers})
        shown = ", ".join(writers[:8]) + (f" and {len(writers) - 8} more" if len(writers) > 8 else "")
        return (
            f"{self.num_blocks} KV blocks are in quarantine, more than quarantine_max_blocks {self.max_blocks}: "
            f"{shown} may still write them and cannot be proven gone"
        )

    def update(self, quarantines: Mapping[Rank, Quarantine]) -> bool:
        """Takes what ranks have told; True if the engine has become unhealthy, or healthy again. Logs that once."""
        self._ranks.update(quarantines)
        healthy = not self.max_blocks or self.num_blocks <= self.max_blocks
        if healthy is self._healthy:
            return False
        self._healthy = healthy
        if healthy:
            _log.warning("kvpush: healthy again: %d KV blocks are in quarantine", self.num_blocks)
        else:
            _log.error("kvpush: unhealthy, no prompt's KV is loaded until this changes: %s", self.trouble)
        return True
