"""The bodies of the two legs: what is in the prompt is equal on both, and the client's body is never touched."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.router import legs
from kvpush.router.errors import ApiError
from kvpush.router.identity import Identity

pytestmark = pytest.mark.unit

# What vLLM 0.32 builds the prompt from (ChatParams, TokenizeParams, prompt_extras), and what selects the model.
PROMPT_KEYS = [
    "model",
    "prompt",
    "messages",
    "suffix",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
    "cache_salt",
]
CHAT_PROMPT_KEYS = [*PROMPT_KEYS, "response_format"]
OUTPUT_KEYS = [
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "stream_options",
    "temperature",
    "stop",
    "logprobs",
    "min_tokens",
    "guided_json",
    "structured_outputs",
    "seed",
    "echo",
]
IDENTITY = Identity("engine", "127.0.0.1", 5600, 2, 1, "push")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: "\\ud" not in json.dumps(value))
bodies = st.dictionaries(
    st.sampled_from([*CHAT_PROMPT_KEYS, *OUTPUT_KEYS, "user", "priority", "unknown"]), json_values, max_size=12
)


def parsed(body: dict[str, Any]) -> legs.Body:
    return legs.parse_body(json.dumps(body).encode())


def decoded(leg: legs.Body) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(legs.encode(leg))
    return content


@settings(deadline=None)
@given(bodies, st.booleans())
def test_the_prompt_is_equal_on_both_legs_and_the_clients_body_unchanged(body: dict[str, Any], chat: bool) -> None:
    client = parsed(body)
    before = copy.copy({key: bytes(value) for key, value in client.items()})
    prefill = legs.prefill_body(client, {"transfer_id": "t"}, chat=chat)
    decode = legs.decode_body(client, {"transfer_id": "t"})
    for key in CHAT_PROMPT_KEYS if chat else PROMPT_KEYS:
        assert (key in prefill, key in decode) == (key in body, key in body)
        if key in body:
            assert bytes(prefill[key]) == bytes(decode[key]) == json.dumps(body[key]).encode()
    assert decoded(decode) == {**body, "kv_transfer_params": {"transfer_id": "t"}}
    assert {key: bytes(value) for key, value in client.items()} == before


@settings(deadline=None)
@given(bodies, st.booleans())
def test_the_prefill_leg_asks_for_one_plain_token(body: dict[str, Any], chat: bool) -> None:
    leg = decoded(legs.prefill_body(parsed(body), {"transfer_id": "t"}, chat=chat))
    assert (leg["max_tokens"], leg["n"], leg["stream"], leg["temperature"]) == (1, 1, False, 0.0)
    assert leg["ignore_eos"] is True
    assert leg.get("max_completion_tokens") == (1 if chat else None)
    fixed = {"max_tokens", "max_completion_tokens", "n", "stream", "temperature", "ignore_eos", "kv_transfer_params"}
    assert not set(leg) & (set(OUTPUT_KEYS) - fixed)
    # Everything that is neither known to shape the output nor fixed is still there.
    gone = {"response_format"} if not chat else set()
    assert set(leg) == (set(body) - set(OUTPUT_KEYS) - gone) | (fixed - (set() if chat else {"max_completion_tokens"}))


@settings(deadline=None)
@given(bodies, json_values)
def test_no_transfer_parameters_of_a_client_survive(body: dict[str, Any], params: Any) -> None:
    client = parsed({**body, "kv_transfer_params": params, "vllm_xargs": {"kv_transfer_params": params, "a": 1.0}})
    clean, dropped = legs.drop_client_params(client)
    assert dropped
    assert decoded(legs.decode_body(clean, None)) == {**body, "vllm_xargs": {"a": 1.0}}
    assert decoded(legs.decode_body(client, {"transfer_id": "t"}))["kv_transfer_params"] == {"transfer_id": "t"}


@pytest.mark.parametrize("extra", [None, [], "kv_transfer_params", 1, {"a": 1}])
def test_arguments_without_transfer_parameters_stay(extra: Any) -> None:
    body = {"vllm_xargs": extra, "kv_transfer_params": None}
    clean, dropped = legs.drop_client_params(parsed(body))
    assert not dropped
    assert decoded(clean) == {"vllm_xargs": extra}


@pytest.mark.parametrize(
    ("body", "count"),
    [({}, 1), ({"n": None}, 1), ({"n": 3}, 3), ({"n": "3"}, 3), ({"n": 3.0}, 3), ({"n": True}, 1)]
    + [({"n": bad}, None) for bad in (0, -1, 1.5, "x", "", [], {})],
)
def test_consumers(body: dict[str, Any], count: int | None) -> None:
    assert legs.consumer_count(parsed(body)) == count


@pytest.mark.parametrize(
    ("body", "chat", "reason"),
    [
        ({}, False, None),
        ({"n": 3, "best_of": 3}, False, None),
        ({"best_of": 1}, False, None),
        ({"best_of": 2}, False, "best_of"),
        ({"n": 2, "best_of": "x"}, False, "best_of"),
        ({"use_beam_search": False}, False, None),
        ({"use_beam_search": "false"}, False, None),
        ({"use_beam_search": "true"}, True, "beam_search"),
        ({"use_beam_search": 1}, False, "beam_search"),
        ({"echo": True}, False, None),
        ({"echo": True, "logprobs": 0}, False, "prompt_logprobs"),
        ({"echo": True}, True, "prompt_logprobs"),
        ({"logprobs": 5}, False, None),
        ({"logprobs": True, "top_logprobs": 5}, True, None),
        ({"prompt_logprobs": 1}, True, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 10}, False, None),
        ({"truncate_prompt_tokens": None}, False, None),
        ({"truncate_prompt_tokens": -1}, True, "truncation"),
        ({"truncate_prompt_tokens": "-1"}, True, "truncation"),
        ({"truncate_prompt_tokens": "?"}, True, "malformed"),
        ({"prompt_embeds": "AA"}, False, "prompt_embeds"),
        ({"n": 0}, True, "malformed"),
    ],
)
def test_what_is_prefilled_locally(body: dict[str, Any], chat: bool, reason: str | None) -> None:
    assert legs.local_reason(parsed(body), chat=chat) == reason


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["n", "best_of", "echo", "use_beam_search", "truncate_prompt_tokens"]), json_values)
)
def test_any_body_is_judged(body: dict[str, Any]) -> None:
    reason = legs.local_reason(parsed(body), chat=False)
    assert reason is not None or legs.consumer_count(parsed(body))


@settings(deadline=None)
@given(st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode()))
def test_only_json_objects_are_bodies(data: bytes) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        is_object = isinstance(json.loads(data.decode(), parse_constant=refuse), dict)
    except ValueError:
        is_object = False
    if is_object:
        assert set(legs.parse_body(data)) == set(json.loads(data))
    else:
        with pytest.raises(ApiError, match="not a JSON object"):
            legs.parse_body(data)


def test_numbers_keep_their_digits() -> None:
    body = legs.parse_body(b'{"seed": 123456789012345678901234567890, "x": 1.10, "prompt": "\\u00e9"}')
    text = legs.encode(legs.decode_body(body, None))
    assert text == b'{"seed":123456789012345678901234567890,"x":1.10,"prompt":"\\u00e9"}'


def test_pull_parameters_of_the_prefill_engine_win() -> None:
    params = legs.pull_decode_params("mine", 1, {"transfer_id": "theirs", "remote_block_ids": [1]})
    assert params == {"transfer_id": "theirs", "kvpush_consumers": 1, "remote_block_ids": [1]}
    assert legs.pull_decode_params("mine", 2, {})["transfer_id"] == "mine"


def test_push_parameters_are_json() -> None:
    params = legs.push_decode_params("t", 3, IDENTITY)
    assert msgspec.json.decode(msgspec.json.encode(params)) == params
    assert params["tp_size"] == 2
