"""The connectors that are compared: how each is configured in an engine, and what its two legs carry.

vLLM's push connector needs to be told its producer's coordinates, which a router learns from a first request that runs
one leg after the other. kvpush needs host, port and transfer id only, all known before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpush.launch.ports import LOCALHOST

# Parameters of one finished request: they must not be reused for another.
ONE_REQUEST_ONLY = ("remote_block_ids", "remote_num_tokens")


class Legs(Protocol):
    """Makes the `kv_transfer_params` of one engine pair's requests."""

    @property
    def concurrent(self) -> bool:
        """True when both legs can be sent at once."""
        ...

    def prefill(self, transfer_id: str, /) -> dict[str, Any]:
        """Parameters of the prefill leg."""
        ...

    def decode(self, transfer_id: str, returned: Any, /) -> dict[str, Any]:
        """Parameters of the decode leg; `returned` is what the prefill leg gave back, None when both run at once.

        Raises ValueError if something is missing in it.
        """
        ...

    def learn(self, returned: Any) -> None:
        """Takes what is useful for later requests from a finished prefill leg."""
        ...


def _returned_map(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, Mapping) or not returned:
        raise ValueError(f"the prefill leg returned no kv_transfer_params, but {returned!r}")
    return dict(returned)


@dataclass(slots=True)
class PullLegs:
    """vLLM's pull: prefill first, then decode with exactly what prefill returned."""

    concurrent: bool = False

    def prefill(self, _transfer_id: str, /) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode(self, _transfer_id: str, returned: Any, /) -> dict[str, Any]:
        return _returned_map(returned)

    def learn(self, returned: Any) -> None:
        pass


@dataclass(slots=True)
class PushLegs(PullLegs):
    """vLLM's push: one request in sequence to learn the producer's coordinates, then both legs at once.

    The legs of one request find each other by the `X-Request-Id` header that both carry.
    """

    coordinates: dict[str, Any] = field(default_factory=dict)

    def decode(self, _transfer_id: str, returned: Any, /) -> dict[str, Any]:
        known = self.coordinates if self.concurrent else _returned_map(returned)
        return {name: value for name, value in known.items() if name not in ONE_REQUEST_ONLY}

    def learn(self, returned: Any) -> None:
        known = {name: value for name, value in _returned_map(returned).items() if name not in ONE_REQUEST_ONLY}
        # The field must be there; P's own id of a request that has not begun is unknown.
        self.coordinates = {**known, "remote_request_id": "unknown"}
        self.concurrent = True


@dataclass(slots=True)
class KVPushLegs:
    """kvpush in either mode. remote_port: the side channel of the prefill engine."""

    remote_port: int
    mode: str = "push"
    remote_host: str = LOCALHOST

    @property
    def concurrent(self) -> bool:
        return self.mode == "push"

    def _common(self, transfer_id: str) -> dict[str, Any]:
        return {"transfer_id": transfer_id, "transfer_mode": self.mode, "kvpush_consumers": 1}

    def prefill(self, transfer_id: str, /) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, **self._common(transfer_id)}

    def decode(self, transfer_id: str, _returned: Any, /) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": self.remote_host,
            "remote_port": self.remote_port,
            "tp_size": 1,
            "pp_size": 1,
            **self._common(transfer_id),
        }

    def learn(self, returned: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Connector:
    """A name for `--connectors`: the class that an engine loads, and how its requests are sent.

    legs: makes them from the prefill engine's side channel port. ours: it logs its transfers as `observe` reads them.
    """

    name: str
    kv_connector: str
    legs: Callable[[int], Legs]
    ours: bool


CONNECTORS = {
    connector.name: connector
    for connector in (
        Connector("vllm-pull", "NixlConnector", lambda _port: PullLegs(), ours=False),
        Connector("vllm-push", "NixlPushConnector", lambda _port: PushLegs(), ours=False),
        Connector("kvpush-push", "KVPushConnector", lambda port: KVPushLegs(port), ours=True),
        Connector("kvpush-pull", "KVPullConnector", lambda port: KVPushLegs(port, "pull"), ours=True),
    )
}


def connectors_named(text: str) -> list[Connector]:
    """Reads `vllm-push,kvpush-push`. Raises ValueError naming what is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CONNECTORS]
    if unknown or not names:
        raise ValueError(f"unknown connectors {unknown or text!r}; known: {', '.join(CONNECTORS)}")
    return [CONNECTORS[name] for name in dict.fromkeys(names)]
