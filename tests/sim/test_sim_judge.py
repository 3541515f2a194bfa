"""The judge is judged: engines with a defect are found out, whatever part of them it is in.

`make mutants` does the same with many more defects, in the source.
"""

from __future__ import annotations

import pytest
from sim_cases import broken_by

from kvpush.protocol.consumer import Consumer
from kvpush.protocol.receive import Receive
from kvpush.protocol.rendezvous import LocalRequest
from kvpush.protocol.send import Send
from kvpush.protocol.send_table import SendTable
from kvpush.sim.step import EngineDied
from kvpush.transfer.fence import Fence
from kvpush.transfer.reports import Reports
from kvpush.transfer.sources import Sources

pytestmark = pytest.mark.unit


def test_memory_that_is_released_under_a_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receive, "may_write", property(lambda receive: {}))
    rule = broken_by(400)
    assert "is released while" in rule or "which was not given to it" in rule


def test_a_commit_before_everything_has_landed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = SendTable.settle_send

    def hasty(self: SendTable, send: Send, now_s: float) -> list[object]:
        kept, send.pieces = send.pieces, {}
        actions = settle(self, send, now_s)
        send.pieces = kept
        return actions  # type: ignore[return-value]

    monkeypatch.setattr(SendTable, "settle_send", hasty)
    assert broken_by(400)


def test_prompts_that_are_not_compared_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(self: LocalRequest, registration: object) -> str:
        return self.claims.refusal(registration.key, registration.address, registration.targets)  # type: ignore[attr-defined]

    monkeypatch.setattr(LocalRequest, "refusal", lenient)
    assert "wrong KV" in broken_by(400)


def test_blocks_that_are_read_before_the_forward_has_ended_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Sources) -> list[tuple[str, int]]:
        done = [(step.request_id, step.ready) for step in self._pending]
        self._pending.clear()
        return done  # type: ignore[return-value]

    monkeypatch.setattr(Sources, "passed", hasty)
    rule = broken_by(400)
    assert "wrong KV" in rule or "source was given away" in rule


def test_pieces_that_begin_during_a_preemption_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fence, "close", lambda self, request_ids: None)
    assert broken_by(1500)


def test_a_consumer_that_never_gives_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consumer, "_silent", lambda self, receive, now_s: False)
    assert "waits for" in broken_by(1500)


def test_a_report_for_a_request_that_is_gone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Reports.collect

    def stammer(self: Reports, finished: object, results: object) -> tuple[set[str], set[str], set[str]]:
        sent, received, failed = collect(self, finished, results)  # type: ignore[arg-type]
        again = self.__dict__.setdefault("last", set())
        self.__dict__["last"] = set(sent)
        return sent | again, received, failed

    monkeypatch.setattr(Reports, "collect", stammer)
    assert EngineDied.__name__ in broken_by(100)


def test_sound_engines_are_not_blamed() -> None:
    assert broken_by(60, first=100_000) == ""
