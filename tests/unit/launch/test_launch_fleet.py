"""Fleets of fake engines, started by the same command line as real ones."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import fake_environment, pids_in, runs, wait_for_tree, wait_until

from kvpush.launch import EngineSpec, Fleet, LaunchError, free_port

pytestmark = pytest.mark.unit


def spec(tmp_path: Path, role: Any = "prefill", **wrong: str) -> EngineSpec:
    env = fake_environment(tmp_path / "pids", **wrong)
    return EngineSpec(str(tmp_path), role, free_port(), free_port(), env=env)


def test_a_pair_and_its_router_start_serve_and_end(tmp_path: Path) -> None:
    seen: set[str] = set()
    with Fleet(tmp_path / "logs") as fleet:
        p = fleet.engine(spec(tmp_path))
        d = fleet.engine(spec(tmp_path, "decode"))
        fleet.wait_ready(60, lambda servers: seen.update(server.name for server in servers))
        router = fleet.router([p], [d])
        fleet.wait_ready(60)
        assert p.is_healthy()
        assert router.is_healthy()
        assert d.ready_s is not None
        assert d.ready_s > 0
        assert (p.name, d.name, router.name) == ("the prefill engine", "the decode engine", "the router")
        assert seen == {"the prefill engine", "the decode engine"}
        pids = [*wait_for_tree(tmp_path / "pids", 6), router.pid]
        assert all(map(runs, pids))
    assert not any(map(runs, pids))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"01-prefill.log", "02-decode.log", "03-router.log"}


def test_an_exception_ends_everything(tmp_path: Path) -> None:
    def fail() -> None:
        with Fleet(tmp_path / "logs") as fleet:
            fleet.engine(spec(tmp_path))
            wait_for_tree(tmp_path / "pids", 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(map(runs, pids_in(tmp_path / "pids")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals) -> None:
    script = """
        import pathlib, sys, time
        from kvpush.launch import EngineSpec, Fleet, free_port
        with Fleet(pathlib.Path(sys.argv[1])) as fleet:
            fleet.engine(EngineSpec(sys.argv[1], "decode", free_port(), free_port()))
            time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "logs")],
        env={**os.environ, **fake_environment(tmp_path / "pids")},
        stderr=subprocess.PIPE,
    )
    try:
        pids = wait_for_tree(tmp_path / "pids", 3)
        owner.send_signal(number)
        owner.communicate(timeout=30)
    finally:
        owner.kill()
        owner.wait(timeout=10)
    assert owner.returncode != 0
    wait_until(lambda: not any(map(runs, pids)), "the engine is gone")


def test_a_death_during_start_up_is_told_with_its_cause(tmp_path: Path) -> None:
    complaint = "ValueError: Unsupported connector type: KVPushConnector"
    began_s = time.monotonic()
    with Fleet(tmp_path / "logs") as fleet:
        fleet.engine(spec(tmp_path, "decode", FAKE_DIE=f"decode:{complaint}"))
        fleet.engine(spec(tmp_path, "prefill", FAKE_HANG="prefill"))
        with pytest.raises(LaunchError) as caught:
            fleet.wait_ready(60)
    assert time.monotonic() - began_s < 45
    text = str(caught.value)
    assert text.startswith("the decode engine died during start-up (exit status 1): vLLM does not know the connector")
    assert f"log: {tmp_path}/logs/01-decode.log" in text
    assert "\n" not in text
    assert not any(map(runs, pids_in(tmp_path / "pids")))


def test_a_death_while_serving_is_seen(tmp_path: Path) -> None:
    with Fleet(tmp_path / "logs") as fleet:
        engine = fleet.engine(spec(tmp_path))
        fleet.wait_ready(60)
        fleet.require_alive()
        engine.kill()
        wait_until(lambda: fleet.dead() == [engine], "the death is noticed")
        with pytest.raises(LaunchError, match=r"the prefill engine died while it served \(signal SIGKILL\)"):
            fleet.require_alive()


def test_an_engine_that_is_never_ready_is_told(tmp_path: Path) -> None:
    with Fleet(tmp_path / "logs") as fleet:
        fleet.engine(spec(tmp_path, FAKE_HANG="all"))
        with pytest.raises(LaunchError, match="the prefill engine is not ready after 2 s"):
            fleet.wait_ready(2)


def test_a_taken_port_is_told_before_the_engine_starts(tmp_path: Path) -> None:
    with Fleet(tmp_path / "logs") as fleet:
        first = fleet.engine(spec(tmp_path))
        fleet.wait_ready(60)
        second = EngineSpec(str(tmp_path), "decode", first.port, free_port(), env=fake_environment())
        with pytest.raises(LaunchError, match=f"port {first.port} is in use"):
            fleet.engine(second)


def test_an_engine_can_be_replaced_on_its_port(tmp_path: Path) -> None:
    with Fleet(tmp_path / "logs") as fleet:
        same = spec(tmp_path)
        first = fleet.engine(same)
        fleet.wait_ready(60)
        fleet.remove(first, grace_s=1)
        second = fleet.engine(same)
        fleet.wait_ready(60)
        assert second.pid != first.pid
        assert second.url == first.url
        assert first.log_path != second.log_path
