"""How the router learns who a prefill engine is, and notices that it is somebody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_fakes import Answer, FakeEngine, async_test, cluster, eventually, vllm_error

from kvpush.router.identity import Identity, IdentityError

pytestmark = pytest.mark.unit

HELLO = {"prompt": "hello", "max_tokens": 3}


@async_test
async def test_one_probe_is_enough() -> None:
    async with cluster(prefills=2) as it:
        await asyncio.gather(*(it.post(HELLO) for _ in range(10)))
        await asyncio.sleep(0.3)  # some health checks
        for engine in it.p:
            assert len(engine.probes) == 1
            probe = engine.probes[0]
            assert probe.body["prompt"] == [0]
            assert probe.body["max_tokens"] == 1
            assert probe.params == {"do_remote_decode": True, "kvpush_probe": True}
        assert it.parts.metrics.probes == {"ok": 2}


@async_test
async def test_requests_wait_for_the_probe_and_share_it() -> None:
    def slow(p: list[FakeEngine], d: list[FakeEngine]) -> None:
        p[0].probe = Answer(delay_s=0.3)

    async with cluster(setup=slow, wait_ready=False) as it:
        answers = await asyncio.gather(*(it.post(HELLO) for _ in range(5)))
        assert [status for status, _, _ in answers] == [200] * 5
        assert len(it.p[0].probes) == 1


@pytest.mark.parametrize(
    ("probe", "result", "trouble"),
    [
        (Answer(hang=True), "timeout", "no answer within 0.3 s"),
        (Answer(500, vllm_error(500, "sick")), "refused", "sick"),
        (Answer(raw=b"<html>"), "refused", "not JSON"),
        (Answer(raw=b"[]"), "refused", "no kvpush connector"),
        (Answer(raw=b"{}"), "refused", "no kvpush connector"),
        (Answer(params={}), "refused", "remote_engine_id is None"),
        (Answer(die_after=0), "unreachable", "Disconnected"),
    ],
)
@async_test
async def test_an_engine_that_does_not_tell_who_it_is_gets_no_requests(
    probe: Answer, result: str, trouble: str
) -> None:
    def setup(p: list[FakeEngine], d: list[FakeEngine]) -> None:
        p[0].probe = probe

    limit_s = 0.3 if probe.hang else 2.0
    async with cluster(setup=setup, wait_ready=False, identity_wait_s=1.0, probe_timeout_s=limit_s) as it:
        status, answer, _ = await it.post(HELLO)
        assert status == 503
        assert trouble in answer["error"]["message"]
        assert it.p[0].url in answer["error"]["message"]
        assert not it.p[0].seen
        assert not it.d[0].seen
        assert it.parts.metrics.probes[result] >= 1
        assert it.p[0].most_concurrent <= 1  # one probe at a time
        assert trouble in (await it.status())["prefill"][0]["trouble"]
        it.p[0].probe = Answer()  # and it is found as soon as it does
        await eventually(lambda: it.parts.prefill.backends[0].ready)
        assert (await it.post(HELLO))[0] == 200


@async_test
async def test_an_engine_of_the_other_mode_is_refused() -> None:
    def setup(p: list[FakeEngine], d: list[FakeEngine]) -> None:
        p[0].mode = "pull"

    async with cluster(setup=setup, wait_ready=False, identity_wait_s=0.2) as it:
        status, answer, _ = await it.post(HELLO)
        assert status == 503
        assert "runs mode 'pull', the router mode 'push'" in answer["error"]["message"]


@async_test
async def test_a_restart_that_breaks_connections_leads_to_a_new_probe() -> None:
    async with cluster(health_interval_s=60.0) as it:
        assert (await it.post(HELLO))[0] == 200
        it.p[0].answer = Answer(hang=True)
        in_flight = asyncio.create_task(it.post(HELLO))
        await eventually(lambda: len(it.p[0].seen) == 2)
        await it.p[0].restart()
        assert (await in_flight)[0] == 502
        it.p[0].answer = Answer()
        assert (await it.post(HELLO))[0] == 200
        assert it.d[0].seen[-1].params["remote_engine_id"] == "p0-2"
        assert len(it.p[0].probes) == 2


@async_test
async def test_a_restart_is_noticed_without_any_request() -> None:
    async with cluster() as it:
        await it.p[0].stop()
        await eventually(lambda: not it.parts.prefill.backends[0].ready)
        await it.p[0].restart()
        await eventually(lambda: it.parts.prefill.backends[0].ready)
        assert (await it.post(HELLO))[0] == 200
        assert it.d[0].only().params["remote_engine_id"] == "p0-2"


@async_test
async def test_an_answer_with_another_identity_is_believed() -> None:
    async with cluster() as it:
        it.p[0].engine_id = "p0-9"
        it.p[0].side_channel = ("127.0.0.1", 5699)
        it.p[0].pairs["127.0.0.1:5699"] = it.p[0]
        await it.post(HELLO)  # goes out with the old identity
        await it.post(HELLO)
        assert [seen.params["remote_engine_id"] for seen in it.d[0].seen] == ["p0-1", "p0-9"]
        assert it.d[0].seen[1].params["remote_port"] == 5699
        assert len(it.p[0].probes) == 1


@async_test
async def test_an_answer_with_half_an_identity_leads_to_a_new_probe() -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(params={"remote_engine_id": "p0-9"})
        assert (await it.post(HELLO))[0] == 200
        await eventually(lambda: len(it.p[0].probes) == 2)
        await eventually(lambda: it.parts.prefill.backends[0].ready)


@async_test
async def test_an_engine_that_is_ill_is_left_out_while_another_is_well() -> None:
    async with cluster(prefills=2, decodes=2) as it:
        it.p[0].healthy = it.d[1].healthy = False
        await eventually(lambda: not it.parts.prefill.backends[0].ready and not it.parts.decode.backends[1].ready)
        checks = [engine.health_checks for engine in [*it.p, *it.d]]
        for _ in range(4):
            assert (await it.post(HELLO))[0] == 200
        assert [len(engine.seen) for engine in [*it.p, *it.d]] == [0, 4, 4, 0]
        await asyncio.sleep(0.5)
        assert all(now.health_checks - before < 12 for now, before in zip([*it.p, *it.d], checks, strict=True))
        it.p[0].healthy = it.d[1].healthy = True
        await eventually(lambda: it.parts.prefill.backends[0].ready and it.parts.decode.backends[1].ready)


@async_test
async def test_an_engine_whose_health_is_late_is_left_out_only_after_a_while() -> None:
    async with cluster(decodes=2, probe_timeout_s=0.2, health_interval_s=0.05) as it:
        it.d[0].stall_health = True
        backend = it.parts.decode.backends[0]
        before = it.d[0].health_checks
        await eventually(lambda: not backend.ready)
        assert it.d[0].health_checks - before >= 3
        assert "late" in (backend.trouble or "")
        it.d[0].stall_health = False
        await eventually(lambda: backend.ready)


@async_test
async def test_one_engine_may_be_both() -> None:
    async with cluster() as it:
        both = it.p[0].url
        async with cluster(prefill=(both,), decode=(both,)) as other:
            status, answer, _ = await other.post(HELLO)
            assert status == 200
            assert answer["choices"][0]["text"] == "<hello>one two"
            assert len({seen.transfer_id for seen in it.p[0].seen}) == 1
            assert len(it.p[0].seen) == 2


@pytest.mark.parametrize("own_key", [True, False])
@async_test
async def test_probes_are_authorised(own_key: bool) -> None:
    def setup(p: list[FakeEngine], d: list[FakeEngine]) -> None:
        p[0].api_key = d[0].api_key = "secret"

    options: dict[str, Any] = {"api_key": "secret"} if own_key else {}
    async with cluster(setup=setup, wait_ready=own_key, **options) as it:
        status, _, _ = await it.post(HELLO, headers={"Authorization": "Bearer secret"})
        assert status == 200
        assert it.p[0].probes[-1].headers["Authorization"] == "Bearer secret"
        status, answer, _ = await it.post(HELLO, headers={"Authorization": "Bearer wrong"})
        assert (status, answer) == (401, {"error": "Unauthorized"})


GOOD = {
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
    "pp_size": 1,
    "transfer_mode": "push",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, bad) for field in GOOD for bad in (None, "", [], True, 0, -1, 70000.5)]
    + [("remote_port", 65536), ("remote_engine_id", 5), ("tp_size", "1")],
)
def test_an_identity_is_checked_field_by_field(field: str, value: Any) -> None:
    assert Identity.of(GOOD) == Identity("e", "h", 1, 1, 1, "push")
    with pytest.raises(IdentityError, match=field):
        Identity.of({**GOOD, field: value})
    with pytest.raises(IdentityError, match=field):
        Identity.of({key: content for key, content in GOOD.items() if key != field})


# How decode engines are


@async_test
async def test_an_unhealthy_decode_engine_is_shown_and_spared() -> None:
    async with cluster(decodes=2, health_interval_s=0.02, condition_interval_s=0.05) as it:
        why = "9 KV blocks are in quarantine"
        it.d[0].probe = Answer(params={**it.d[0].identity(), "kvpush_unhealthy": why})
        first = it.parts.decode.backends[0]
        await eventually(lambda: first.unhealthy == why)
        for _ in range(4):
            assert (await it.post(HELLO))[0] == 200
        assert (len(it.d[0].seen), len(it.d[1].seen)) == (0, 4)
        async with it.http.get(it.url + "/health") as response:
            assert response.status == 200  # it serves, if need be
            assert (await response.json())["unhealthy"] == {it.d[0].url: why}
        async with it.http.get(it.url + "/metrics") as response:
            text = await response.text()
        assert f'engine_unhealthy{{role="decode",url="{it.d[0].url}"}} 1' in text
        assert f'engine_unhealthy{{role="decode",url="{it.d[1].url}"}} 0' in text
        assert (await it.status())["decode"][0]["unhealthy"] == why
        it.d[0].probe = Answer()
        await eventually(lambda: not first.unhealthy)
        async with it.http.get(it.url + "/health") as response:
            assert "unhealthy" not in await response.json()


@async_test
async def test_if_all_decode_engines_are_unhealthy_they_serve() -> None:
    async with cluster(health_interval_s=0.02, condition_interval_s=0.05) as it:
        it.d[0].probe = Answer(params={"kvpush_unhealthy": "so many blocks"})
        await eventually(lambda: it.parts.decode.backends[0].unhealthy)
        assert (await it.post(HELLO))[0] == 200


@pytest.mark.parametrize("answer", [Answer(500, vllm_error(500, "no")), Answer(raw=b"[]"), Answer(hang=True)])
@async_test
async def test_a_decode_engine_that_does_not_say_how_it_is_stays_usable(answer: Answer) -> None:
    async with cluster(health_interval_s=0.02, condition_interval_s=0.05, probe_timeout_s=0.2) as it:
        it.d[0].probe = answer
        await eventually(lambda: len(it.d[0].probes) >= 3)
        assert it.parts.decode.backends[0].ready
        assert not it.parts.decode.backends[0].unhealthy
        assert (await it.post(HELLO))[0] == 200
