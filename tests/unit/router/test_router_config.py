"""Impossible options are refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest

from kvpush.router import ConfigError, RouterConfig, router_command

pytestmark = pytest.mark.unit

GOOD: dict[str, Any] = {"prefill": ("http://p:1",), "decode": ("http://d:2",)}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("prefill", bad) for bad in ((), "http://p:1", ("p:1",), ("ftp://p",), ("http://",), (1,), ("http://p:x",))],
        *[
            ("decode", bad)
            for bad in ((), ("http://p:0",), ("http://p:1?q",), ("http://u:p@h",), ("http://a", "http://a/"))
        ],
        ("mode", "shove"),
        ("host", ""),
        *[("port", bad) for bad in (-1, 65536, "80", True, 1.0)],
        *[("api_key", bad) for bad in ("", "a\nb", "é")],
        *[("request_timeout_s", bad) for bad in (0, -1, math.nan, math.inf, "1", True)],
        ("connect_timeout_s", 0),
        ("probe_timeout_s", 0),
        ("identity_wait_s", -1),
        ("health_interval_s", 0),
        ("prefill_grace_s", -0.1),
        ("shutdown_timeout_s", None),
        *[("retries", bad) for bad in (-1, 11, 1.0)],
        ("max_body_bytes", 0),
        ("max_in_flight", 0),
        ("max_prompts", 0),
        ("recent_records", 0),
    ],
)
def test_an_impossible_value_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: "):
        RouterConfig(**{**GOOD, option: value})


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://h:8100", "http://h:8100"),
        ("http://h:8100/", "http://h:8100"),
        ("http://h:8100/v1/", "http://h:8100"),
        ("https://h/base/v1", "https://h/base"),
        ("http://[::1]:8100", "http://[::1]:8100"),
    ],
)
def test_urls_are_brought_to_one_form(url: str, normal: str) -> None:
    config = RouterConfig(prefill=[url], decode=(url,))  # type: ignore[arg-type]
    assert config.prefill == config.decode == (normal,)


def test_the_command_has_every_option_with_its_default() -> None:
    parameters = inspect.signature(router_command).parameters
    assert set(parameters) == {field.name for field in dataclasses.fields(RouterConfig)} | {"log_level"}
    for field in dataclasses.fields(RouterConfig):
        if field.default is not dataclasses.MISSING:
            assert parameters[field.name].default == field.default, field.name
