"""`kvpush trace`: of files and of running engines, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpush.cli.trace import page, run_trace
from kvpush.launch import LaunchError
from kvpush.transfer.sidechannel import EngineInfo, SideChannelServer, current_process
from kvpush.transfer.trace import RankTrace, TransferTrace, to_line

pytestmark = pytest.mark.unit


def trace(side: str, name: str, times: dict[str, float], rank: dict[str, float], **fields: object) -> TransferTrace:
    outcome = "sent" if side == "prefill" else "received"
    share = RankTrace(request_id=name, host_id="h", times_s=rank, num_bytes=2_500_000, num_writes=3, num_runs=12)
    values = {
        "transfer_id": name, "request_id": name, "side": side, "engine_id": side, "host_id": "h", "num_tokens": 64,
        "outcome": outcome, "times_s": times, "unix_offset_s": 1e9,
        "ranks": [share],
    }  # fmt: skip
    return TransferTrace(**{**values, **fields})  # type: ignore[arg-type]


def both(name: str, at_s: float) -> list[TransferTrace]:
    return [
        trace(
            "prefill", name, {"arrived": at_s, "scheduled": at_s + 0.001, "reported": at_s + 0.02},
            {"matched": at_s, "computed": at_s + 0.011, "last_write": at_s + 0.012, "landed": at_s + 0.014,
             "committed": at_s + 0.0145},
        ),
        trace(
            "decode", name,
            {"arrived": at_s, "allocated": at_s + 0.002, "reported": at_s + 0.018, "scheduled": at_s + 0.019},
            {"commit_seen": at_s + 0.015, "collected": at_s + 0.017},
        ),
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    traces = [each for number in range(5) for each in both(f"transfer-{number}", 100.0 + number)]
    path.write_bytes(b"".join(map(to_line, traces)))
    return path


def test_both_sides_and_the_legs_are_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_trace([str(file)], 2, False) == 0
    printed = capsys.readouterr().out
    assert "transfer-4" in printed
    assert "transfer-3" in printed
    assert "transfer-2" not in printed
    words = next(line for line in printed.splitlines() if "transfer-4" in line and "sent" in line).split()
    # queue 1 ms, compute 10 ms, to commit 3.5 ms, freed 5.5 ms
    assert words[1:] == ["transfer-4", "64", "2.5", "3", "12", "1.00", "10.00", "3.50", "5.50", "sent"]
    legs = printed.split("hand-off")[1].splitlines()
    assert legs[1].split() == [
        "transfer", "register", "post", "write", "commit", "notify", "collect", "report", "schedule", "first_token"
    ]  # fmt: skip
    assert legs[3].split() == ["transfer-4", "0.00", "1.00", "2.00", "0.50", "0.50", "2.00", "1.00", "1.00", "-"]


def test_for_programs_it_is_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_trace([str(file)], 3, True) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["transfers"]) == 6
    assert [each["transfer_id"] for each in found["handoffs"]] == ["transfer-2", "transfer-3", "transfer-4"]
    assert found["handoffs"][0]["legs_ms"]["write"] == pytest.approx(2.0)


def test_different_hosts_have_their_error_stated_and_no_mixed_spans() -> None:
    here = both("t", 100.0)
    here[0].host_id = "other"
    text = page(here, [])
    assert next(line for line in text.splitlines() if "sent" in line).split()[7:] == ["-", "-", "-", "sent"]


def test_what_a_peer_says_cannot_reach_the_terminal() -> None:
    text = page([trace("decode", "a\x1b[31mb\nc", {}, {}, outcome="x\x07" * 100)], [])
    assert all(character.isprintable() or character == "\n" for character in text)
    assert page([], []) == "no transfers\n"


@pytest.fixture
def engine(file: Path) -> Iterator[SideChannelServer]:
    lines = file.read_bytes().splitlines()
    info = EngineInfo(
        engine_id="e", incarnation="i", mode="push", tp_size=1, pp_size=1, protocol_version=1,
        host_id=current_process().host_id, fingerprint={},
    )  # fmt: skip
    server = SideChannelServer("127.0.0.1", 0, info, None, lambda count: lines[-count:])
    server.start()
    yield server
    server.stop()


def test_a_running_engine_is_asked(engine: SideChannelServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_trace([f"127.0.0.1:{engine.port}"], 4, False) == 0
    printed = capsys.readouterr().out
    assert "transfer-4" in printed
    assert "transfer-2" not in printed  # four records are two transfers


@pytest.mark.parametrize(
    ("source", "words"), [("127.0.0.1:1", "refused"), ("/nowhere/trace.jsonl", "No such file"), ("x", "No such file")]
)
def test_what_cannot_be_read_is_named(source: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        run_trace([source], 4, False)


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("INFO hello\n")
    with pytest.raises(LaunchError, match="log: line 1 is no transfer record"):
        run_trace([str(path)], 4, False)
