"""P's scheduler half: what each scheduler output means, in both shapes."""

from __future__ import annotations

import pytest
from fake_scheduler import Status
from scheduler_cases import BLOCK, output, produce, request

from kvpush.protocol.ids import RequestId, TransferId
from kvpush.transfer.commands import Finish, Offer, Preempt, Progress
from kvpush.vllm.halves import SchedulerHalves
from kvpush.vllm.identity import identity_of

pytestmark = pytest.mark.unit
R = RequestId("r")


@pytest.fixture
def halves() -> SchedulerHalves:
    halves = SchedulerHalves(BLOCK, BLOCK)
    halves.on_new_request(request("r", 10, produce()))
    assert halves.on_step(output()) == ([Offer(R, TransferId("t"), identity_of(request("r")), 1)], [])
    return halves


def test_chunks_are_told_once_with_what_they_gain(halves: SchedulerHalves) -> None:
    steps = [
        (output(new={"r": ([1, 2], 0, 6), "other": ([9], 0, 4)}), Progress(R, 6, ((1, 2),), True)),
        (output(cached={"r": (None, 6, 1)}), Progress(R, 7, ((),), False)),
        (output(cached={"other": ([7], 4, 1), "r": ([3], 7, 3)}), Progress(R, 10, ((3,),), False)),
    ]
    for scheduled, progress in steps:
        assert halves.on_step(scheduled) == ([], [progress])
    # The prompt is complete: what P decodes is nobody's.
    assert halves.on_step(output(cached={"r": ([4], 10, 1)})) == ([], [])


def test_a_prefix_hit_is_ready_with_the_first_step(halves: SchedulerHalves) -> None:
    _, steps = halves.on_step(output(new={"r": ([1, 2, 3], 8, 1)}))
    assert steps == [Progress(R, 9, ((1, 2, 3),), True)]


def test_output_tokens_do_not_count(halves: SchedulerHalves) -> None:
    _, steps = halves.on_step(output(new={"r": ([1, 2, 3, 4], 0, 14)}))
    assert steps == [Progress(R, 10, ((1, 2, 3, 4),), True)]


@pytest.mark.parametrize("shape", ["v1", "v2"])
def test_a_resumed_request_has_a_new_table_whatever_the_shape(halves: SchedulerHalves, shape: str) -> None:
    halves.on_step(output(new={"r": ([1, 2, 3], 0, 10)}))
    before, steps = halves.on_step(output(cached={"other": (None, 3, 1)}, preempted={"r", "other"}))
    assert (before, steps) == ([Preempt(R)], [])
    entry = {"r": ([7, 8], 4, 4)}
    resumed = output(cached=entry, resumed={"r"}) if shape == "v1" else output(new=entry)  # type: ignore[arg-type]
    assert halves.on_step(resumed) == ([], [Progress(R, 8, ((7, 8),), True)])
    assert halves.on_step(output(cached={"r": ([9], 8, 2)})) == ([], [Progress(R, 10, ((9,),), False)])


@pytest.mark.parametrize("shape", ["v1", "v2"])
def test_a_request_may_be_preempted_and_resumed_in_one_step(halves: SchedulerHalves, shape: str) -> None:
    halves.on_step(output(new={"r": ([1, 2, 3], 0, 10)}))
    entry = {"r": ([4, 5, 6], 0, 10)}
    v1, v2 = output(cached=entry, resumed={"r"}, preempted={"r"}), output(new=entry, preempted={"r"})  # type: ignore[arg-type]
    step = v1 if shape == "v1" else v2
    assert halves.on_step(step) == ([Preempt(R)], [Progress(R, 10, ((4, 5, 6),), True)])


@pytest.mark.parametrize("preempted", [None, set()])
def test_nobody_is_preempted_in_both_ways_to_say_so(halves: SchedulerHalves, preempted: set[str] | None) -> None:
    assert halves.on_step(output(new={"r": ([1], 0, 4)}, preempted=preempted))[0] == []


def test_a_finished_request_is_held_until_its_one_report(halves: SchedulerHalves) -> None:
    halves.on_step(output(new={"r": ([1, 2, 3], 0, 10)}))
    assert halves.on_finished(request("r", 10, produce(), status=Status.FINISHED_LENGTH_CAPPED), ((1, 2, 3),)) is True
    assert halves.on_step(output()) == ([Finish(R, "")], [])
    assert halves.idle
    assert halves.on_finished(request("r"), ((1, 2, 3),)) is False  # unknown by now


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
@pytest.mark.parametrize("blocks", [((1, 2, 3),), ((),), ()])
def test_an_aborted_request_is_held_too(
    halves: SchedulerHalves, status: Status, blocks: tuple[tuple[int, ...], ...]
) -> None:
    assert halves.on_finished(request("r", 10, produce(), status=status), blocks) is True
    assert halves.on_step(output()) == ([Finish(R, "aborted")], [])


@pytest.mark.parametrize("blocks", [((),), (), ((1, 2),)])
def test_a_table_that_does_not_cover_the_prompt_is_not_handed_over(
    halves: SchedulerHalves, blocks: tuple[tuple[int, ...], ...]
) -> None:
    """Preempted with its last output in flight: vLLM 0.26 has no guard against that."""
    halves.on_step(output(new={"r": ([1, 2, 3], 0, 10)}))
    assert halves.on_step(output(preempted={"r"}))[0] == [Preempt(R)]
    assert halves.on_finished(request("r", 10, produce(), status=Status.FINISHED_STOPPED), blocks) is True
    assert halves.on_step(output()) == ([Finish(R, "incomplete")], [])


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_LENGTH_CAPPED])
def test_blocks_that_were_taken_between_two_steps_are_asked_for_at_the_fence(
    halves: SchedulerHalves, status: Status
) -> None:
    """A cache reset preempts outside of a step; then the request ends, and no step says that it was preempted."""
    halves.on_step(output(new={"r": ([1, 2], 0, 8)}))
    halves.on_finished(request("r", 10, produce(), status=status), ((),))
    reason = "aborted" if status is Status.FINISHED_ABORTED else "incomplete"
    assert halves.on_step(output(preempted={"r"})) == ([Preempt(R), Finish(R, reason)], [])
    assert halves.idle


def test_a_transfer_id_in_use_is_served_without_hand_over(halves: SchedulerHalves) -> None:
    halves.on_new_request(request("second", 10, produce()))
    assert halves.on_step(output(new={"second": ([5], 0, 4)})) == ([], [])
    assert halves.on_finished(request("second", 10, produce(), status=Status.FINISHED_STOPPED), ((5,),)) is False
    assert halves.produces("r")
    halves.on_finished(request("r", 10, produce(), status=Status.FINISHED_ABORTED), ((),))
    halves.on_new_request(request("third", 10, produce()))  # free again
    assert halves.produces("third")


def test_requests_that_nobody_hands_over_cost_nothing(halves: SchedulerHalves) -> None:
    halves.on_finished(request("r", 10, produce(), status=Status.FINISHED_ABORTED), ((),))
    halves.on_step(output())
    broken = output(new={"a": ([1], 0, 1)})
    broken.scheduled_cached_reqs = None  # not even looked at
    assert halves.on_step(broken) == ([], [])
