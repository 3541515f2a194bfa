"""The fence between the engine's main thread and the transfer thread."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kvpush.protocol.ids import RequestId
from kvpush.transfer.fence import Fence

pytestmark = pytest.mark.unit
R, S = RequestId("r"), RequestId("s")


def test_reads_begin_and_end() -> None:
    fence = Fence()
    assert fence.begin(R)
    assert fence.begin(R)
    fence.end(R)
    assert not fence.idle
    fence.end(R)
    assert fence.idle


def test_an_idle_request_is_preempted_at_once_and_stays_closed_until_it_is_reopened() -> None:
    fence = Fence()
    start_s = time.monotonic()
    assert fence.preempt([R], 5) == set()
    assert time.monotonic() - start_s < 1
    assert not fence.begin(R)
    assert fence.begin(S)
    fence.end(S)
    fence.reopen(R)
    assert fence.begin(R)
    fence.end(R)
    assert fence.idle


def test_a_read_that_does_not_end_poisons_after_the_bound() -> None:
    fence = Fence()
    fence.begin(R)
    start_s = time.monotonic()
    assert fence.preempt([R, S], 0.05) == {R}
    assert 0.05 <= time.monotonic() - start_s < 2
    with fence.committing(R) as poisoned:
        assert poisoned
    with fence.committing(S) as poisoned:
        assert not poisoned
    fence.reopen(R)
    with fence.committing(R) as poisoned:
        assert not poisoned  # the thread has taken note: what comes now reads new blocks
    fence.end(R)
    fence.reopen(S)
    assert fence.idle


def test_the_wait_ends_with_the_last_read() -> None:
    fence = Fence()
    for _ in range(2):
        fence.begin(R)
    fence.begin(S)  # of another request: not waited for

    def end() -> None:
        for _ in range(2):
            time.sleep(0.02)
            fence.end(R)

    thread = threading.Thread(target=end)
    thread.start()
    start_s = time.monotonic()
    assert fence.preempt([R], 10) == set()
    assert time.monotonic() - start_s < 5
    thread.join(5)


def test_several_requests_share_one_bound() -> None:
    fence = Fence()
    names = [RequestId(str(i)) for i in range(20)]
    for name in names:
        fence.begin(name)
    start_s = time.monotonic()
    assert fence.preempt(names, 0.05) == set(names)
    assert time.monotonic() - start_s < 1


def test_a_commit_is_decided_before_or_after_a_poisoning_never_during() -> None:
    fence = Fence()
    fence.begin(R)
    inside, leave = threading.Event(), threading.Event()
    poisoned: list[set[RequestId]] = []

    def commit() -> None:
        with fence.committing(R) as bad:
            assert not bad
            inside.set()
            assert leave.wait(5)

    def preempt() -> None:
        poisoned.append(fence.preempt([R], 0.0))

    committer = threading.Thread(target=commit)
    committer.start()
    assert inside.wait(5)
    preempter = threading.Thread(target=preempt)
    preempter.start()
    time.sleep(0.05)
    assert poisoned == []  # waits for the decision
    leave.set()
    committer.join(5)
    preempter.join(5)
    assert poisoned == [{R}]


def test_the_same_request_may_be_preempted_again_while_an_old_read_goes_on() -> None:
    fence = Fence()
    fence.begin(R)
    assert fence.preempt([R], 0.0) == {R}
    fence.reopen(R)
    assert fence.begin(R)
    fence.end(R)
    assert fence.preempt([R], 0.0) == {R}
    fence.reopen(R)
    fence.end(R)
    assert fence.idle


@pytest.mark.parametrize("seed", range(3))
def test_no_read_of_taken_blocks_is_ever_committed(seed: int) -> None:
    """Two threads at full speed: each read remembers which generation of the blocks it saw at its begin and its end."""
    fence = Fence()
    generation = 0
    wrong: list[str] = []
    stop = threading.Event()
    to_note: list[RequestId] = []

    def transfer() -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            if to_note:
                fence.reopen(to_note.pop())
            if not fence.begin(R):
                continue
            seen = generation
            if rng.random() < 0.3:
                time.sleep(rng.random() * 2e-3)
            fence.end(R)
            with fence.committing(R) as poisoned:
                # Bytes that were read before the blocks were taken are right, whatever has happened since.
                if not poisoned and seen_at_end(seen):
                    wrong.append(f"read of generation {seen} committed in {generation}")

    def seen_at_end(seen: int) -> bool:
        return seen != ended_in[0]

    # What generation the read had when it ended; set under the read itself.
    ended_in = [0]
    original_end = fence.end

    def end(name: RequestId) -> None:
        ended_in[0] = generation
        original_end(name)

    fence.end = end  # type: ignore[method-assign]
    thread = threading.Thread(target=transfer)
    thread.start()
    rng = random.Random(seed + 100)
    for _ in range(60):
        fence.preempt([R], rng.choice([0.0, 1e-3, 0.5]))
        generation += 1
        to_note.append(R)
        while to_note:
            time.sleep(1e-4)
        time.sleep(rng.random() * 1e-3)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert wrong == []
    assert fence.idle
