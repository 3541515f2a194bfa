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
from kvpush.bench.connectors import CONNECTORS
from kvpush.bench.engines import EngineOptions, EnginePair
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


def told(raw: ServeRaw) -> list[tuple[str, int, int]]:
    return [(cell.pool, cell.isl, cell.repeat) for cell in raw.cells]


@pytest.mark.parametrize("interleave", ["runs", "cells"])
def test_connectors_take_turns_over_repeats_with_the_same_requests(
    tmp_path: Path, interleave: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "vllm-push,kvpush-push", "--cells", "20:50:4,30:50:3", "--repeats", "2"]
    asked += ["--interleave", interleave, "--slo-ttft-ms", "10000"]
    assert main([*asked, "--out", str(out)]) == 0
    found = raws(out)
    assert set(found) == {"kvpush-push", "vllm-push"}
    for raw in found.values():
        assert told(raw) == [("fresh", 20, 0), ("fresh", 30, 0), ("fresh", 20, 1), ("fresh", 30, 1)]
        assert [cell.seed for cell in raw.cells] == [1, 1, 2, 2]
    pairs = zip(found["vllm-push"].cells, found["kvpush-push"].cells, strict=True)
    schedules = [[[r.scheduled_s for r in cell.requests] for cell in pair] for pair in pairs]
    assert all(first == second for first, second in schedules)
    assert schedules[0] != schedules[2]
    # The order in which cells were measured, over both files.
    order = sorted((cell.started_s, raw.connector) for raw in found.values() for cell in raw.cells)
    names = [name for _, name in order]
    first, second = "vllm-push", "kvpush-push"
    if interleave == "cells":
        assert names == [first, second, second, first, first, second, second, first]
    else:
        assert names == [first, first, second, second, first, first, second, second]
    for cell in found["kvpush-push"].cells:
        assert [each.transfer_id for each in cell.handoffs] == [each.transfer_id for each in cell.requests]
        assert all(each.clock_error_ms == 0.0 for each in cell.handoffs)
    assert all(cell.handoffs == [] for cell in found["vllm-push"].cells)
    printed = capsys.readouterr().out
    assert "hand-off, from the end of P's last kernel" in printed
    assert "goodput" in printed
    assert engines_of(out) == []


def test_a_run_that_was_cut_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "kvpush-push", "--cells", "20:50:4,30:50:3", "--repeats", "2", "--out", str(out)]
    monkeypatch.setenv("FAKE_DIE_AFTER", "10")  # warm-up takes four requests, the first cell four
    assert main(asked) == 1
    (raw,) = raws(out).values()
    assert raw.cells[1].dead_engines == ["decode"]
    assert raw.unfinished == ["fresh/20/50#1", "fresh/30/50#1"]
    before = raw.cells[0]
    monkeypatch.delenv("FAKE_DIE_AFTER")
    assert main([*asked, "--resume"]) == 0
    assert len(list(out.glob("*.json"))) == 1
    (raw,) = raws(out).values()
    assert (raw.unfinished, raw.problem, len(raw.resumed)) == ([], None, 1)
    assert sorted(told(raw)) == [("fresh", 20, 0), ("fresh", 20, 1), ("fresh", 30, 0), ("fresh", 30, 1)]
    assert all(not cell.dead_engines for cell in raw.cells)
    assert raw.cells[0] == before
    # Asked for something else, it begins a new file.
    assert main([*asked, "--resume", "--osl", "5", "--cells", "20:50:2", "--repeats", "1"]) == 0
    assert len(list(out.glob("*.json"))) == 2


def test_other_software_cannot_go_on_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "vllm-push", "--cells", "20:50:2", "--out", str(out)]
    assert main(asked) == 0
    monkeypatch.setenv("KVPUSH_REVISION", "another")
    assert main([*asked, "--resume"]) == 2
    assert "other versions" in capsys.readouterr().err


def test_engines_that_run_already_are_measured_and_left_alone(tmp_path: Path) -> None:
    with Fleet(tmp_path / "logs") as fleet:
        options = EngineOptions(tmp_path, "cpu", dummy_weights=True, max_model_len=2048)
        pair = EnginePair.start(fleet, CONNECTORS["kvpush-push"], options)
        out = tmp_path / "out"
        asked = [*ASK, "--connectors", "kvpush-push", "--cells", "20:50:3", "--out", str(out), "--model", "served-name"]
        asked += ["--attach", f"{pair.prefill.url},{pair.decode.url}", "--side-channels", "127.0.0.1:1,127.0.0.1:2"]
        assert main(asked) == 0
        assert pair.dead() == []
    (raw,) = raws(out).values()
    (cell,) = raw.cells
    assert len(cell.requests) == 3
    # Nobody answers at these side channels, so nobody tells of transfers, and that is said.
    assert any("0 transfers for 3 answered" in warning for warning in cell.warnings)


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
    monkeypatch.setattr("kvpush.bench.options.STOP_RESERVE_S", 0.0)
    monkeypatch.setattr("kvpush.bench.serve.LEAST_START_S", 0.0)
    out = tmp_path / "out"
    asked = [*ASK, "--connectors", "vllm-push,kvpush-push", "--cells", "20:5:10000", "--time-limit-s", "20"]
    began = time.monotonic()
    assert main([*asked, "--out", str(out)]) == 1
    assert time.monotonic() - began < 60
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
        (["--repeats", "0"], "--repeats"),
        (["--slo-ttft-ms", "-1"], "--slo-ttft-ms"),
        (["--variant", "über"], "über"),
        (["--preset", "cpux"], "no preset 'cpux'"),
        (["--side-channels", "p:1,d:1"], "--attach"),
        (["--attach", "http://p:1"], "PREFILL_URL,DECODE_URL"),
        (["--attach", "http://p:1,http://d:1"], "--side-channels"),
        (["--attach", "http://p:1,http://d:1", "--side-channels", "p:1,d"], "'d' is not HOST:PORT"),
        (["--attach", "http://p:1,http://d:1", "--side-channels", "p:1,d:1"], "--model"),
        (["--attach", "http://p:1,http://d:1", "--connectors", "vllm-push,vllm-pull"], "one connector"),
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
