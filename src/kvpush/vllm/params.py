"""`kv_transfer_params` of a request, checked: any map that a client sends arrives here.

Nothing in them can stop an engine. What does not fit makes the request an ordinary one (local prefill), is counted, and
is named in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpush.protocol.ids import TransferId, check_id
from kvpush.protocol.messages import MAX_CONSUMERS

# vLLM appends eight random characters to a request's id in each engine, and a number before it for n > 1.
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_SAMPLE = re.compile(r"^\d+_")


class BadParams(ValueError):
    """The map is no request for a transfer; the text names the key."""


@dataclass(frozen=True, slots=True)
class Produce:
    """This engine prefills; `consumers` D requests will come for the KV. fallback: its id comes from the request's."""

    transfer_id: TransferId
    consumers: int
    fallback: bool


@dataclass(frozen=True, slots=True)
class Consume:
    """This engine decodes; the KV comes from the engine whose side channel answers at (host, port)."""

    transfer_id: TransferId
    consumers: int
    host: str
    port: int
    engine_id: str | None
    fallback: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """A router asks who this engine is; nothing is held for it."""


Params = Produce | Consume | Probe | None


def parse_params(params: Mapping[str, Any] | None, request_id: str) -> Params:
    """What a request wants of the connector; None for an ordinary one. Raises BadParams naming the key."""
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise BadParams(f"kv_transfer_params must be a map, not {type(params).__name__}")
    if _flag(params, "kvpush_probe"):
        return Probe()
    produce, consume = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if produce and consume:
        raise BadParams("do_remote_decode and do_remote_prefill are both set")
    if not produce and not consume:
        return None
    mode = params.get("transfer_mode")
    if mode not in (None, "push"):
        raise BadParams(f"transfer_mode is {mode!r:.40}, this engine's is 'push'")
    transfer_id, fallback = _transfer_id(params, request_id)
    consumers = _integer(params, "kvpush_consumers", 1, 1, MAX_CONSUMERS)
    if produce:
        return Produce(transfer_id, consumers, fallback)
    host = params.get("remote_host")
    if not isinstance(host, str) or not 1 <= len(host) <= 253 or not host.isprintable():
        raise BadParams(f"remote_host is no host name: {host!r:.60}")
    port = _integer(params, "remote_port", None, 1, 65_535)
    engine_id = params.get("remote_engine_id")
    if engine_id is not None and not (
        isinstance(engine_id, str) and 1 <= len(engine_id) <= 256 and engine_id.isprintable()
    ):
        raise BadParams(f"remote_engine_id is no engine id: {engine_id!r:.60}")
    return Consume(transfer_id, consumers, host, port, engine_id, fallback)


def _transfer_id(params: Mapping[str, Any], request_id: str) -> tuple[TransferId, bool]:
    given = params.get("transfer_id")
    fallback = given is None
    if fallback:
        given = _SAMPLE.sub("", _SUFFIX.sub("", request_id))
    if not isinstance(given, str):
        raise BadParams(f"transfer_id must be a string, not {type(given).__name__}")
    try:
        # Also what comes from the request id: clients choose most of that by a header.
        check_id(given, "the request id, used as transfer_id," if fallback else "transfer_id")
    except ValueError as error:
        raise BadParams(str(error)) from None
    return TransferId(given), fallback


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadParams(f"{key} must be true or false, not {value!r:.40}")
    return value


def _integer(params: Mapping[str, Any], key: str, default: int | None, least: int, most: int) -> int:
    value = params.get(key, default)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadParams(f"{key} must be {least} to {most}, got {value!r:.40}")
    return value
