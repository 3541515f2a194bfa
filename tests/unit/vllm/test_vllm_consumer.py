"""D's scheduler half: who waits for P, what is loaded, what is released, and what a phantom may touch."""

from __future__ import annotations

import random

import pytest
from fake_scheduler import Request, Status
from scheduler_cases import BLOCK, consume, output, request

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.transfer.commands import Announce, Cancel, Command, Fetch, Refuse, Release, Withdraw
from kvpush.transfer.quarantine import Quarantine
from kvpush.vllm import consumer_scheduler
from kvpush.vllm.halves import SchedulerHalves
from kvpush.vllm.identity import identity_of

pytestmark = pytest.mark.unit
T, PEER = TransferId("t"), ("p", 1000)


class Case:
    def __init__(self, **options: object) -> None:
        self.halves = SchedulerHalves(BLOCK, BLOCK, produces=False, **options)  # type: ignore[arg-type]

    def add(self, name: str, num_tokens: int = 10, **options: object) -> Request:
        token = options.pop("token", 5)
        added = request(name, num_tokens, consume(**options), token=token)  # type: ignore[arg-type]
        self.halves.on_new_request(added)
        return added

    def ask(self, name: str, computed: int = 0) -> tuple[int | None, bool]:
        return self.halves.matched_tokens(name, computed)

    def allocate(self, name: str, external: int, blocks: tuple[int, ...] = (1, 2, 3)) -> None:
        self.halves.on_allocated(name, (blocks,), external)

    def load(self, name: str, computed: int = 0) -> None:
        external, _ = self.ask(name, computed)
        assert external
        self.allocate(name, external)

    def end(self, name: str, status: Status = Status.FINISHED_ABORTED) -> None:
        assert self.halves.on_finished(request(name, status=status), ((1, 2, 3),)) is False

    def take(self) -> list[Command]:
        before, after = self.halves.on_step(output())
        assert after == []
        return before


@pytest.fixture
def case() -> Case:
    return Case()


def _release(consumer: int = 0, *, all_consumers: bool = False) -> Release:
    return Release(SendKey(T, consumer), PEER, all_consumers)


def _announce(num_tokens: int = 10) -> Announce:
    return Announce(T, identity_of(request("r", num_tokens)), PEER)


# One request


@pytest.mark.parametrize(("computed", "first_token"), [(0, 0), (4, 4)])
def test_what_the_cache_lacks_is_fetched_into_the_blocks(case: Case, computed: int, first_token: int) -> None:
    case.add("r", remote_engine_id="e")
    assert case.ask("r", computed) == (10 - computed, True)
    case.allocate("r", 10 - computed)
    prompt = identity_of(request("r"))
    assert case.take() == [Fetch(RequestId("r"), SendKey(T, 0), 1, prompt, first_token, ((1, 2, 3),), PEER, "e")]
    case.halves.on_reported(["r"])
    case.allocate("r", 0)  # vLLM says it a second time when the load has ended
    assert case.take() == []
    case.end("r", Status.FINISHED_STOPPED)
    assert case.take() == []
    assert case.halves.idle


@pytest.mark.parametrize(("num_tokens", "computed"), [(1, 0), (BLOCK, 0), (10, 8), (12, 8)])
def test_what_is_at_most_one_block_is_computed_here_and_p_is_released(
    case: Case, num_tokens: int, computed: int
) -> None:
    case.add("r", num_tokens)
    assert case.ask("r", computed) == (0, False)
    case.allocate("r", 0)
    released = case.take()
    assert [type(command) for command in released] == [Release]
    case.end("r", Status.FINISHED_STOPPED)
    assert case.take() == []
    assert case.halves.idle


def test_more_may_be_computed_here_if_that_is_wished() -> None:
    case = Case()
    case.halves = SchedulerHalves(BLOCK, 64)
    case.add("r", 64)
    assert case.ask("r") == (0, False)
    case.add("s", 65, transfer="u")
    assert case.ask("s") == (65, True)


def test_asking_changes_nothing_however_often(case: Case) -> None:
    case.add("r")
    assert case.take() == [_announce()]
    for _ in range(300):
        assert case.ask("r") == (10, True)
        assert case.take() == []
    case.load("r")
    [fetch] = case.take()
    assert isinstance(fetch, Fetch)
    assert fetch.key.consumer == 0


@pytest.mark.parametrize("computed", [0, 8, 10, 13, 288])
def test_nothing_is_loaded_twice(case: Case, computed: int) -> None:
    """Asked again after a preemption (with output tokens computed) or after a failed load."""
    case.add("r")
    case.load("r")
    case.take()
    assert case.ask("r", computed) == (0, False)
    case.halves.on_reported(["r"])
    assert case.ask("r", computed) == (0, False)
    case.allocate("r", 0)
    assert case.take() == []


def test_vllm_may_decide_against_the_load(case: Case) -> None:
    """Requests with prompt_logprobs must compute their prompt: the answer is ignored."""
    case.add("r")
    assert case.ask("r") == (10, True)
    case.allocate("r", 0)
    assert case.take() == [_release()]
    assert case.ask("r") == (0, False)


def test_requests_of_nobody_are_nothing(case: Case) -> None:
    assert case.ask("unknown") == (0, False)
    case.allocate("unknown", 0)
    case.halves.on_reported(["unknown"])
    case.halves.on_reported(None)
    assert case.take() == []


# Ends


def test_an_abort_while_loading_is_told_once(case: Case) -> None:
    case.add("r")
    case.load("r")
    case.take()
    case.end("r")
    assert case.take() == [Cancel(RequestId("r"))]
    assert case.halves.idle


def test_a_failed_load_under_policy_fail_ends_before_its_report_is_known(case: Case) -> None:
    """request_finished comes before update_connector_output of the same output."""
    case.add("r")
    case.load("r")
    case.take()
    case.end("r", Status.FINISHED_ERROR)
    case.halves.on_reported(["r"])
    assert case.take() == [Cancel(RequestId("r"))]  # the workers know that it is late
    assert case.halves.idle


def test_an_abort_in_the_queue_releases_p(case: Case) -> None:
    case.add("r")
    assert case.take() == [_announce()]
    case.ask("r")
    case.end("r")
    assert case.take() == [_release(), Withdraw(T)]
    assert case.halves.idle


def test_an_announcement_is_made_in_the_step_that_leaves_a_request_without_blocks(case: Case) -> None:
    case.add("r")
    case.load("r")
    [fetch] = case.take()
    assert isinstance(fetch, Fetch)
    case.add("s", transfer="u")
    assert [type(command) for command in case.take()] == [Announce]
    case.end("s")
    assert [type(command) for command in case.take()] == [Release, Withdraw]


def test_every_announcement_is_withdrawn_whoever_goes_last(case: Case) -> None:
    case.add("dup", consumers=1)
    case.add("r", consumers=1)
    case.ask("r")
    case.take()
    case.add("late", consumers=1)
    for name in ("r", "dup", "late"):
        case.end(name)
    assert case.take()[-1] == Withdraw(T)
    assert case.halves.idle


# Phantoms


@pytest.mark.parametrize("live", ["queued", "asked", "loading", "received"])
def test_a_phantom_touches_nothing_of_a_live_request(case: Case, live: str) -> None:
    case.add("r")
    if live != "queued":
        case.ask("r")
    if live in ("loading", "received"):
        case.load("r")
    if live == "received":
        case.halves.on_reported(["r"])
    case.take()
    case.add("phantom", 1, token=0)
    case.end("phantom")
    assert case.take() == []
    if live in ("queued", "asked"):
        case.load("r")
        [fetch] = case.take()
        assert isinstance(fetch, Fetch)
        assert fetch.key.consumer == 0


@pytest.mark.parametrize("live", ["queued", "asked", "loading"])
def test_a_phantom_that_is_scheduled_before_its_abort_takes_nobodys_place(case: Case, live: str) -> None:
    case.add("r")
    if live != "queued":
        case.ask("r")
    if live == "loading":
        case.load("r")
    case.take()
    case.add("phantom", 1, token=0)
    assert case.ask("phantom") == (0, False)
    case.allocate("phantom", 0, (9,))
    assert case.take() == []
    case.end("phantom")
    assert case.take() == []
    if live != "loading":
        case.load("r")
        [fetch] = case.take()
        assert isinstance(fetch, Fetch)
        assert fetch.key.consumer == 0


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_phantom_of_a_request_that_never_came_releases_p(case: Case, scheduled: bool) -> None:
    """The API server has rejected the request: all that D's scheduler sees of it is the phantom."""
    case.add("phantom", 1, token=0, consumers=3)
    if scheduled:
        assert case.ask("phantom") == (0, False)
        case.allocate("phantom", 0, (9,))
    case.end("phantom")
    assert case.take() == [_release(all_consumers=True)]
    case.add("another phantom", 1, token=0, consumers=3)
    case.end("another phantom")
    assert case.take() == []  # once is enough
    assert case.halves.idle


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_phantom_behind_its_ended_request_does_nothing(case: Case, scheduled: bool) -> None:
    case.add("r")
    case.load("r")
    case.take()
    case.end("r")
    case.add("phantom", 1, token=0)
    if scheduled:
        case.allocate("phantom", 0, (9,))
    case.end("phantom")
    assert case.take() == [Cancel(RequestId("r"))]
    assert case.halves.idle


def test_a_prompt_of_one_token_is_no_phantom_of_itself(case: Case) -> None:
    for name in ("a", "b"):
        case.add(name, 1, consumers=2)
        assert case.ask(name) == (0, False)
        case.allocate(name, 0)
    assert all(isinstance(command, Release) for command in case.take())
    for name in ("a", "b"):
        case.end(name, Status.FINISHED_STOPPED)
    assert case.halves.idle


def test_what_is_remembered_of_ended_transfers_is_bounded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_scheduler, "MAX_RECENT", 3)
    for i in range(10):
        case.add(f"r{i}", transfer=f"t{i}")
        case.load(f"r{i}")
        case.end(f"r{i}")
        case.take()
    assert len(case.halves._consumer._recent) == 3


# Siblings


def test_siblings_wait_for_the_first_and_then_hit_its_cache(case: Case) -> None:
    for name in "abc":
        case.add(name, consumers=3)
    case.load("a")
    assert case.ask("b") == (None, False)
    assert case.ask("c") == (None, False)
    assert [type(command) for command in case.take()] == [Fetch, Announce, Announce]
    case.halves.on_reported(["a"])
    assert case.ask("b", 8) == (0, False)
    case.allocate("b", 0)
    assert case.take() == [_release(1)]
    assert case.ask("c", 8) == (0, False)
    case.allocate("c", 0)
    assert case.take() == [_release(2)]


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
def test_a_sibling_whose_first_has_failed_loads_by_itself(case: Case, status: Status) -> None:
    for name in "ab":
        case.add(name, consumers=2)
    case.load("a")
    assert case.ask("b") == (None, False)
    case.take()
    case.end("a", status)
    assert case.ask("b") == (10, True)
    case.allocate("b", 10)
    cancel, fetch = case.take()
    assert cancel == Cancel(RequestId("a"))
    assert isinstance(fetch, Fetch)
    assert fetch.key.consumer == 1


def test_without_a_prefix_cache_every_sibling_loads() -> None:
    case = Case(prefix_caching=False)
    for name in "abc":
        case.add(name, consumers=3)
        case.load(name)
    fetches = case.take()
    assert [fetch.key.consumer for fetch in fetches if isinstance(fetch, Fetch)] == [0, 1, 2]


def test_one_too_many_is_a_failed_load_that_names_its_blocks(case: Case) -> None:
    case.add("r")
    case.load("r")
    case.take()
    case.add("double")
    assert case.ask("double", 4) == (6, True)
    case.allocate("double", 6)
    assert case.take() == [Refuse(RequestId("double"), "duplicate", 4, ((1, 2, 3),))]
    case.halves.on_reported(["double"])
    assert case.ask("double", 4) == (0, False)  # recomputed
    case.end("double", Status.FINISHED_STOPPED)
    case.end("r")
    case.take()
    case.add("again")  # usable afterwards
    case.load("again")
    assert isinstance(case.take()[0], Fetch)


def test_one_too_many_that_needs_nothing_releases_nothing(case: Case) -> None:
    case.add("r")
    case.load("r")
    case.take()
    case.add("double")
    case.ask("double")
    case.allocate("double", 0)
    assert case.take() == []


@pytest.mark.parametrize("seed", range(20))
def test_every_consumer_index_is_spoken_for_once(seed: int) -> None:
    """Whatever becomes of n siblings, P hears of each index: fetched, or released."""
    rng = random.Random(seed)
    case = Case(prefix_caching=rng.random() < 0.5)
    consumers = rng.randint(1, 4)
    names = [str(i) for i in range(consumers)]
    for name in names:
        case.add(name, consumers=consumers)
    heard: list[int] = []
    waiting, loading = list(names), []
    while waiting or loading:
        if loading and rng.random() < 0.5:
            name = loading.pop()
            if rng.random() < 0.7:
                case.halves.on_reported([name])
            else:
                case.end(name)
        elif waiting:
            name = rng.choice(waiting)
            external, load = case.ask(name, rng.choice([0, 4, 8]))
            action = rng.random()
            if action < 0.2:
                case.end(name)
                waiting.remove(name)
            elif action < 0.8 and external is not None:
                case.allocate(name, external)
                waiting.remove(name)
                if load:
                    loading.append(name)
        for command in case.take():
            if isinstance(command, Fetch | Release):
                heard += range(consumers) if getattr(command, "all_consumers", False) else [command.key.consumer]
    assert sorted(heard) == list(range(consumers))


def test_siblings_of_a_load_that_has_failed_are_computed_and_wait_for_nothing() -> None:
    case = Case()
    for name in "abc":
        case.add(name, consumers=3)
    case.load("a")
    assert case.ask("b") == (None, False)
    case.halves.on_failed(["a", "unknown"])  # its blocks may be in quarantine for ever
    assert case.ask("b") == (0, False)
    case.allocate("b", 0)
    assert case.ask("c") == (0, False)
    case.allocate("c", 0)
    commands = case.take()
    assert commands[1:] == [_release(1), _release(2)]
    assert case.halves.counters.get("loads_refused", "sibling_failed") == 2
    assert case.ask("a") == (0, False)


def test_a_duplicate_that_was_refused_does_not_spoil_the_transfer() -> None:
    case = Case(prefix_caching=False)
    case.add("a")
    case.load("a")
    case.add("double")
    case.load("double")
    case.halves.on_failed(["double"])
    case.halves.on_reported(["double"])
    assert not case.halves._consumer._transfers[T].failed


def test_the_next_use_of_a_transfer_id_is_loaded_again() -> None:
    case = Case()
    case.add("a")
    case.load("a")
    case.halves.on_failed(["a"])
    case.end("a")
    case.add("b")
    case.load("b")


def test_while_too_much_is_in_quarantine_prompts_are_computed_here_and_p_is_released() -> None:
    case = Case(quarantine_max_blocks=2)
    case.add("early")
    case.load("early")
    case.take()
    assert case.halves.on_quarantines({(0, 0): Quarantine(3, ("p:1",))})
    case.add("late", transfer="u")
    assert case.ask("late") == (0, False)
    case.allocate("late", 0)
    assert case.take() == [Release(SendKey(TransferId("u"), 0), PEER)]
    assert case.halves.counters.get("loads_refused", "quarantine") == 1
    assert case.ask("early") == (0, False)  # it loads already
    assert not case.halves.on_quarantines({(0, 1): Quarantine(0)})
    assert case.halves.on_quarantines({(0, 0): Quarantine(2, ("p:1",))})
    case.add("later", transfer="v")
    case.load("later")
    assert [type(command) for command in case.take()] == [Fetch]
    # What a cache holds anyway is not refused.
    assert case.halves.counters.total("loads_refused") == 1


def test_a_request_that_was_refused_in_vain_is_loaded_once_the_engine_is_healthy() -> None:
    case = Case(quarantine_max_blocks=2)
    case.halves.on_quarantines({(0, 0): Quarantine(3)})
    case.add("r")
    assert case.ask("r") == (0, False)  # and finds no blocks in this step
    case.halves.on_quarantines({(0, 0): Quarantine(0)})
    case.load("r")
    assert [type(command) for command in case.take()] == [Fetch]
    assert case.halves.counters.total("loads_refused") == 0
