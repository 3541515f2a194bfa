"""`kvpush demo` with fake engines and the real router: what it shows, how it fails, what it leaves behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import environment, kvpush, running, the_error, wait_for

from kvpush.launch import free_port

pytestmark = pytest.mark.unit


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


class Demo:
    """A demo that runs in the background."""

    def __init__(self, tmp_path: Path, model: str, pids: Path, *arguments: str, **wrong: str) -> None:
        self.out = tmp_path / "out.txt"
        self.logs = tmp_path / "logs"
        command = [sys.executable, "-m", "kvpush.cli.main", "demo", "--model", model, "--log-dir", str(self.logs)]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=environment(FAKE_PIDS=str(pids), **wrong),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )

    def end(self, timeout_s: float = 60.0) -> tuple[int, list[str]]:
        """(exit status, lines of stderr)."""
        try:
            _, errors = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
            self.process.wait(timeout=10)
        return self.process.returncode, errors.strip().splitlines()


def arguments_of(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def pid_of(role: str, pids: Path) -> int:
    """The server of a fake engine."""
    (pid,) = [path.name for path in pids.iterdir() if any(f'"kv_role": "{role}"' in a for a in arguments_of(path.name))]
    return int(pid)


def pid_of_router(port: int) -> int:
    found = []
    for path in Path("/proc").iterdir():
        arguments = arguments_of(path.name) if path.name.isdigit() else []
        if str(port) in arguments and arguments[1:3] == ["-m", "kvpush.router"]:
            found.append(int(path.name))
    (pid,) = found
    return pid


def test_all_equal(model: str, pids: Path, tmp_path: Path) -> None:
    env = environment(FAKE_PIDS=str(pids), TMPDIR=str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    done = kvpush("demo", "--model", model, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("one two three") == 5
    assert "all five answers equal those of one engine alone" in done.stdout
    assert "KV bytes written by NIXL from prefill to decode: 543,000 in 10 writes" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == 5
    assert all(row.split("│")[-2].strip() == "yes" for row in rows)
    assert running(pids) == []
    assert not list((tmp_path / "tmp").glob("kvpush-demo-*"))  # logs of a good run do not pile up


def test_a_wrong_answer_fails(model: str, pids: Path, tmp_path: Path) -> None:
    demo = Demo(tmp_path, model, pids, FAKE_WRONG="decode")
    code, errors = demo.end()
    shown = demo.out.read_text()
    assert code == 1
    assert errors == []
    assert shown.count("one engine alone answers differently") == 5
    assert "FAILED: answer 1 differs from that of one engine alone" in shown
    assert "all five answers equal" not in shown
    assert f"logs: {demo.logs}" in shown


@pytest.mark.parametrize(("role", "what"), [("prefill", "committed"), ("decode", "received")])
def test_right_answers_without_kv_fail(model: str, pids: Path, tmp_path: Path, role: str, what: str) -> None:
    demo = Demo(tmp_path, model, pids, FAKE_SILENT=role)
    code, _ = demo.end(90)
    shown = demo.out.read_text()
    assert code == 1
    assert f"FAILED: no KV was {what} for question 5" in shown
    assert "all five answers equal" not in shown


@pytest.mark.parametrize(
    ("victim", "named"),
    [("kv_producer", "the prefill engine"), ("kv_consumer", "the decode engine"), ("router", "the router")],
)
def test_a_death_in_the_middle_of_an_answer(model: str, pids: Path, tmp_path: Path, victim: str, named: str) -> None:
    port = free_port()
    demo = Demo(tmp_path, model, pids, "--router-port", str(port), FAKE_SLOW="decode")
    wait_for(demo.out, "1. Why is the sky blue?")
    pid = pid_of_router(port) if victim == "router" else pid_of(victim, pids)
    os.kill(pid, signal.SIGKILL)
    code, errors = demo.end(60)
    assert code == 1
    assert len(errors) == 1
    assert f"{named} died while it served (signal SIGKILL)" in errors[0]
    assert running(pids) == []


def test_an_engine_that_dies_during_start_up(model: str, pids: Path, tmp_path: Path) -> None:
    complaint = "decode:api_server.py: error: unrecognized arguments: --nonsense"
    code, errors = Demo(tmp_path, model, pids, FAKE_DIE=complaint).end()
    assert code == 1
    assert len(errors) == 1
    assert (
        "the decode engine died during start-up (exit status 1): vLLM does not know the option --nonsense" in errors[0]
    )
    assert "log: " in errors[0]
    assert running(pids) == []


@pytest.mark.parametrize(("number", "code", "stubborn"), [(signal.SIGINT, 130, ""), (signal.SIGTERM, 143, "prefill")])
def test_a_signal_while_the_engines_start(
    model: str, pids: Path, tmp_path: Path, number: signal.Signals, code: int, stubborn: str
) -> None:
    demo = Demo(tmp_path, model, pids, FAKE_HANG="all", FAKE_STUBBORN=stubborn)
    wait_for(demo.out, "the decode engine: reading its options")
    demo.process.send_signal(number)
    ended, errors = demo.end()
    assert ended == code, errors
    assert len(errors) <= 1
    assert running(pids) == []


def test_keep_serves_until_ctrl_c(model: str, pids: Path, tmp_path: Path) -> None:
    demo = Demo(tmp_path, model, pids, "--keep")
    shown = wait_for(demo.out, "curl -s ")
    (line,) = [each.strip() for each in shown.splitlines() if each.strip().startswith("curl ")]
    asked = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30, check=True)
    assert '"content": "one two three"' in asked.stdout
    assert demo.process.poll() is None
    demo.process.send_signal(signal.SIGINT)
    code, errors = demo.end()
    assert (code, errors) == (0, [])
    assert running(pids) == []


def test_keep_ends_when_an_engine_dies(model: str, pids: Path, tmp_path: Path) -> None:
    demo = Demo(tmp_path, model, pids, "--keep")
    wait_for(demo.out, "curl -s ")
    os.kill(pid_of("kv_producer", pids), signal.SIGKILL)
    code, errors = demo.end()
    assert code == 1
    assert "the prefill engine died" in errors[0]
    assert running(pids) == []


def test_a_taken_router_port(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        error = the_error(kvpush("demo", "--model", model, "--router-port", str(port)), 1)
    assert error == f"port {port} is in use on this machine; choose another with --router-port"


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (["--model", "/no/such/model"], 1, "there is no model directory /no/such/model; give one that exists"),
        (["--dtype", "int3"], 1, "--dtype is 'int3'; it must be one of float32"),
        (["--device", "tpu"], 1, "--device is 'tpu'; it must be auto, cpu or cuda"),
        (["--device", "cuda"], 1, "the installed vLLM is a CPU build and cannot use a GPU; "),
        (["--router-port", "0"], 1, "--router-port is 0; a port is a number from 1 to 65535"),
        (["--max-model-len", "10"], 1, "--max-model-len is 10; the questions need at least 1024"),
        (["--start-timeout-s", "0"], 1, "--start-timeout-s is 0; "),
        (["--router-port", "many"], 2, "Invalid value for '--router-port': "),
        (["--nonsense"], 2, "No such option: --nonsense"),
    ],
)
def test_impossible_options_are_one_line(arguments: list[str], code: int, cause: str) -> None:
    assert the_error(kvpush("demo", *arguments), code).startswith(cause)


def test_a_log_directory_that_cannot_be_made(model: str) -> None:
    file = Path(model) / "config.json"
    error = the_error(kvpush("demo", "--model", model, "--log-dir", str(file / "logs")), 1)
    assert error == f"--log-dir {file}/logs: Not a directory; give a directory that can be written"
