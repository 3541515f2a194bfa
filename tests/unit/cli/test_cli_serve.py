"""`kvpush serve`, `router`, `bench` and `version` as a user calls them."""

import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import environment, kvpush, the_error, wait_for

import kvpush as package
from kvpush.launch import free_port
from kvpush.launch.supervise import descendants, signal_all

pytestmark = pytest.mark.unit


def dry_run(*arguments: str) -> tuple[dict[str, str], list[str]]:
    """(environment that is set, argv) of what would be started."""
    done = kvpush("serve", "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    start = words.index("-m") - 1
    return dict(word.split("=", 1) for word in words[:start]), words[start:]


def config_of(argv: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return config


@pytest.mark.parametrize(
    ("role", "kv_role", "port"), [("prefill", "kv_producer", 8100), ("decode", "kv_consumer", 8200)]
)
def test_the_command_of_each_role(role: str, kv_role: str, port: int, tmp_path: Path) -> None:
    env, argv = dry_run("--role", role, str(tmp_path), "--", "--max-model-len", "2048", "--dtype=float32")
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert argv[argv.index("--model") + 1] == str(tmp_path)
    assert argv[argv.index("--port") + 1] == str(port)
    assert argv[-3:] == ["--max-model-len", "2048", "--dtype=float32"]
    config = config_of(argv)
    assert (config["kv_connector"], config["kv_role"]) == ("KVPushConnector", kv_role)
    assert config["kv_connector_extra_config"] == {"side_channel_host": "127.0.0.1", "side_channel_port": port + 1}
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_options_of_the_connector() -> None:
    _, argv = dry_run(
        *("--role", "both", "--port", "9000", "--side-channel-port", "9100", "--load-failure-policy", "recompute"),
        *("--host", "0.0.0.0", "--side-channel-host", "10.1.2.3", "--option", "integrity=always"),
        *("--option", "num_threads=4", "--option", 'allowed_hosts=["10.0.0.0/8"]', "owner/model"),
    )
    assert config_of(argv)["kv_load_failure_policy"] == "recompute"
    assert config_of(argv)["kv_connector_extra_config"] == {
        "side_channel_host": "10.1.2.3",
        "side_channel_port": 9100,
        "integrity": "always",
        "num_threads": 4,
        "allowed_hosts": ["10.0.0.0/8"],
    }
    assert argv[argv.index("--host") + 1] == "0.0.0.0"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--role", "reader", "a/b"], "--role is 'reader'; it must be one of prefill, decode, both"),
        (["--load-failure-policy", "hope", "a/b"], "--load-failure-policy is 'hope'"),
        (["a/b", "--", "--port", "1"], "--port after -- would undo what kvpush sets"),
        (["a/b", "--", "--kv-transfer-config={}"], "--kv-transfer-config={} after -- would undo"),
        (["--port", "9000", "--side-channel-port", "9000", "a/b"], "--port and --side-channel-port are both 9000"),
        (["--option", "integrity", "a/b"], "--option 'integrity' is not of the form KEY=VALUE"),
        (["--host", "0.0.0.0", "a/b"], "the side channel cannot be 0.0.0.0"),
        (["--device", "cuda:1:2", "a/b"], "the device of an engine is 'cuda:1:2'"),
    ],
)
def test_impossible_options_are_one_line(arguments: list[str], cause: str) -> None:
    assert the_error(kvpush("serve", *arguments), 1).startswith(cause)


@pytest.mark.parametrize("option", ["--port", "--side-channel-port"])
def test_a_taken_port_names_the_option_that_changes_it(option: str) -> None:
    other = {"--port": "--side-channel-port", "--side-channel-port": "--port"}[option]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = kvpush("serve", option, str(port), other, str(free_port()), "owner/model")
    assert the_error(done, 1) == f"port {port} is in use on this machine; choose another with {option}"


def test_two_engines_with_default_ports(tmp_path: Path) -> None:
    """The second one says which port is taken, and by which option to change it."""
    port = str(free_port())
    arguments = ["serve", "--port", port, "--side-channel-port", str(free_port()), "a/b"]
    with (tmp_path / "out").open("w") as out:
        first = subprocess.Popen(
            [sys.executable, "-m", "kvpush.cli.main", *arguments],
            env=environment(),
            stdout=out,
        )
    try:
        # The process becomes vLLM: what starts is the fake engine, under the same process id.
        wait_for(tmp_path / "out", "Application startup complete")
        assert "vllm.entrypoints.openai.api_server" in Path(f"/proc/{first.pid}/cmdline").read_text()
        second = kvpush("serve", "--port", port, "--side-channel-port", str(free_port()), "a/b")
        assert the_error(second, 1) == f"port {port} is in use on this machine; choose another with --port"
    finally:
        tree = descendants(first.pid)
        first.kill()
        first.wait(timeout=10)
        signal_all(tree, signal.SIGKILL)


def test_the_router_is_passed_its_arguments() -> None:
    shown = kvpush("router", "--help")
    assert shown.returncode == 0
    assert "--prefill" in shown.stdout
    refused = kvpush("router", "--prefill", "http://127.0.0.1:1", "--decode", "no-url")
    assert refused.returncode != 0
    assert "no-url" in refused.stdout + refused.stderr


def test_benchmarks_are_passed_their_arguments() -> None:
    shown = kvpush("bench", "serve", "--help")
    assert shown.returncode == 0
    assert "--connectors" in shown.stdout
    assert (
        the_error(kvpush("bench"), 1)
        == "which benchmark?; serve or compare or transfer or plan or summary or figures or results"
    )
    assert the_error(kvpush("bench", "speed"), 1).startswith("there is no benchmark 'speed'")


def test_version_and_help() -> None:
    assert kvpush("version").stdout == package.__version__ + "\n"
    shown = kvpush("--help")
    assert shown.returncode == 0
    for name in ("demo", "doctor", "serve", "router", "bench", "version"):
        assert name in shown.stdout
    assert "prefill engine" not in kvpush().stderr
    assert the_error(kvpush("dance"), 2).startswith("No such command 'dance'")
