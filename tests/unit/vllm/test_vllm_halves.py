"""What the scheduler half takes up, and that its first hook never raises."""

from __future__ import annotations

from typing import Any

import pytest
from fake_scheduler import Status
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import BLOCK, consume, output, produce, request
from test_vllm_params import CONSUME, JSON, KEYS, PRODUCE

from kvpush.transfer.commands import Stalled
from kvpush.vllm.halves import SchedulerHalves

pytestmark = pytest.mark.unit


def _taken(halves: SchedulerHalves, name: str = "r") -> bool:
    return halves.produces(name) or halves.consumes(name)


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"do_remote_decode": "yes"}, {}),
        ({"do_remote_prefill": True, "transfer_id": "t"}, {}),
        ([1, 2], {}),
        (produce(), {"prompt_token_ids": None}),
        (produce(), {"prompt_embeds": object()}),
        (consume(), {"prompt_embeds": object()}),
        (produce(), {"prompt_token_ids": []}),
        (consume(), {"prompt_token_ids": []}),
        (produce(), {"prompt_token_ids": [-1]}),
        (consume(), {"prompt_token_ids": [2**32]}),
        (produce(), {"prompt_token_ids": ["a"]}),
        ({"do_remote_decode": True}, {"request_id": "x" * 400}),
    ],
)
def test_what_does_not_fit_is_an_ordinary_request(params: Any, fields: dict[str, Any]) -> None:
    halves = SchedulerHalves(BLOCK, BLOCK)
    bad = request("r", 10, params)
    for name, value in fields.items():
        setattr(bad, name, value)
    halves.on_new_request(bad)
    assert not _taken(halves, bad.request_id)
    assert halves.counters.total("bad_params") == 1
    assert halves.matched_tokens(bad.request_id, 0) == (0, False)
    halves.on_allocated(bad.request_id, ((1,),), 0)
    assert halves.on_step(output(new={bad.request_id: ([1], 0, 4)})) == ([], [])
    bad.status = Status.FINISHED_STOPPED
    assert halves.on_finished(bad, ((1,),)) is False
    assert halves.idle


@pytest.mark.parametrize(
    ("produces", "consumes", "params", "taken"),
    [
        (True, False, produce(), True),
        (True, False, consume(), False),
        (False, True, produce(), False),
        (False, True, consume(), True),
        (True, True, produce(), True),
        (True, True, consume(), True),
    ],
)
def test_roles_are_kept_to(produces: bool, consumes: bool, params: dict[str, Any], taken: bool) -> None:
    halves = SchedulerHalves(BLOCK, BLOCK, produces=produces, consumes=consumes)
    halves.on_new_request(request("r", 10, params))
    assert _taken(halves) is taken
    assert halves.counters.total("bad_params") == (not taken)


def test_probes_and_ordinary_requests_are_neither_taken_nor_counted() -> None:
    halves = SchedulerHalves(BLOCK, BLOCK)
    for params in (None, {}, {"kvpush_probe": True}, {"transfer_id": "t"}):
        halves.on_new_request(request("r", 10, params))
    assert not _taken(halves)
    assert halves.counters.take() == {}


def test_transfers_that_are_matched_by_request_id_are_counted() -> None:
    halves = SchedulerHalves(BLOCK, BLOCK)
    halves.on_new_request(request("r", 10, {"do_remote_decode": True}))
    halves.on_new_request(request("s", 10, produce("t")))
    assert halves.counters.take() == {("transfer_id_fallbacks", ""): 1}


def test_preemptions_come_before_everything_else() -> None:
    """They are asked for at the fence before anything of the step leaves."""
    halves = SchedulerHalves(BLOCK, BLOCK)
    halves.on_new_request(request("r", 10, produce()))
    halves.on_step(output(new={"r": ([1, 2], 0, 8)}))
    halves.on_new_request(request("s", 10, produce("u")))
    halves.on_new_request(request("d", 10, consume("v")))
    before, _ = halves.on_step(output(preempted={"r"}))
    assert [type(command).__name__ for command in before] == ["Preempt", "Offer", "Announce"]


@pytest.mark.parametrize("params", [None, produce(), consume()])
def test_an_engine_that_stands_still_for_want_of_blocks_says_so_in_every_step(params: dict[str, Any] | None) -> None:
    halves = SchedulerHalves(BLOCK, BLOCK)
    halves.on_new_request(request("head", 10, params))
    halves.on_step(output())
    for _ in range(3):
        halves.matched_tokens("head", 0)
        assert halves.on_step(output())[0] == [Stalled()]
    halves.matched_tokens("head", 0)
    # With async scheduling an empty step may come while one is being computed: the next full one takes it back.
    assert halves.on_step(output(cached={"other": (None, 4, 1)}))[0] == [Stalled(over=True)]
    assert halves.on_step(output(cached={"other": (None, 5, 1)}))[0] == []
    halves.matched_tokens("head", 0)
    halves.on_allocated("head", ((1, 2, 3),), 10 if params == consume() else 0)
    assert Stalled() not in halves.on_step(output())[0]
    assert halves.on_step(output())[0] == []  # nobody was asked for


def test_a_request_that_waits_for_its_sibling_is_no_stall() -> None:
    halves = SchedulerHalves(BLOCK, BLOCK)
    for name in "ab":
        halves.on_new_request(request(name, 10, consume(consumers=2)))
    halves.matched_tokens("a", 0)
    halves.on_allocated("a", ((1, 2, 3),), 10)
    assert halves.matched_tokens("b", 0) == (None, False)
    assert Stalled() not in halves.on_step(output())[0]


def test_a_decode_engine_has_nothing_to_drop() -> None:
    halves = SchedulerHalves(BLOCK, BLOCK, produces=False)
    halves.matched_tokens("head", 0)
    assert halves.on_step(output())[0] == []


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([{}, PRODUCE, CONSUME]),
    st.dictionaries(KEYS, JSON, max_size=4) | JSON,
    st.sampled_from(["r", "", "x" * 300, "\ud800", "cmpl-1-0-abcdef12"]),
    st.booleans(),
)
def test_whatever_a_client_sends_goes_through_the_life_of_a_request(
    base: dict[str, Any], changes: Any, request_id: str, admitted: bool
) -> None:
    """Through every hook of both halves; each ends it, one way or another, and keeps nothing."""
    params = {**base, **changes} if isinstance(changes, dict) else changes
    halves = SchedulerHalves(BLOCK, BLOCK)
    asked = request(request_id, 10, params)
    halves.on_new_request(asked)
    taken = _taken(halves, request_id)
    if admitted:
        tokens, _ = halves.matched_tokens(request_id, 0)
        halves.on_allocated(request_id, ((1, 2, 3),), tokens or 0)
        halves.on_step(output(new={request_id: ([1, 2, 3], 0, 10)}))
    asked.status = Status.FINISHED_ABORTED
    held = halves.on_finished(asked, ((1, 2, 3),) if admitted else ((),))
    halves.on_step(output())
    assert halves.idle
    assert held <= taken
    assert halves.counters.total("bad_params") <= (not taken)
