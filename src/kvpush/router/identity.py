"""Who a prefill engine is: what the decode side needs to reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


class IdentityError(ValueError):
    """An engine's transfer parameters do not say who it is; the message names the field."""


@dataclass(frozen=True, slots=True)
class Identity:
    """engine_id is new for every life of the engine; host and port are those of its side channel."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    mode: str

    @classmethod
    def of(cls, params: object) -> Identity:
        """Reads it from the `kv_transfer_params` of a prefill engine's answer. Raises IdentityError."""
        if not isinstance(params, Mapping):
            raise IdentityError("the answer has no kv_transfer_params: the engine runs no kvpush connector")
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            host=_text(params, "remote_host"),
            port=_number(params, "remote_port", 65535),
            tp_size=_number(params, "tp_size", 1 << 16),
            pp_size=_number(params, "pp_size", 1 << 16),
            mode=_text(params, "transfer_mode"),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _text(params: Mapping[str, Any], field: str) -> str:
    value = params.get(field)
    if not isinstance(value, str) or not value:
        raise IdentityError(f"kv_transfer_params.{field} is {value!r}, not a text")
    return value


def _number(params: Mapping[str, Any], field: str, high: int) -> int:
    value = params.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise IdentityError(f"kv_transfer_params.{field} is {value!r}, not an integer from 1 to {high}")
    return value
