"""A whole soak in small, over engines that only speak HTTP: it passes what is right, and fails for what is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import kvpush
from kvpush.bench.raw import SoakRaw, read_raw
from kvpush.bench.soak import __main__ as soak
from kvpush.bench.soak import faults, run, watch

pytestmark = [pytest.mark.unit, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake engines in front of the real ones, and seconds for minutes."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *package.parents):
        if folder.name in ("openai", "entrypoints", "vllm"):
            (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_soak_engine.py"), package / "api_server.py")
    source = str(Path(kvpush.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), source]))
    monkeypatch.setattr(soak, "demo_model", lambda: tmp_path)
    for module, values in (
        (run, {"WARM_UP_S": 0.5, "REST_S": 4.0, "FREE_TIMEOUT_S": 3.0, "HANDLES_TIMEOUT_S": 12.0, "PROMPTS": 12}),
        (faults, {"LEAST_LIFE_S": 0.5, "STOP_S": (0.1, 0.4)}),
        (watch, {"SAMPLE_INTERVAL_S": 0.2, "WARM_UP_S": 0.4, "LEAST_JUDGED_S": 0.4, "EDGE_S": 0.4}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def soaked(out: Path, seconds: float = 8.0) -> tuple[int, SoakRaw]:
    argv = ["--minutes", str(seconds / 60), "--seed", "5", "--interval-s", "0.4", "--concurrency", "3"]
    argv += ["--network", "shared-memory", "--out", str(out), "--log-dir", str(out / "logs")]
    code = soak.main(argv)
    [path] = out.glob("*.json")
    raw = read_raw(path)
    assert isinstance(raw, SoakRaw)
    return code, raw


def test_a_sound_deployment_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, raw = soaked(tmp_path / "out")
    assert raw.problems == []
    assert code == 0
    assert raw.outcomes["right"] > 20
    assert {"right", "error", "aborted"} >= set(raw.outcomes)
    assert any(fault.name.startswith("kill ") for fault in raw.faults)
    assert any(fault.detail == "policy recompute" for fault in raw.faults)
    assert {process.role for process in raw.processes} == {"prefill", "decode", "router"}
    text = capsys.readouterr().out
    assert "SKIPPED: cuts of the link" in text
    assert "PASSED (seed 5)" in text


@pytest.mark.parametrize(
    ("fault", "value", "found"),
    [
        ("FAKE_WRONG", "5", "1 requests were wrong"),
        ("FAKE_HOLD", "1", "held 3 s after the last request"),
        ("FAKE_LEAK", "1", " handles, "),
    ],
)
def test_what_must_not_be_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, value: str, found: str
) -> None:
    monkeypatch.setenv(fault, value)
    monkeypatch.setattr(faults.Faults, "possible", lambda _self, _kills: ["burst", "abort"])
    monkeypatch.setattr(run, "QUIET_SHARE", 0.0)
    code, raw = soaked(tmp_path / "out", seconds=4.0)
    assert code == 1
    assert any(found in problem for problem in raw.problems)
