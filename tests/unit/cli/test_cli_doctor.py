"""`kvpush doctor`: each cause that makes a push impossible is found, named, and has a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import kvpush

from kvpush.cli import doctor, machine
from kvpush.cli.doctor import Finding, examine, run_doctor
from kvpush.launch import installed
from kvpush.launch.installed import Distribution

pytestmark = pytest.mark.unit

HEALTHY: dict[str, dict[str, Any]] = {
    "nixl": {"plugins": ["POSIX", "UCX"], "ucx_starts": True, "ucx": "1.23.0"},
    "torch": {"version": "2.13.0", "cuda": "13.0", "gpus": ["H", "H"], "peers": [(0, 1), (1, 0)], "pairs": 2},
    "push": {"bytes": 4 << 20, "seconds": 0.01, "notified": True, "equal": True},
}


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with everything."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(installed, "vllm", lambda: Distribution("vllm", "0.26.0"))
    monkeypatch.setattr(installed, "nixl", lambda: Distribution("nixl", "1.5.1"))
    monkeypatch.setattr(installed, "plugin_is_registered", lambda: True)
    monkeypatch.setattr(installed, "module_path", lambda name: Path("/site") / name)
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["GPU 0: H", "GPU 1: H"])
    monkeypatch.setattr(machine, "gpu_links", lambda: ["GPU0-GPU1 NV18"])
    monkeypatch.setattr(machine, "rdma_devices", list)


def findings(**changes: dict[str, Any]) -> dict[str, Finding]:
    answers = {**HEALTHY, **changes}
    return {each.name: each for each in examine(try_push=True, probe=lambda name, timeout_s: answers[name])}


def missing(found: dict[str, Finding]) -> set[str]:
    for each in found.values():
        assert each.remedy or each.state not in ("missing", "warning"), each
    return {each.name for each in found.values() if each.state == "missing"}


def test_a_healthy_machine() -> None:
    found = findings()
    assert missing(found) == set()
    assert found["GPU peers"].value == "2 of 2 ordered pairs reach each other directly; GPU0-GPU1 NV18"
    assert found["test push"].state == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"nixl": {"error": "ImportError: libucp"}}, "NIXL", "does not load: ImportError: libucp"),
        ({"nixl": {**HEALTHY["nixl"], "ucx_starts": False}}, "UCX", "does not start"),
        ({"torch": {"error": "it crashed: Segmentation fault"}}, "torch", "Segmentation fault"),
        ({"torch": {**HEALTHY["torch"], "gpus": [], "pairs": 0}}, "GPUs", "torch sees none"),
        ({"push": {"error": "TransportError: no route"}}, "test push", "no route"),
        ({"push": {**HEALTHY["push"], "equal": False}}, "test push", "the bytes are wrong"),
        ({"push": {**HEALTHY["push"], "notified": False}}, "test push", "notification did not arrive"),
    ],
)
def test_a_broken_part(changes: dict[str, dict[str, Any]], name: str, said: str) -> None:
    found = findings(**changes)
    assert missing(found) == {name}
    assert said in found[name].value


def test_no_push_is_tried_when_something_is_missing() -> None:
    assert "test push" not in findings(nixl={"error": "x"})


@pytest.mark.parametrize("version", ["0.25.0", "0.34.0"])
def test_vllm_out_of_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(installed, "vllm", lambda: Distribution("vllm", version))
    assert missing(findings()) == {"vLLM"}


def test_the_plugin_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "plugin_is_registered", lambda: False)
    assert missing(findings()) == {"vLLM plugin"}


@pytest.mark.parametrize(("value", "bad"), [("lora", True), ("", True), ("lora, kvpush", False), ("kvpush", False)])
def test_vllm_plugins_may_leave_kvpush_out(monkeypatch: pytest.MonkeyPatch, value: str, bad: bool) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    assert missing(findings()) == ({"vLLM plugin"} if bad else set())


def test_a_cpu_build_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "vllm_runs_on_the_cpu", lambda: True)
    monkeypatch.setattr(doctor, "visible_gpus", list)
    assert missing(findings(torch={**HEALTHY["torch"], "cuda": None, "gpus": [], "pairs": 0})) == set()


def test_gpus_that_do_not_reach_each_other_are_a_warning() -> None:
    found = findings(torch={**HEALTHY["torch"], "peers": []})
    assert missing(found) == set()
    assert found["GPU peers"].state == "warning"


def test_limits_matter_where_they_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "limit", lambda which: 8192.0)
    assert findings()["locked memory"].state == "info"
    monkeypatch.setattr(machine, "rdma_devices", lambda: ["mlx5_0 (ACTIVE)"])
    assert findings()["locked memory"].state == "warning"
    monkeypatch.setattr(machine, "limit", lambda which: 1024.0)
    assert findings()["open files"].state == "warning"


@pytest.mark.parametrize(
    ("shared", "state"), [((64 << 20, 64 << 20), "warning"), ((64 << 30, 9 << 30), "info"), (None, "warning")]
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, shared: tuple[int, int] | None, state: str) -> None:
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: shared)
    assert findings()["/dev/shm"].state == state


@pytest.mark.parametrize(
    ("scope", "uid", "state"), [(None, 1000, "info"), (0, 1000, "info"), (1, 1000, "warning"), (1, 0, "info")]
)
def test_ptrace_scope(monkeypatch: pytest.MonkeyPatch, scope: int | None, uid: int, state: str) -> None:
    monkeypatch.setattr(machine, "ptrace_scope", lambda: scope)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert findings()["process copy"].state == state


def test_rdma_devices_are_read_with_the_state_of_their_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    for name, states in (("mlx5_1", ["1: DOWN"]), ("mlx5_0", ["4: ACTIVE", "4: ACTIVE"]), ("odd", [])):
        (tmp_path / name).mkdir()
        for port, state in enumerate(states, 1):
            (tmp_path / name / "ports" / str(port)).mkdir(parents=True)
            (tmp_path / name / "ports" / str(port) / "state").write_text(state + "\n")
    assert machine.rdma_devices() == ["mlx5_0 (ACTIVE)", "mlx5_1 (DOWN)", "odd (no port)"]


def test_the_topology_of_nvidia_smi_is_read() -> None:
    shown = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\nGPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\nGPU2\tSYS\tPHB\t X \tSYS\t0-31\t0\n"
        "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
    )
    assert machine.parse_topology(shown) == ["GPU0-GPU1 NV18", "GPU0-GPU2 SYS", "GPU1-GPU2 PHB"]
    assert machine.parse_topology("") == []


def test_json_and_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda try_push: [Finding("NIXL", "gone", "missing", "get it")])
    assert run_doctor(as_json=True, try_push=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["push_will_work"] is False
    assert report["missing"] == [{"name": "NIXL", "value": "gone", "remedy": "get it"}]
    monkeypatch.setattr(doctor, "examine", lambda try_push: [Finding("NIXL", "1.5.1", "ok")])
    assert run_doctor(as_json=True, try_push=True) == 0
    assert json.loads(capsys.readouterr().out)["push_will_work"] is True


@pytest.mark.nixl
@pytest.mark.timeout(300)
def test_this_machine_really_pushes() -> None:
    done = kvpush("doctor", "--json")
    report = json.loads(done.stdout)
    by_name = {each["name"]: each for each in report["findings"]}
    assert by_name["NIXL"]["state"] == "ok", report
    assert "UCX" in by_name["NIXL plugins"]["value"]
    if "test push" in by_name:
        assert "verified" in by_name["test push"]["value"]
    assert done.returncode == (0 if report["push_will_work"] else 1)
