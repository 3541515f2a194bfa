"""The demo as a newcomer runs it: two real engines, the router, five questions, nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from kvpush.launch import demo_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(480)]

DEMO_TIMEOUT_S = 400.0
# Words of sensible answers to the first four questions: the pair and the single engine could both be wrong.
EXPECTED = ("scatter", "danube", "list", "oven")


def marked_processes(mark: str) -> list[int]:
    """Processes whose environment holds the mark: everything that the demo has started, directly or not."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def test_two_engines_answer_as_one(tmp_path: Path) -> None:
    demo_model()
    mark = f"KVPUSH_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    # vLLM writes process titles over its environment unless it is told not to.
    env = {**os.environ, name: value, "SPT_NOENV": "1", "COLUMNS": "120"}
    out = tmp_path / "out.txt"
    most = 0
    deadline_s = time.monotonic() + DEMO_TIMEOUT_S
    with out.open("w") as stdout, (tmp_path / "err.txt").open("w") as stderr:
        demo = subprocess.Popen(
            [sys.executable, "-m", "kvpush.cli.main", "demo", "--log-dir", str(tmp_path / "logs")],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        while demo.poll() is None and time.monotonic() < deadline_s:
            most = max(most, len(marked_processes(mark)))
            time.sleep(1)
        ended = demo.poll() is not None
    finally:
        demo.kill()
        demo.wait(timeout=10)
        left = marked_processes(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    shown, errors = out.read_text(), (tmp_path / "err.txt").read_text()
    logs = "\n".join(
        f"{path}\n{path.read_text(errors='replace')[-3000:]}" for path in (tmp_path / "logs").glob("*.log")
    )
    assert ended, f"not done after {DEMO_TIMEOUT_S} s\n{shown}\n{logs}"
    assert demo.returncode == 0, f"{shown}\n{errors}\n{logs}"
    assert errors == ""
    assert left == []
    assert most >= 8  # the demo, the router, and an API server, a core and a worker for each engine: the mark works

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert len(rows) == 5, shown
    tokens = [int(row[1].replace(",", "")) for row in rows]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 300
    assert all(row[-1] == "yes" for row in rows)
    assert all(re.fullmatch(r"[\d.]+ (kB|MB)", row[2]) for row in rows)

    # 30 layers, 3 heads, K and V of 64 numbers in float32; whole blocks of 32 tokens travel, at most one too many.
    total = re.search(r"KV bytes written by NIXL from prefill to decode: ([\d,]+) in [\d,]+ writes", shown)
    assert total is not None
    bytes_per_token = 30 * 3 * 2 * 64 * 4
    written = int(total[1].replace(",", ""))
    assert written % bytes_per_token == 0
    assert sum(tokens) - 5 * 32 <= written // bytes_per_token <= sum(tokens) + 5 * 32

    answers = re.findall(r"^\d\. .+\n(.+(?:\n.+)*)$", shown.split("each answer, compared")[0], re.MULTILINE)
    assert len(answers) == 5, shown
    for word, answer in zip(EXPECTED, answers, strict=False):
        assert word in answer.lower()
