"""What the simulated fabric does to messages and writes on one link."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Behaviour of one direction between two agents; the default is a healthy link.

    message_delay_s, write_delay_s, notice_s: (least, most), drawn evenly and independently, so that messages overtake
    each other whenever the range is wide. A write takes its delay plus its bytes at `bytes_per_s`. notice_s is how long
    a writer takes to learn that its peer is dead or its link broken.
    pieces: parts in which a write lands, in random order, spread over its duration.
    drop, duplicate: probabilities for one message. The copy has a delay of its own.
    fail_post: probability that a write cannot be posted.
    fail_write: probability that a write fails after some of its pieces; the others never land.
    fail_write_late: the same, but the others still land after the error (which says `may_land`).

    Raises ValueError naming the field.
    """

    message_delay_s: tuple[float, float] = (20e-6, 100e-6)
    write_delay_s: tuple[float, float] = (50e-6, 200e-6)
    notice_s: tuple[float, float] = (1e-3, 50e-3)
    bytes_per_s: float = 10e9
    pieces: int = 4
    drop: float = 0.0
    duplicate: float = 0.0
    fail_post: float = 0.0
    fail_write: float = 0.0
    fail_write_late: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_delay_s") or field.name == "notice_s":
                good = len(value) == 2 and 0 <= value[0] <= value[1] < float("inf")
            elif field.name == "bytes_per_s":
                good = value > 0
            elif field.name == "pieces":
                good = type(value) is int and value >= 1
            else:
                good = 0 <= value <= 1
            if not good:
                raise ValueError(f"{field.name} is {value!r}")
