"""One engine as the router sees it: how to reach it, whether it may be used, and who it is."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from kvpush.router.config import RouterConfig
from kvpush.router.errors import ApiError
from kvpush.router.identity import Identity, IdentityError
from kvpush.router.metrics import Metrics

log = logging.getLogger(__name__)

PREFILL = "prefill"
DECODE = "decode"

# A busy engine may answer one health check late; only a series of late answers makes it unusable.
LATE_CHECKS_ALLOWED = 2
FIRST_PAUSE_S = 0.1

CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class Backend:
    """Owns the watch over one engine. Everything runs in the router's event loop.

    role: PREFILL or DECODE. url: the engine's base URL. on_change is called whenever `ready` may have changed.
    """

    def __init__(
        self,
        role: str,
        url: str,
        session: aiohttp.ClientSession,
        config: RouterConfig,
        metrics: Metrics,
        on_change: Callable[[], None],
    ) -> None:
        self.role = role
        self.url = url
        self.in_flight = 0
        self.picked = 0
        self.identity: Identity | None = None
        self.trouble: str | None = None
        self.unhealthy = ""  # why a decode engine loads no KV at present, in its own words
        self._asked_s = asyncio.get_running_loop().time()
        self._needs_identity = role == PREFILL and config.mode == "push"
        self._usable = True
        self._session = session
        self._config = config
        self._metrics = metrics
        self._on_change = on_change
        self._authorization = f"Bearer {config.api_key}" if config.api_key else None
        self._offered: str | None = None  # a client's credentials, until the next check
        self._salt = os.urandom(32)
        self._tried = b""  # which of them the last check had, in a form that gives nothing away
        self._late_checks = 0
        self._wake = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether requests may be sent there now."""
        return self._usable and (self.identity is not None or not self._needs_identity)

    def as_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "url": self.url,
            "ready": self.ready,
            "in_flight": self.in_flight,
            "trouble": self.trouble,
            "unhealthy": self.unhealthy,
            "identity": self.identity.as_dict() if self.identity else None,
        }

    async def request(
        self, method: str, path: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Sends one request and returns once the answer's headers are there; the caller must release or close it.

        Raises ApiError (502) if there is no connection, and begins to look for the engine again.
        """
        try:
            return await self._session.request(
                method, self.url + path, data=data, headers=headers, allow_redirects=False
            )
        except CONNECTION_ERRORS as error:
            raise self.broken(error) from error

    def broken(self, error: BaseException) -> ApiError:
        """Takes note of a connection error and returns what the client is told about it."""
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        self.lost(reason)
        message = f"The {self.role} engine cannot be reached or broke off: {reason}"
        return ApiError(502, message, outcome=f"{self.role}_failed", retryable=True)

    def lost(self, reason: str) -> None:
        """The connection broke: whoever answers there next may be another engine."""
        if self.ready:
            log.warning("%s engine %s: %s", self.role, self.url, reason)
        self._usable = False
        self.identity = None
        self.unhealthy = ""
        self.trouble = reason
        self._wake.set()
        self._on_change()

    def saw(self, params: object) -> None:
        """Compares the transfer parameters of a prefill answer with the known identity, and follows a change."""
        if not self._needs_identity or not isinstance(params, Mapping):
            return
        engine_id = params.get("remote_engine_id")
        if self.identity is None or engine_id is None or engine_id == self.identity.engine_id:
            return
        log.info("prefill engine %s is now %s, was %s", self.url, engine_id, self.identity.engine_id)
        try:
            self._accept(params)
        except IdentityError as error:
            self.lost(str(error))

    def offer_authorization(self, authorization: str | None) -> None:
        """A client's credentials may serve for one probe when the router has none of its own; then they are forgotten.

        Those that the last check had in vain are not tried again at once: whoever waits offers them again and again.
        """
        if not authorization or self._authorization or not self._needs_identity or self.ready:
            return
        if self._disguised(authorization) != self._tried:
            self._offered = authorization
            self._wake.set()

    def _disguised(self, authorization: str) -> bytes:
        return hashlib.blake2b(authorization.encode("utf-8", "surrogatepass"), key=self._salt).digest()

    async def watch(self) -> None:
        """Probes the engine until it is known, checks its health from then on, and begins again when it is lost."""
        failures = 0
        while True:
            failures = 0 if await self._check() else failures + 1
            # Only what happens from here on cuts the pause short, not what the check itself found.
            self._wake.clear()
            if not failures and not self.ready:
                continue  # the engine was lost while the check was on its way
            pause = self._config.health_interval_s
            if failures:
                pause = min(pause, FIRST_PAUSE_S * 2 ** min(failures, 10))
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def healthy(self, limit_s: float | None = None) -> bool:
        """Whether `/health` answers 200 in time. Raises one of CONNECTION_ERRORS."""
        async with asyncio.timeout(self._config.probe_timeout_s if limit_s is None else limit_s):
            async with self._session.get(self.url + "/health") as response:
                await response.read()
                return response.status == 200

    async def _check(self) -> bool:
        offered, self._offered = self._offered, None
        self._tried = self._disguised(offered) if offered else b""
        try:
            if not await self.healthy():
                self.lost("/health does not answer 200")
                return False
            if self._needs_identity and self.identity is None:
                await self._probe(offered)
        except IdentityError as error:
            return self._probe_failed("refused", str(error))
        except TimeoutError:
            if self._needs_identity and self.identity is None:
                return self._probe_failed("timeout", f"no answer within {self._config.probe_timeout_s} s")
            self._late_checks += 1
            if self._late_checks <= LATE_CHECKS_ALLOWED:
                return self.ready
            self.lost("/health is late again and again")
            return False
        except (aiohttp.ClientError, OSError) as error:
            if self._needs_identity and self.identity is None:
                self._metrics.probes["unreachable"] += 1
            self.lost(f"{type(error).__name__}: {error}")
            return False
        self._late_checks = 0
        if self.role == DECODE and self._config.mode == "push":
            await self._ask_condition()
        if not self._usable or self.trouble:
            log.info("%s engine %s is usable", self.role, self.url)
        self._usable = True
        self.trouble = None
        self._on_change()
        return True

    def _probe_failed(self, result: str, reason: str) -> bool:
        if self.trouble != reason:
            log.warning("prefill engine %s: %s", self.url, reason)
        self._metrics.probes[result] += 1
        self.trouble = reason
        self._on_change()
        return False

    async def _ask_condition(self) -> None:
        """Now and then asks a decode engine whether it may load KV. No answer changes nothing."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s < self._config.condition_interval_s:
            return
        self._asked_s = now_s
        try:
            params = await self._ask_identity()
        except (IdentityError, *CONNECTION_ERRORS) as error:
            log.debug("decode engine %s does not say how it is: %s", self.url, error)
            return
        found = params.get("kvpush_unhealthy") if isinstance(params, Mapping) else None
        unhealthy = excerpt(found.encode()) if isinstance(found, str) else ""
        if bool(unhealthy) is not bool(self.unhealthy):
            log.warning("decode engine %s is %s", self.url, f"unhealthy: {unhealthy}" if unhealthy else "healthy again")
        self.unhealthy = unhealthy

    async def _probe(self, offered: str | None) -> None:
        """Learns who the engine is."""
        self._accept(await self._ask_identity(offered))
        self._metrics.probes["ok"] += 1

    async def _ask_identity(self, offered: str | None = None) -> object:
        """What an engine tells of itself in the answer to a request of one token. Raises IdentityError.

        offered: a client's credentials, for want of any of our own.
        """
        body = msgspec.json.encode(
            {
                "prompt": [0],
                "max_tokens": 1,
                "temperature": 0.0,
                "kv_transfer_params": {"do_remote_decode": True, "kvpush_probe": True},
            }
        )
        headers = {"Content-Type": "application/json", "X-Request-Id": f"kvpush-probe-{uuid.uuid4().hex}"}
        if authorization := self._authorization or offered:
            headers["Authorization"] = authorization
        async with asyncio.timeout(self._config.probe_timeout_s):
            async with self._session.post(self.url + "/v1/completions", data=body, headers=headers) as response:
                answer = await response.read()
        if response.status != 200:
            raise IdentityError(f"the identity probe was answered {response.status}: {excerpt(answer)}")
        try:
            content = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            raise IdentityError(f"the identity probe's answer is not JSON: {excerpt(answer)}") from None
        return content.get("kv_transfer_params") if isinstance(content, dict) else None

    def _accept(self, params: object) -> None:
        identity = Identity.of(params)
        if identity.mode != self._config.mode:
            raise IdentityError(f"the engine runs mode {identity.mode!r}, the router mode {self._config.mode!r}")
        self.identity = identity
        self._on_change()


def excerpt(body: bytes, limit: int = 300) -> str:
    """The beginning of an answer, for a message."""
    text = body[: limit * 4].decode(errors="replace")
    return text if len(text) <= limit else text[:limit] + "..."
