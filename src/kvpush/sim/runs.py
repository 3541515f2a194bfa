"""Runs worlds: one with its story, or many."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvpush.sim.driver import Driver
from kvpush.sim.world import MakeHalf

MAX_LINES = 80
KEPT = "every rule was kept"
_TRANSFER = re.compile(r"\b(t\d+)[dpx]?[-#]")


@dataclass(slots=True)
class Outcome:
    """What came of some worlds. broken: seed -> the rule that was broken first."""

    num_worlds: int = 0
    broken: dict[int, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, other: Outcome) -> None:
        self.num_worlds += other.num_worlds
        self.broken |= other.broken
        self.seen.update(other.seen)


@contextmanager
def _quiet() -> Iterator[None]:
    """Whatever goes wrong in a world is meant to: nobody wants to read it in a log."""
    logger = logging.getLogger("kvpush")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_worlds(seeds: Iterable[int], make_half: MakeHalf, *, stop_at_first: bool = False) -> Outcome:
    """Runs one world for each seed."""
    outcome = Outcome()
    for seed in seeds:
        driver = Driver(seed, make_half)
        outcome.num_worlds += 1
        try:
            with _quiet():
                driver.run()
        except Exception as error:
            outcome.broken[seed] = f"{type(error).__name__}: {error}"
            if stop_at_first:
                break
        finally:
            outcome.seen.update(driver.world.referee.seen)
    return outcome


def story(seed: int, make_half: MakeHalf, max_lines: int = MAX_LINES) -> str:
    """What happens in one world, and how it ends: the last lines of its trace.

    If a rule is broken and the text names a transfer, then only what concerns it, and what happened to processes.
    """
    driver = Driver(seed, make_half, traced=True)
    end = KEPT
    try:
        with _quiet():
            driver.run()
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    trace = driver.world.trace or []
    guilty = _TRANSFER.search(end)
    if guilty:
        about = re.compile(rf"\b{guilty[1]}(?![0-9])")
        trace = [line for line in trace if about.search(line.what) or line.about_process]
    lines = [f"{line.at_s:9.4f} s  {line.who:<6} {line.what}" for line in trace[-max_lines:]]
    if len(trace) > max_lines:
        lines.insert(0, f"... {len(trace) - max_lines} lines before")
    return "\n".join([f"world {seed}", *lines, end])
