"""The engines of one role, and which of them gets the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvpush.router.backend import Backend
from kvpush.router.errors import ApiError


class Pool:
    """Hands out the engine with the fewest legs in flight; among equals the one whose last turn is longest ago.

    Engines that say they are unhealthy serve, but more slowly: they get requests only if all are.
    """

    def __init__(
        self, role: str, urls: tuple[str, ...], make: Callable[[str, str, Callable[[], None]], Backend]
    ) -> None:
        self.role = role
        self.backends = [make(role, url, self._notify) for url in urls]
        self._changed = asyncio.Event()
        self._turn = 0

    async def acquire(self, wait_s: float, authorization: str | None = None) -> Backend:
        """Waits at most `wait_s` for a usable engine and counts one leg on it, which `release` takes off again.

        Raises ApiError (503) that says what is wrong with the engines.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not (usable := [backend for backend in self.backends if backend.ready]):
                    for backend in self.backends:
                        backend.offer_authorization(authorization)
                    await self._changed.wait()
        except TimeoutError:
            troubles = "; ".join(f"{backend.url}: {backend.trouble or 'not probed yet'}" for backend in self.backends)
            message = f"No {self.role} engine is usable ({troubles})"
            raise ApiError(503, message, outcome="unavailable", retryable=False) from None
        chosen = min(usable, key=lambda backend: (bool(backend.unhealthy), backend.in_flight, backend.picked))
        self._turn += 1
        chosen.picked = self._turn
        chosen.in_flight += 1
        return chosen

    def release(self, backend: Backend) -> None:
        backend.in_flight -= 1

    def as_list(self) -> list[dict[str, Any]]:
        return [backend.as_dict() for backend in self.backends]

    def _notify(self) -> None:
        # Every waiter wakes and looks again; later ones wait on a fresh event.
        self._changed.set()
        self._changed = asyncio.Event()
