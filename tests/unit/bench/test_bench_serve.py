"""The whole serving benchmark against engine processes that only speak HTTP."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvpush
from kvpush.bench.raw import ServeRaw, read_raw
from kvpush.bench.serve import main
from kvpush.launch.fleet import Fleet

pytestmark = pytest.mark.unit

ASK = ["--shape", "tiny", "--osl", "4", "--age-requests", "10", "--age-concurrency", "3"]


@pytest.fixture(autouse=True)
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `vllm` in front of the real one, for child processes only."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *package.parents):
        if folder.name in ("openai", "entrypoints", "vllm"):
            (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_api_server.py"), package / "api_server.py")
    source = str(Path(kvpush.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), source]))
    return tmp_path / "site"


def raws(out: Path) -> dict[str, ServeRaw]:
    found = {}
    for path in sorted(out.glob("*.json")):
        raw = read_raw(path)
        assert isinstance(raw, ServeRaw)
        found[raw.connector] = raw
    return found


def running(out: Path, pid: int) -> bool:
    """Whether this process is one of the engines that were started with logs under `out`."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1").startswith(str(out))
    except OSError:
        return False


def engines_of(out: Path) -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and running(out, int(entry))]


def test_all_connectors_and_pools_are_measured_alike(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "vllm-push,kvpush-push", "--pools", "aged,fresh", "--cells", "20:50:6,30:40:4"]
    assert main([*asked, "--out", str(out)]) == 0
    found = raws(out)
    assert list(found) == ["kvpush-push", "vllm-push"]
    for raw in found.values():
        assert raw.unfinished == []
        assert raw.problem is None
        assert raw.warm_up is not None
        assert raw.ageing is not None
        assert (raw.ageing.requests, raw.ageing.errors) == (10, 0)
        cells = [(cell.pool, cell.isl, cell.qps, len(cell.requests)) for cell in raw.cells]
        assert cells == [("fresh", 20, 50, 6), ("fresh", 30, 40, 4), ("aged", 20, 50, 6), ("aged", 30, 40, 4)]
        assert all(cell.complete and not cell.errors for cell in raw.cells)
        assert "--no-enable-prefix-caching" in raw.engines["prefill"]
        assert raw.environment.cpus > 0
    schedules = [[r.scheduled_s for cell in raw.cells for r in cell.requests] for raw in found.values()]
    assert schedules[0] == schedules[1]
    ours = [cell.transfers for cell in found["kvpush-push"].cells]
    assert [(t.committed, t.received, t.integrity_ok, t.committed_bytes) for t in ours if t is not None] == [
        (6, 6, 6, 6 * 200),
        (4, 4, 4, 4 * 300),
    ] * 2
    assert [cell.transfers for cell in found["vllm-push"].cells] == [None] * 4
    counters = [cell.prefill_counters for cell in found["vllm-push"].cells]
    assert [count["vllm:nixl_xfer_time_seconds_count"] for count in counters] == [6, 4, 6, 4]
    assert engines_of(out) == []


def test_an_engine_that_does_not_start_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_DIE_AT_START", "consumer")
    out = tmp_path / "out"
    assert main([*ASK, "--connectors", "kvpush-push", "--cells", "20:50:6", "--out", str(out)]) == 1
    printed = capsys.readouterr().err
    assert "the decode engine died during start-up (exit status 1)" in printed
    assert "this engine has no memory" in printed
    raw = raws(out)["kvpush-push"]
    assert raw.cells == []
    assert raw.unfinished == ["fresh/20/50"]
    assert engines_of(out) == []


def test_an_engine_that_dies_midway_ends_the_pair_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Warm-up takes four requests (two short, one of each length), the first cell six.
    monkeypatch.setenv("FAKE_DIE_AFTER", "13")
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "kvpush-push", "--pools", "fresh,aged", "--cells", "20:50:6,30:40:5"]
    assert main([*asked, "--out", str(out)]) == 1
    raw = raws(out)["kvpush-push"]
    first, second = raw.cells
    assert first.errors == []
    assert len(second.requests) == 5
    # The three from the fatal one on, and perhaps one that was being answered.
    assert len(second.errors) >= 3
    assert second.dead_engines == ["decode"]
    assert raw.unfinished == ["aged/20/50", "aged/30/40"]
    assert raw.problem is not None
    assert engines_of(out) == []


def test_requests_whose_kv_did_not_arrive_raise_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOSE", "1")
    out = tmp_path / "out"
    assert main([*ASK, "--connectors", "kvpush-push", "--cells", "20:50:6", "--out", str(out)]) == 0
    (cell,) = raws(out)["kvpush-push"].cells
    assert any("0 transfers for 6 answered requests" in warning for warning in cell.warnings)


def test_the_time_limit_ends_a_cell_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpush.bench.serve.STOP_RESERVE_S", 0.0)
    monkeypatch.setattr("kvpush.bench.serve.LEAST_START_S", 0.0)
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "vllm-push,kvpush-push", "--cells", "20:5:10000", "--time-limit-s", "10"]
    began = time.monotonic()
    assert main([*asked, "--out", str(out)]) == 1
    assert time.monotonic() - began < 40
    found = raws(out)
    (cell,) = found["vllm-push"].cells
    assert not cell.complete
    assert 0 < len(cell.requests) < 10_000
    assert found["kvpush-push"].cells == []
    assert found["kvpush-push"].unfinished == ["fresh/20/5"]
    assert "time is up" in (found["kvpush-push"].problem or "")
    assert engines_of(out) == []


def test_sigterm_stops_the_engines(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "kvpush-push", "--cells", "20:5:10000", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "kvpush.bench.serve", *asked])
    try:
        deadline = time.monotonic() + 60
        # Two engines, each beneath a supervisor that carries its command line.
        while len(engines_of(out)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(engines_of(out)) >= 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(10)
    assert engines_of(out) == []
    assert len(list(out.glob("*.json"))) == 1


def test_an_engine_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STUBBORN", "1")
    stop = Fleet.stop
    monkeypatch.setattr(Fleet, "stop", lambda fleet: stop(fleet, 0.5))
    out = tmp_path / "out"
    assert main([*ASK, "--connectors", "kvpush-push", "--cells", "20:50:2", "--out", str(out)]) == 0
    assert engines_of(out) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--connectors", "kvpush-push,lmcache"], "lmcache"),
        (["--connectors", ","], "unknown connectors"),
        (["--cells", "20:5"], "20:5"),
        (["--cells", "2048:5:3"], "do not fit"),
        (["--pools", "stale"], "stale"),
        (["--pools", "fresh,fresh"], "fresh,fresh"),
        (["--gpus", "0"], "--gpus"),
        (["--kvpush-config", "{"], "not JSON"),
        (["--kvpush-config", "[1]"], "JSON object"),
        (["--kvpush-config", '{"stream":false}'], "--variant"),
        (["--engine-args=--block-size 64"], "--variant"),
        (["--variant", "a/b"], "a/b"),
        (["--shape", "smollm2"], "--model"),
        (["--osl", "0"], "do not fit"),
        (["--age-concurrency", "0"], "--age-concurrency"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, changed: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*ASK, "--connectors", "kvpush-push", "--cells", "20:50:2", "--out", str(tmp_path / "out"), *changed]
    assert main(asked) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_reach_our_engines_and_only_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--variant", "no-stream", "--kvpush-config", '{"stream": false}', "--engine-args=--block-size 64"]
    asked = [*ASK, "--connectors", "kvpush-push,vllm-pull", "--cells", "20:50:2", "--out", str(out), *more]
    assert main(asked) == 0
    found = raws(out)
    assert all(raw.variant == "no-stream" for raw in found.values())
    assert found["kvpush-push"].kvpush_config == {"stream": False}
    assert found["vllm-pull"].kvpush_config == {}
    assert '"stream": false' in " ".join(found["kvpush-push"].engines["decode"])
    assert "stream" not in " ".join(found["vllm-pull"].engines["decode"])
    for raw in found.values():
        assert raw.engines["prefill"][-2:] == ["--block-size", "64"]
