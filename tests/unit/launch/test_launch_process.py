"""A started program never outlives the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_fakes import fake_environment, runs, wait_for_tree, wait_until

from kvpush.launch import LaunchError, Process, free_port

pytestmark = pytest.mark.unit

TREE = 3  # the server, its child, and a grandchild that has left the session


def fake_argv() -> list[str]:
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--port", str(free_port())]


def start(tmp_path: Path, **wrong: str) -> tuple[Process, list[int]]:
    env = {**os.environ, **fake_environment(tmp_path / "pids", **wrong)}
    process = Process("the fake engine", fake_argv(), tmp_path / "fake.log", env)
    return process, wait_for_tree(tmp_path / "pids", TREE)


def test_stop_ends_the_whole_tree(tmp_path: Path) -> None:
    process, pids = start(tmp_path)
    assert process.alive
    assert process.pid in pids
    assert all(map(runs, pids))
    process.stop(grace_s=0.5)
    assert process.exit_code == -signal.SIGTERM
    assert not any(map(runs, pids))
    process.stop()  # a second time does nothing


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_signals_reach_the_whole_tree_and_nothing_else(tmp_path: Path) -> None:
    process, pids = start(tmp_path)
    assert sorted(process.tree()) == pids
    process.signal_tree(signal.SIGSTOP)
    wait_until(lambda: all(state(pid) == "T" for pid in pids), "all are stopped")
    assert process.alive
    process.signal_tree(signal.SIGCONT)
    wait_until(lambda: all(state(pid) != "T" for pid in pids), "all go on")
    process.signal_tree(signal.SIGKILL)
    wait_until(lambda: not any(map(runs, pids)), "all are dead")
    wait_until(lambda: process.exit_code == -signal.SIGKILL, "its end is known")
    assert process.tree() == []
    process.stop()


def test_what_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    process, pids = start(tmp_path, FAKE_STUBBORN="all")
    began_s = time.monotonic()
    process.stop(grace_s=0.5)
    assert time.monotonic() - began_s >= 0.5
    assert process.exit_code == -signal.SIGKILL
    assert not any(map(runs, pids))


@pytest.mark.parametrize("stubborn", ["", "all"])
def test_nothing_outlives_a_parent_that_was_killed(tmp_path: Path, stubborn: str) -> None:
    pids = tmp_path / "pids"
    script = (
        "import pathlib, sys, time\n"
        "from kvpush.launch import Process\n"
        "process = Process('fake', sys.argv[2:], pathlib.Path(sys.argv[1]))\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, **fake_environment(pids, FAKE_STUBBORN=stubborn)}
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "fake.log"), *fake_argv()], env=env)
    try:
        tree = wait_for_tree(pids, TREE)
        assert all(map(runs, tree))
    finally:
        parent.kill()
        parent.wait(timeout=10)
    wait_until(lambda: not any(map(runs, tree)), "the tree is gone after its owner was killed")


def test_nothing_is_left_when_the_supervisor_itself_is_killed(tmp_path: Path) -> None:
    process, pids = start(tmp_path)
    in_the_group = [pid for pid in pids if os.getpgid(pid) == process.pid]
    assert len(in_the_group) == 2
    supervisor = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    try:
        wait_until(lambda: not process.alive, "the death is noticed")
        assert process.exit_code == -signal.SIGKILL
        wait_until(lambda: not any(map(runs, in_the_group)), "the process group is gone")
    finally:
        process.stop()
        # A process that left the session has nobody any more who knows of it: this is the limit of what can be done.
        for pid in set(pids) - set(in_the_group):
            os.kill(pid, signal.SIGKILL)


def test_children_of_a_program_that_was_killed_do_not_stay(tmp_path: Path) -> None:
    process, pids = start(tmp_path)
    process.kill()
    wait_until(lambda: not process.alive, "the death is noticed")
    assert process.exit_code == -signal.SIGKILL
    wait_until(lambda: not any(map(runs, pids)), "its children are gone")
    process.stop()


def test_the_exit_status_and_the_output_are_kept(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    process = Process("x", [sys.executable, "-c", script], tmp_path / "deep" / "x.log")
    wait_until(lambda: not process.alive, "it ends")
    assert process.exit_code == 7
    process.stop()
    assert process.exit_code == 7
    assert sorted(process.log_tail().split()) == ["err", "out"]


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="the fake cannot be started: /no/such/program: No such file"):
        Process("the fake", ["/no/such/program"], tmp_path / "x.log")


def test_ctrl_c_in_the_terminal_does_not_reach_the_program(tmp_path: Path) -> None:
    process, pids = start(tmp_path)
    try:
        supervisor = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
        groups = {os.getpgid(pid) for pid in [*pids, supervisor]}
        assert os.getpgid(0) not in groups
    finally:
        process.stop(grace_s=0.5)


def test_many_at_once(tmp_path: Path) -> None:
    processes = [
        Process(f"n{n}", [sys.executable, "-S", "-c", "import time; time.sleep(600)"], tmp_path / f"{n}.log")
        for n in range(4)
    ]
    pids = [process.pid for process in processes]
    assert len(set(pids)) == 4
    for process in processes:
        process.ask_to_stop(grace_s=5)
    for process in processes:
        process.stop()
    assert not any(map(runs, pids))
