"""Runs the command line as a user does, with fake engines in place of vLLM."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKE_SITE = Path(__file__).parents[1] / "launch" / "fake_site"
TIMEOUT_S = 90.0


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the fake vLLM first on the path."""
    path = os.pathsep.join(filter(None, [str(FAKE_SITE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **more}


def kvpush(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpush.cli.main", *arguments]
    return subprocess.run(
        command,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def the_error(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line that a failed command leaves on stderr."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvpush: error: ")
    return lines[0].removeprefix("kvpush: error: ")


def running(pids: Path) -> list[int]:
    """Those of the noted processes that still run."""
    found = []
    for path in pids.iterdir():
        try:
            state = Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(int(path.name))
    return found


def wait_for(path: Path, text: str, timeout_s: float = 60.0) -> str:
    """Waits until a file holds a text, and returns the file's content."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        content = path.read_text() if path.exists() else ""
        if text in content:
            return content
        if time.monotonic() > deadline_s:
            pytest.fail(f"no {text!r} in {path} within {timeout_s} s: {content}")
        time.sleep(0.05)
