"""kv_transfer_params: any map arrives, and nothing in it can stop an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.protocol.ids import MAX_ID_BYTES
from kvpush.vllm.params import BadParams, Consume, Probe, Produce, parse_params

pytestmark = pytest.mark.unit

PRODUCE = {"do_remote_decode": True, "transfer_id": "t"}
CONSUME = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "p", "remote_port": 1000}


@pytest.mark.parametrize("params", [None, {}, {"transfer_id": "t"}, {"do_remote_decode": False}, {"other": 1}])
def test_ordinary_requests_want_nothing(params: dict[str, Any] | None) -> None:
    assert parse_params(params, "r") is None


def test_a_prefill_leg() -> None:
    assert parse_params(PRODUCE, "r") == Produce("t", 1, fallback=False)  # type: ignore[arg-type]
    given = {**PRODUCE, "kvpush_consumers": 3, "do_remote_prefill": False, "transfer_mode": "push", "unknown": [1]}
    assert parse_params(given, "r") == Produce("t", 3, fallback=False)  # type: ignore[arg-type]


def test_a_decode_leg() -> None:
    assert parse_params(CONSUME, "r") == Consume("t", 1, "p", 1000, None, fallback=False)  # type: ignore[arg-type]
    given = {**CONSUME, "remote_engine_id": "e", "kvpush_consumers": None, "transfer_mode": None, "tp_size": 1}
    assert parse_params(given, "r") == Consume("t", 1, "p", 1000, "e", fallback=False)  # type: ignore[arg-type]


def test_a_probe_holds_nothing() -> None:
    assert parse_params({"kvpush_probe": True}, "r") == Probe()
    assert parse_params({"kvpush_probe": True, **PRODUCE}, "r") == Probe()


@pytest.mark.parametrize(
    ("request_id", "transfer_id"),
    [
        ("cmpl-abc-0-0123abcd", "cmpl-abc-0"),
        ("2_cmpl-abc-0-0123abcd", "cmpl-abc-0"),
        ("chatcmpl-abc", "chatcmpl-abc"),
        ("mine-0123ABCD", "mine-0123ABCD"),
        ("mine-0123abcde", "mine-0123abcde"),
    ],
)
def test_without_transfer_id_the_request_id_names_the_transfer_at_both_sides(request_id: str, transfer_id: str) -> None:
    for params in (PRODUCE, CONSUME):
        found = parse_params({**params, "transfer_id": None}, request_id)
        assert isinstance(found, Produce | Consume)
        assert (found.transfer_id, found.fallback) == (transfer_id, True)


@pytest.mark.parametrize("request_id", ["x" * 300, "a\nb", "-0123abcd", "7_", "\u00ff\u0000"])
def test_a_request_id_that_can_be_no_transfer_id_is_refused(request_id: str) -> None:
    """Clients choose it by a header."""
    with pytest.raises(BadParams, match="the request id, used as transfer_id"):
        parse_params({**PRODUCE, "transfer_id": None}, request_id)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (PRODUCE, "transfer_id", 7),
        (PRODUCE, "transfer_id", ""),
        (PRODUCE, "transfer_id", "x" * (MAX_ID_BYTES + 1)),
        (PRODUCE, "transfer_id", "\u00e9" * MAX_ID_BYTES),
        (PRODUCE, "transfer_id", "a\x00b"),
        (PRODUCE, "transfer_id", "\ud800"),
        (PRODUCE, "transfer_id", ["t"]),
        (PRODUCE, "do_remote_decode", "true"),
        (PRODUCE, "do_remote_decode", 1),
        (PRODUCE, "kvpush_consumers", 0),
        (PRODUCE, "kvpush_consumers", -1),
        (PRODUCE, "kvpush_consumers", 10**9),
        (PRODUCE, "kvpush_consumers", True),
        (PRODUCE, "kvpush_consumers", 1.5),
        (PRODUCE, "kvpush_consumers", "3"),
        (PRODUCE, "transfer_mode", "pull"),
        (PRODUCE, "transfer_mode", {"a": "b"}),
        (PRODUCE, "kvpush_probe", "yes"),
        (CONSUME, "do_remote_prefill", {}),
        (CONSUME, "remote_host", None),
        (CONSUME, "remote_host", ""),
        (CONSUME, "remote_host", "x" * 254),
        (CONSUME, "remote_host", "a\tb"),
        (CONSUME, "remote_host", 127),
        (CONSUME, "remote_port", None),
        (CONSUME, "remote_port", 0),
        (CONSUME, "remote_port", 65_536),
        (CONSUME, "remote_port", "1000"),
        (CONSUME, "remote_port", True),
        (CONSUME, "remote_port", 10.5),
        (CONSUME, "remote_engine_id", ""),
        (CONSUME, "remote_engine_id", 5),
        (CONSUME, "remote_engine_id", "x" * 257),
        (CONSUME, "remote_engine_id", "a\nforged log line"),
        (CONSUME, "remote_engine_id", "\ud800"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_key(
    base: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(BadParams, match=key) as raised:
        parse_params({**base, key: value}, "r")
    text = str(raised.value)
    assert len(text) < 300
    assert text.isprintable()


@pytest.mark.parametrize("key", ["remote_host", "remote_port"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    with pytest.raises(BadParams, match=key):
        parse_params({name: value for name, value in CONSUME.items() if name != key}, "r")


def test_both_roles_at_once_are_refused() -> None:
    with pytest.raises(BadParams, match="do_remote_decode and do_remote_prefill"):
        parse_params({**PRODUCE, **CONSUME}, "r")


@pytest.mark.parametrize("params", [[1], "do_remote_decode", 7, ("do_remote_decode", True)])
def test_what_is_no_map_is_refused(params: Any) -> None:
    with pytest.raises(BadParams, match="must be a map"):
        parse_params(params, "r")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["do_remote_decode", "do_remote_prefill", "transfer_id", "remote_host", "remote_port", "remote_engine_id",
     "kvpush_consumers", "transfer_mode", "kvpush_probe", "remote_block_ids"]
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([{}, PRODUCE, CONSUME]),
    st.dictionaries(KEYS, JSON, max_size=4),
    st.text(min_size=1, max_size=300),
)
def test_any_map_is_understood_or_refused(base: dict[str, Any], changes: dict[str, Any], request_id: str) -> None:
    try:
        found = parse_params({**base, **changes}, request_id)
    except BadParams:
        return
    if isinstance(found, Consume):
        assert 1 <= found.port <= 65_535
    if isinstance(found, Produce | Consume):
        assert 1 <= len(found.transfer_id.encode()) <= MAX_ID_BYTES
        assert found.consumers >= 1
