"""A soak's processes die in every way and come back under their addresses; fake engines, real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

import kvpush
from kvpush.bench.soak import deployment as deployments
from kvpush.bench.soak import faults as soak_faults
from kvpush.bench.soak.deployment import ROLES, Deployment, DeploymentError, DeploymentOptions, worker_of
from kvpush.bench.soak.faults import Faults, counted
from kvpush.bench.soak.traffic import Traffic
from kvpush.launch import Fleet

pytestmark = [pytest.mark.unit, pytest.mark.timeout(240)]

FAKE_SITE = Path(__file__).parents[1] / "launch" / "fake_site"


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    """An engine of each role, each a tree of three processes that ends with its server, and a real router."""
    source = str(Path(kvpush.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE_SITE), source]))
    with Fleet(tmp_path / "logs") as fleet:
        made = Deployment(fleet, DeploymentOptions(str(tmp_path), "fail", "off", None))
        monkeypatch.setattr(fleet, "wait_ready", lambda: wait_for(lambda: all(map(answers, fleet.servers)), 60.0))
        made.start()
        yield made


def answers(server: deployments.Server) -> bool:
    # The router asks its prefill engine who it is, which a fake one cannot say; that it listens is enough here.
    return deployments._listens(server.port)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_every_part_dies_and_comes_back_under_its_address(deployment: Deployment) -> None:
    assert all(map(deployment.up, ROLES))
    for role in ROLES:
        before = deployment.server(role)
        tree = before.tree()
        deployment.kill(role)
        assert not deployment.up(role)
        assert not any(Path(f"/proc/{pid}").exists() and state(pid) not in "ZX" for pid in tree)
        deployment.restart(role, 60.0)
        after = deployment.server(role)
        assert deployment.up(role)
        assert (after.url, after.pid != before.pid) == (before.url, True)
        assert deployment.starts[role] == 2


def test_a_server_that_is_killed_takes_its_workers_along(deployment: Deployment) -> None:
    tree = deployment.server("decode").tree()
    deployment.kill("decode", "server")
    assert not any(Path(f"/proc/{pid}").exists() and state(pid) not in "ZX" for pid in tree)


def test_a_server_that_outlives_its_worker_is_a_finding(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "DEATH_TIMEOUT_S", 1.0)
    assert worker_of(deployment.server("prefill")) != deployment.server("prefill").pid
    with pytest.raises(DeploymentError, match="the prefill engine outlived its worker by 1 s"):
        deployment.kill("prefill", "worker")
    assert not deployment.up("prefill")
    deployment.restart("prefill", 60.0)
    assert deployment.up("prefill")


def test_a_stopped_engine_goes_on(deployment: Deployment) -> None:
    tree = deployment.server("prefill").tree()
    deployment.stop("prefill")
    wait_for(lambda: all(state(pid) == "T" for pid in tree), 10.0)
    deployment.go_on("prefill")
    wait_for(lambda: all(state(pid) != "T" for pid in tree), 10.0)


def test_the_next_decode_engine_has_the_other_policy(deployment: Deployment) -> None:
    assert any('"kv_load_failure_policy": "fail"' in word for word in deployment.server("decode").argv)
    deployment.set_policy("recompute")
    deployment.kill("decode")
    deployment.restart("decode", 60.0)
    assert any('"kv_load_failure_policy": "recompute"' in word for word in deployment.server("decode").argv)


class Load:
    """What the faults ask of the traffic."""

    def __init__(self) -> None:
        self.bursts, self.aborts = 0, 0

    def burst(self, number: int) -> None:
        self.bursts += 1

    def abort(self, number: int) -> int:
        self.aborts += 1
        return number


def test_faults_are_done_undone_and_written_down(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_faults, "LEAST_LIFE_S", 0.0)
    monkeypatch.setattr(soak_faults, "STOP_S", (0.1, 0.3))
    monkeypatch.setattr(soak_faults, "VICTIMS", ("all", "server"))
    load, back = Load(), []

    async def run() -> Faults:
        faults = Faults(deployment, cast(Traffic, load), None, 11, back.append)
        assert set(faults.possible(kills=False)) == {"abort", "burst", "stop prefill", "stop decode"}
        assert {"kill prefill", "kill decode", "kill router"} < set(faults.possible(kills=True))
        for name in ("kill router", "stop decode", "abort", "burst", "kill prefill"):
            faults.begin(name)
        await asyncio.sleep(0.05)
        assert "kill prefill" not in faults.possible(kills=True)  # it is being killed already
        await faults.settle()
        await faults.run(2.0, 0.2, kills=False)
        await faults.settle()
        return faults

    faults = asyncio.run(asyncio.wait_for(run(), 120.0))
    assert faults.problems == []
    assert all(map(deployment.up, ROLES))
    assert sorted(back) == ["prefill", "router"]
    done = counted(faults.done)
    assert sum(done.values()) >= 5 + 8
    assert done["kill prefill"] == done["kill router"] == 1
    assert load.bursts == done["burst"]
    assert load.aborts == done["abort"]


def test_an_engine_that_dies_by_itself_is_a_finding(deployment: Deployment) -> None:
    async def run() -> Faults:
        faults = Faults(deployment, cast(Traffic, Load()), None, 1, lambda _role: None)
        os.kill(deployment.server("decode").pid, signal.SIGKILL)
        wait_for(lambda: not deployment.server("decode").alive, 20.0)
        await faults.settle()
        return faults

    faults = asyncio.run(run())
    assert len(faults.problems) == 1
    assert "the decode engine died" in faults.problems[0]
