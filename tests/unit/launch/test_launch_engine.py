"""What an engine is started with."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpush.launch import EngineSpec, LaunchError, command, environment, installed, kv_transfer_config

pytestmark = pytest.mark.unit


def spec(**changes: Any) -> EngineSpec:
    return EngineSpec(**{"model": "/m", "role": "prefill", "port": 8100, "side_channel_port": 8101, **changes})


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "plugin_is_registered", lambda: True)


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")]
)
def test_transfer_config_of_ours(role: str, kv_role: str) -> None:
    assert kv_transfer_config(spec(role=role)) == {
        "kv_connector": "KVPushConnector",
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"side_channel_host": "127.0.0.1", "side_channel_port": 8101},
    }


def test_transfer_config_on_cuda_leaves_the_buffer_on_the_device() -> None:
    assert "kv_buffer_device" not in (kv_transfer_config(spec(device="cuda:1")) or {})


def test_transfer_config_takes_policy_and_options() -> None:
    config = kv_transfer_config(spec(load_failure_policy="recompute", connector_options={"integrity": "always"}))
    assert config is not None
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["integrity"] == "always"


def test_a_kvpush_that_is_not_installed_is_found_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "plugin_is_registered", lambda: False)
    assert (kv_transfer_config(spec()) or {})["kv_connector_module_path"] == "kvpush.vllm"
    first = environment(spec(), {"PYTHONPATH": "/mine"})["PYTHONPATH"].split(":")
    assert (Path(first[0]) / "kvpush" / "launch").is_dir()
    assert first[1:] == ["/mine"]


def test_vllms_own_connector_gets_its_side_channel_from_the_environment() -> None:
    upstream = spec(connector="NixlPushConnector")
    assert "kv_connector_extra_config" not in (kv_transfer_config(upstream) or {})
    env = environment(upstream, {})
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "8101"


def test_an_engine_alone_has_no_transfer_config() -> None:
    alone = spec(connector=None, side_channel_port=None)
    assert kv_transfer_config(alone) is None
    assert "--kv-transfer-config" not in command(alone)


def test_command_on_the_cpu() -> None:
    argv = command(spec(dtype="float32", max_model_len=2048, extra_args=("--block-size", "64")))
    assert argv[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/m"]
    assert "--enforce-eager" in argv
    assert argv[argv.index("--block-size") + 1] == "32"
    assert argv[-2:] == ["--block-size", "64"]  # argparse takes the last
    assert argv[argv.index("--max-model-len") + 1] == "2048"
    assert json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_role"] == "kv_producer"


def test_a_prefix_stands_in_front_of_the_command() -> None:
    prefixed = spec(prefix=("ip", "netns", "exec", "p"))
    assert command(prefixed) == ["ip", "netns", "exec", "p", *command(spec())]


def test_command_on_cuda_leaves_the_rest_to_vllm() -> None:
    argv = command(spec(device="cuda:0"))
    assert not {"--enforce-eager", "--block-size", "--dtype", "--max-model-len"} & set(argv)


def test_environment_on_the_cpu_respects_the_user() -> None:
    env = environment(spec(env={"X": "2"}), {"VLLM_CPU_KVCACHE_SPACE": "7", "X": "1", "HOME": "/h"})
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(env["OMP_NUM_THREADS"]) >= 1
    assert (env["X"], env["HOME"]) == ("2", "/h")
    assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cuda:1", None, "1"), ("cuda:1", "4,6", "6"), ("cuda:0", "GPU-abc", "GPU-abc"), ("cuda:1", "", "1")],
)
def test_cuda_devices_are_counted_among_the_visible(device: str, visible: str | None, expected: str) -> None:
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = environment(spec(device=device), base)
    assert env["CUDA_VISIBLE_DEVICES"] == expected
    assert "OMP_NUM_THREADS" not in env


def test_a_device_that_is_not_visible_is_an_error() -> None:
    with pytest.raises(LaunchError, match="cuda:2 does not exist: CUDA_VISIBLE_DEVICES is '4,6'"):
        environment(spec(device="cuda:2"), {"CUDA_VISIBLE_DEVICES": "4,6"})


def test_a_local_model_needs_no_hub(tmp_path: Path) -> None:
    assert environment(spec(model=str(tmp_path)), {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(spec(model="owner/name"), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "producer"}, "the role of an engine is 'producer'"),
        ({"side_channel_port": None}, "needs a side_channel_port"),
        ({"device": "gpu"}, "the device of an engine is 'gpu'"),
        ({"device": "cuda"}, "the device of an engine is 'cuda'"),
        ({"device": "cuda:x"}, "the device of an engine is 'cuda:x'"),
        ({"device": "cpu:0"}, "the device of an engine is 'cpu:0'"),
    ],
)
def test_impossible_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        spec(**changes)
