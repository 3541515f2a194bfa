"""Whatever a client sends is answered by the engines or refused in clear words; the router never fails over it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import Answer, FakeEngine, Seen, async_test, cluster, eventually, vllm_error

from kvpush.router import RouterConfig, legs
from kvpush.router.backend import Backend
from kvpush.router.errors import ApiError
from kvpush.router.prompts import split

pytestmark = pytest.mark.unit

NO = Answer(400, vllm_error(400, "the engine refuses this"))
VALUES: list[str] = [
    *("null", "true", "-1", "0", "1e400", "1e300", "9" * 30, "9" * 5000, '"x"', '"9"', '""', "[]", "{}", "[[]]"),
    *("[null]", '["a"]', '["a", 1]', "[1, 2]", "[[1], [2]]", "[[1, 2.5], []]", '["a", ["b"]]', '[{"a": 1}, "b"]'),
    *("[[[[1]]]]", '[[[["a"]]], 1]', '{"role": "user"}', '[{"role": 7, "content": {}}]', '"\\ud800"'),
    "[" * 900 + "]" * 900,
]
KEYS = (
    *("prompt", "messages", "n", "stream", "stream_options", "max_tokens", "best_of", "echo", "logprobs", "tools"),
    *("prompt_logprobs", "truncate_prompt_tokens", "vllm_xargs", "kv_transfer_params", "use_beam_search", "model"),
    "prompt_embeds",
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@async_test
async def test_any_value_at_any_key_is_the_engines_to_refuse(path: str) -> None:
    async with cluster() as it:
        it.p[0].answer = it.d[0].answer = NO
        for key in KEYS:
            for value in VALUES:
                rest = {"prompt": "x", "messages": []}
                rest.pop(key, None)
                body = f'{{{json.dumps(rest)[1:-1]}{", " if rest else ""}"{key}": {value}}}'.encode()
                status, answer, _ = await it.post(body, path)
                assert status == 400, (key, value[:40], answer)
                assert answer["error"]["message"]
        await eventually(it.idle)
        assert it.parts.metrics.in_flight == 0


def _walk(data: bytes) -> None:
    """All that the router does with a body before an engine sees it."""
    body, _ = legs.drop_client_params(legs.parse_body(data))
    for chat in (False, True):
        local = legs.local_reason(body, chat=chat)
        bodies = (split(body, 4) if local is None and not chat else None) or [body]
        consumers = legs.consumer_count(body) or 1
        legs.is_on(body, "stream")
        for each in bodies:
            params = legs.prefill_params("push", "t", consumers) if local is None else None
            if params is not None:
                legs.encode(legs.prefill_body(each, params, chat=chat))
            sent = legs.encode(legs.decode_body(each, params))
            assert msgspec.json.decode(sent, type=dict[str, msgspec.Raw]).keys() >= each.keys()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


bodies = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), json_values, max_size=6)
DAMAGES = (b"", b"{", b"]", b'"', b",", b"\\", b"9e9", b"\xff", b"\0")


@given(bodies, st.randoms(), st.integers(0, 4))
@settings(deadline=None, max_examples=400)
def test_a_body_is_taken_or_refused_and_nothing_else(
    body: dict[str, Any], draw: random.Random, num_damages: int
) -> None:
    data = bytearray(json.dumps(body).encode())
    for _ in range(num_damages):
        place = draw.randrange(len(data) + 1)
        data[place : place + draw.randrange(2)] = draw.choice(DAMAGES)
    refused: ApiError | None = None
    try:
        _walk(bytes(data))
    except ApiError as error:
        refused = error
    assert refused is None or (refused.status, refused.retryable) == (400, False)


@pytest.mark.parametrize("n", ["1025", "1e300", "9" * 30])
@async_test
async def test_more_samples_than_can_be_handed_over_are_left_to_the_decode_engine(n: str) -> None:
    async with cluster() as it:
        it.d[0].answer = NO
        assert (await it.post(f'{{"prompt": "x", "n": {n}}}'.encode()))[0] == 400
        assert not it.p[0].seen
        assert it.parts.metrics.local == {"n": 1}


@pytest.mark.parametrize("name", ["X-Request-Id", "Authorization", "traceparent", "X-Session-ID"])
@pytest.mark.parametrize("value", [b"caf\xe9\xff", b"a\x01b", b"x" * 5000])
@async_test
async def test_a_header_that_cannot_be_sent_on_is_refused_by_name(name: str, value: bytes) -> None:
    async with cluster() as it:
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + name.encode() + b": " + value
            + b'\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}'
        )  # fmt: skip
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answer = await reader.read()
        writer.close()
        assert answer.split(b" ", 2)[1] == b"400", answer[:300]
        assert not it.d[0].seen


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
@async_test
async def test_a_body_that_is_not_what_its_encoding_says(encoding: str) -> None:
    async with cluster() as it:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json", "Connection": "close"}
        async with it.http.post(it.url + "/v1/completions", data=b"\xffnot packed", headers=headers) as response:
            assert response.status == 400
        assert (await it.post({"prompt": "x"}))[0] == 200


# Credentials


def _kept(backend: Backend) -> list[str]:
    return [str(value) for value in vars(backend).values() if "client-token" in str(value)]


@async_test
async def test_a_clients_credentials_are_forgotten_after_the_probe_they_served_for() -> None:
    def setup(p: list[FakeEngine], d: list[FakeEngine]) -> None:
        p[0].api_key = d[0].api_key = "client-token"

    headers = {"Authorization": "Bearer client-token"}
    async with cluster(setup=setup, wait_ready=False) as it:
        backend = it.parts.prefill.backends[0]
        assert (await it.post({"prompt": "x"}, headers=headers))[0] == 200
        assert _kept(backend) == []
        await it.p[0].stop()
        await eventually(lambda: not backend.ready)
        await it.p[0].start()
        assert (await it.post({"prompt": "x"}, headers=headers))[0] == 200
        assert it.p[0].probes[-1].headers["Authorization"] == "Bearer client-token"
        assert _kept(backend) == []


@async_test
async def test_credentials_that_do_not_help_are_forgotten_too_and_not_tried_over_and_over() -> None:
    def setup(p: list[FakeEngine], d: list[FakeEngine]) -> None:
        p[0].api_key = "other"

    async with cluster(setup=setup, wait_ready=False, identity_wait_s=1.0, health_interval_s=0.3) as it:
        status, answer, _ = await it.post({"prompt": "x"}, headers={"Authorization": "Bearer client-token"})
        assert status == 503
        assert "401" in answer["error"]["message"]
        assert len(it.p[0].probes) < 16
        await eventually(lambda: not _kept(it.parts.prefill.backends[0]))


@async_test
async def test_credentials_offered_to_an_engine_that_is_down_are_not_kept_for_it() -> None:
    async with cluster(wait_ready=False, identity_wait_s=0.3, health_interval_s=0.1) as it:
        await it.p[0].stop()
        backend = it.parts.prefill.backends[0]
        await eventually(lambda: not backend.ready)
        checks = it.parts.metrics.probes["unreachable"]
        assert (await it.post({"prompt": "x"}, headers={"Authorization": "Bearer client-token"}))[0] == 503
        await eventually(lambda: not _kept(backend))
        assert it.parts.metrics.probes["unreachable"] - checks < 20


@async_test
async def test_the_routers_own_key_makes_a_clients_unneeded() -> None:
    async with cluster(api_key="own") as it:
        backend = it.parts.prefill.backends[0]
        backend.lost("test")
        backend.offer_authorization("Bearer client-token")
        assert _kept(backend) == []


# Retries


@pytest.mark.parametrize("role", ["p", "d"])
@async_test
async def test_by_default_one_failure_before_the_first_byte_is_not_the_clients(role: str) -> None:
    assert RouterConfig(prefill=("http://p",), decode=("http://d",)).retries == 1
    async with cluster(retries=1) as it:
        engine = it.p[0] if role == "p" else it.d[0]

        def first_fails(seen: Seen) -> Answer:
            return Answer(500, vllm_error(500, "load failed")) if len(engine.seen) == 1 else Answer()

        engine.answer = first_fails
        status, _, headers = await it.post({"prompt": "x", "max_tokens": 2})
        assert status == 200
        assert len({seen.transfer_id for seen in engine.seen}) == 2
        assert headers["x-kvpush-transfer-id"] == it.d[0].seen[-1].transfer_id
        engine.answer = Answer(500, vllm_error(500, "for good"))
        assert (await it.post({"prompt": "x"}))[0] in (500, 502)
        assert len(engine.seen) == 4
        await eventually(it.idle)


@async_test
async def test_nothing_is_repeated_once_the_client_has_had_a_byte() -> None:
    async with cluster(retries=1) as it:
        it.d[0].answer = Answer(die_after=1)
        async with it.http.post(it.url + "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            text = await response.text()
        assert response.status == 200
        assert '"error"' in text
        assert len(it.d[0].seen) == 1
        assert it.parts.metrics.retries == 0
