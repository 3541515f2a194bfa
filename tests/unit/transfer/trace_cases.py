"""Records of both sides of a transfer, on clocks of one's choice."""

from __future__ import annotations

from kvpush.transfer.trace import RankTrace, TransferTrace

# Milliseconds after the end of the last kernel.
P_MS = {"matched": -5.0, "computed": 0.0, "first_write": -3.0, "last_write": 2.0, "landed": 5.0, "committed": 5.5}
D_MS = {"registered": -8.0, "accepted": -4.0, "commit_seen": 6.0, "received": 6.1, "collected": 8.0}
SCHEDULER_MS = {"arrived": -20.0, "allocated": -8.5, "reported": 9.0, "scheduled": 11.0}


def _times(moments: dict[str, float], start_s: float) -> dict[str, float]:
    return {moment: round(start_s + after / 1e3, 6) for moment, after in moments.items()}


def producer(
    transfer_id: str = "t", start_s: float = 100.0, host: str = "h", ahead_s: float = 0.0, **moments: float
) -> TransferTrace:
    """P's record; ahead_s: what its clock shows beyond the true time."""
    rank = RankTrace(
        request_id="p", host_id=host, times_s=_times({**P_MS, **moments}, start_s + ahead_s), num_bytes=1000,
        num_writes=2, num_runs=7, outcome="sent",
    )  # fmt: skip
    return TransferTrace(
        transfer_id=transfer_id, request_id="p", side="prefill", engine_id="P", host_id=host, num_tokens=64,
        outcome="sent", times_s=_times({"arrived": -30.0, "scheduled": -25.0, "reported": 9.5}, start_s + ahead_s),
        ranks=[rank], unix_offset_s=1e9 - ahead_s,
    )  # fmt: skip


def consumer(
    transfer_id: str = "t", start_s: float = 100.0, host: str = "h", outcome: str = "received", **moments: float
) -> TransferTrace:
    """D's record, on the true clock."""
    rank = RankTrace(
        request_id="d", host_id=host, times_s=_times({**D_MS, **moments}, start_s), num_bytes=1000, outcome=outcome
    )
    return TransferTrace(
        transfer_id=transfer_id, request_id="d", side="decode", engine_id="D", host_id=host, num_tokens=64,
        outcome=outcome, times_s=_times(SCHEDULER_MS, start_s), ranks=[rank], unix_offset_s=1e9,
    )  # fmt: skip
