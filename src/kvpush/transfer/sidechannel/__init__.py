"""The side channel: how the ranks of two engines learn of each other before they move KV.

The scheduler process of each engine runs one `SideChannelServer`; workers of the peer engine ask it with `query_peer`.
"""

from kvpush.transfer.sidechannel.client import query_peer, query_traces, query_writer
from kvpush.transfer.sidechannel.compatibility import UNKNOWN, check_compatible
from kvpush.transfer.sidechannel.counters import SideChannelCounters
from kvpush.transfer.sidechannel.envelope import SECRET_VARIABLE, secret_from_environment
from kvpush.transfer.sidechannel.errors import HandshakeCode, HandshakeError, SideChannelError
from kvpush.transfer.sidechannel.messages import EngineInfo, Mode, PeerAnswer, RankInfo
from kvpush.transfer.sidechannel.process import (
    MACHINE_VARIABLE,
    ProcessIdentity,
    Space,
    current_process,
    host_id,
    process_gone,
    rebooted,
    start_of,
)
from kvpush.transfer.sidechannel.server import PORT_OPTION, PORT_VARIABLE, SideChannelServer

__all__ = [
    "MACHINE_VARIABLE",
    "PORT_OPTION",
    "PORT_VARIABLE",
    "SECRET_VARIABLE",
    "UNKNOWN",
    "EngineInfo",
    "HandshakeCode",
    "HandshakeError",
    "Mode",
    "PeerAnswer",
    "ProcessIdentity",
    "RankInfo",
    "SideChannelCounters",
    "SideChannelError",
    "SideChannelServer",
    "Space",
    "check_compatible",
    "current_process",
    "host_id",
    "process_gone",
    "query_peer",
    "query_traces",
    "query_writer",
    "rebooted",
    "secret_from_environment",
    "start_of",
]
