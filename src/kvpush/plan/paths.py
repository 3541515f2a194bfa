"""Which path a piece takes: straight into D's blocks, or packed, through a staging slot. By what each would cost.

Where D's cache can be mapped (`peer`), nothing is faster for any block table, and nothing has to be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Path = Literal["auto", "direct", "staged", "peer"]


@dataclass(frozen=True, slots=True)
class PathCosts:
    """What moving bytes takes, in seconds and bytes per second.

    direct_s, staged_s: once for a piece, whatever its size. per_run_s: for each contiguous run of a direct write;
    per_part_s: for each slot that a staged piece fills (pack, write, unpack, credit, as far as they do not overlap).
    direct_bytes_per_s, staged_bytes_per_s: for the bytes themselves.
    """

    direct_s: float
    per_run_s: float
    direct_bytes_per_s: float
    staged_s: float
    per_part_s: float
    staged_bytes_per_s: float

    def direct(self, num_runs: int, num_bytes: int) -> float:
        """Seconds of a direct write of so many runs."""
        return self.direct_s + num_runs * self.per_run_s + num_bytes / self.direct_bytes_per_s

    def staged(self, num_bytes: int, num_parts: int, queued_bytes: int) -> float:
        """Seconds until a staged piece is unpacked. queued_bytes: what has to be packed before it."""
        parts_s = num_parts * self.per_part_s
        return self.staged_s + parts_s + (num_bytes + queued_bytes) / self.staged_bytes_per_s


GPU_COSTS = PathCosts(7e-4, 3.4e-6, 330e9, 1.2e-3, 3e-4, 350e9)
"""NVLink or a fast network, 4 NIXL threads (bench/results, transfer/h200)."""

CPU_COSTS = PathCosts(1e-3, 1.0e-6, 6e9, 2e-3, 1e-4, 2e9)
"""One host, copies by processors (bench/results, transfer/cpu): packing costs two copies more and saves little."""
