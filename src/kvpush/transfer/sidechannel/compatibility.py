"""Which differences between two engines forbid a transfer."""

from __future__ import annotations

from kvpush.transfer.sidechannel.errors import printable
from kvpush.transfer.sidechannel.messages import EngineInfo

UNKNOWN = "unknown"
"""The value of an entry that an engine cannot find out; it fits every other."""


def check_compatible(mine: EngineInfo, theirs: EngineInfo) -> list[str]:
    """The differences that forbid a transfer, each as a phrase for a log line; empty if there are none.

    The mode, the protocol version and every entry of the fingerprint must be equal, but for entries of which one side
    says that it does not know. TP and PP sizes may differ if one
    is a multiple of the other, so that each rank of one side meets whole ranks of the other. The engine ids must
    differ: an engine cannot hand over to itself, and two engines under one id cannot be told apart.
    """
    found = []
    if mine.engine_id == theirs.engine_id:
        if mine.incarnation == theirs.incarnation:
            found.append(f"engine {printable(mine.engine_id)} was pointed at itself")
        else:
            found.append(f"both engines have the engine id {printable(mine.engine_id)}")
    for name, here, there in (
        ("mode", mine.mode, theirs.mode),
        ("protocol version", mine.protocol_version, theirs.protocol_version),
    ):
        if here != there:
            found.append(f"{name}: {here} here, {there} there")
    for name, ours, other in (
        ("tp_size", mine.tp_size, theirs.tp_size),
        ("pp_size", mine.pp_size, theirs.pp_size),
    ):
        if max(ours, other) % min(ours, other):
            found.append(f"{name}: {ours} here, {other} there (one must be a multiple of the other)")
    for key in sorted(mine.fingerprint.keys() | theirs.fingerprint.keys()):
        values = {mine.fingerprint.get(key), theirs.fingerprint.get(key)}
        if len(values) > 1 and UNKNOWN not in values:
            found.append(f"{printable(key)}: {_shown(mine, key)} here, {_shown(theirs, key)} there")
    return found


def _shown(engine: EngineInfo, key: str) -> str:
    value = engine.fingerprint.get(key)
    return "missing" if value is None else repr(printable(value, 100))
