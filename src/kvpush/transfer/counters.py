"""Counters of one rank, named as in the metrics. Written by the transfer thread, read by the engine."""

from __future__ import annotations

from collections import Counter

MAX_LABELS = 64
"""Labels of one counter; more are counted together as "other". Some of them come from peers."""


class Counters:
    """Monotone counts by (name, label); `take` hands out what has come since the last call."""

    def __init__(self) -> None:
        self._total: Counter[tuple[str, str]] = Counter()
        self._taken: Counter[tuple[str, str]] = Counter()
        self._num_labels: Counter[str] = Counter()

    def add(self, name: str, label: str = "", amount: int = 1) -> None:
        if (name, label) not in self._total:
            if self._num_labels[name] >= MAX_LABELS:
                label = "other"
            self._num_labels[name] += 1
        self._total[name, label] += amount

    def get(self, name: str, label: str = "") -> int:
        return self._total[name, label]

    def total(self, name: str) -> int:
        """Sum over all labels."""
        return sum(count for (other, _), count in dict(self._total).items() if other == name)

    def take(self) -> dict[tuple[str, str], int]:
        """What was added since the last call. Copies first: another thread may be adding."""
        now = Counter(dict(self._total))
        new = {item: count - self._taken[item] for item, count in now.items() if count != self._taken[item]}
        self._taken = now
        return new
