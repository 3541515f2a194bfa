"""What the router is told at start-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

MODES = ("push", "pull")


class ConfigError(ValueError):
    """An option is missing or impossible; the message begins with the option's name."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Options of one router. Raises ConfigError, naming the option, if a value is impossible.

    prefill, decode: base URLs of the engines (`http://host:8100`; a trailing `/v1` is cut off).
    mode: `push` dispatches both legs at once; `pull` sends the decode leg with what the prefill leg returned.
    port: 0 takes a free one.
    api_key: bearer token for the router's own requests to the engines; a client's header is passed on anyway.
    request_timeout_s: from the arrival of a request to its last byte.
    connect_timeout_s: for a TCP connection to an engine. probe_timeout_s: for one identity probe or health check.
    identity_wait_s: how long a request waits for a usable engine.
    health_interval_s: between two health checks of an engine. condition_interval_s: between two questions to a decode
        engine whether it may load KV; each costs it one token.
    prefill_grace_s: how long a prefill leg may outlive its decode leg, which has ended well, before it is cancelled.
    shutdown_timeout_s: what requests in flight get when the router is told to stop.
    retries: how often a request is dispatched anew, as another transfer, when an engine failed before anything was sent
        to the client. Nothing is lost by that but time: an engine keeps nothing of a completion. More than one would
        let a request that kills engines kill as many of them.
    max_body_bytes, max_in_flight, max_prompts: a larger body, more requests at once, or more prompts in one
        request are refused.
    recent_records: how many transfers `/kvpush/status` remembers.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    mode: str = "push"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    probe_timeout_s: float = 10.0
    identity_wait_s: float = 10.0
    health_interval_s: float = 2.0
    condition_interval_s: float = 10.0
    prefill_grace_s: float = 1.0
    shutdown_timeout_s: float = 10.0
    retries: int = 1
    max_body_bytes: int = 64 * 1024 * 1024
    max_in_flight: int = 4096
    max_prompts: int = 256
    recent_records: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill", _urls("prefill", self.prefill))
        object.__setattr__(self, "decode", _urls("decode", self.decode))
        if self.mode not in MODES:
            raise ConfigError(f"mode: {self.mode!r} is not one of {', '.join(MODES)}")
        if not self.host:
            raise ConfigError("host: must not be empty")
        _integer("port", self.port, 0, 65535)
        if self.api_key is not None and (
            not self.api_key or not self.api_key.isascii() or not self.api_key.isprintable()
        ):
            raise ConfigError("api_key: must be printable ASCII and not empty")
        positive = ("request_timeout_s", "connect_timeout_s", "probe_timeout_s", "health_interval_s")
        for name in (*positive, "condition_interval_s"):
            _seconds(name, getattr(self, name), positive=True)
        for name in ("identity_wait_s", "prefill_grace_s", "shutdown_timeout_s"):
            _seconds(name, getattr(self, name), positive=False)
        _integer("retries", self.retries, 0, 10)
        for name in ("max_body_bytes", "max_in_flight", "max_prompts", "recent_records"):
            _integer(name, getattr(self, name), 1, None)


def _urls(option: str, urls: object) -> tuple[str, ...]:
    if isinstance(urls, str) or not isinstance(urls, (tuple, list)):
        raise ConfigError(f"{option}: must be a list of URLs, not {urls!r}")
    if not urls:
        raise ConfigError(f"{option}: at least one engine URL is needed")
    normalised = [_url(option, url) for url in urls]
    for url in normalised:
        if normalised.count(url) > 1:
            raise ConfigError(f"{option}: {url} is given more than once")
    return tuple(normalised)


def _url(option: str, url: object) -> str:
    if not isinstance(url, str):
        raise ConfigError(f"{option}: {url!r} is not a URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{option}: {url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{option}: {url!r} is not of the form http://host:port")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(f"{option}: {url!r} must have no query, fragment or credentials")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def _seconds(option: str, value: object, *, positive: bool) -> None:
    bad_type = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
    if bad_type or value < 0 or (positive and value == 0):  # type: ignore[operator]
        raise ConfigError(
            f"{option}: {value!r} is not a {'positive ' if positive else 'non-negative '}number of seconds"
        )


def _integer(option: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{option}: {value!r} is not an integer {bounds}")
