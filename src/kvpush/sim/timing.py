"""The protocol's bounds in simulated worlds: their order is that of production, all of them small."""

from __future__ import annotations

from kvpush.protocol.timing import Timing

TIMING = Timing(
    rendezvous_timeout_s=1.0,
    unclaimed_timeout_s=1.5,
    announced_timeout_s=4.0,
    admission_timeout_s=4.0,
    peer_timeout_s=0.8,
    ping_interval_s=0.25,
    write_timeout_s=1.5,
    abort_drain_s=0.25,
    tombstone_s=3.0,
    first_answer_timeout_s=0.5,
    unreachable_retry_s=0.4,
    idle_check_s=1.2,
)
DIAL_TIMEOUT_S = 0.3
PREEMPT_WAIT_S = 0.005
TICK_S = 0.1
IDLE_STEP_S = 0.2
"""How often an engine steps that waits for blocks. vLLM's does all the time."""
