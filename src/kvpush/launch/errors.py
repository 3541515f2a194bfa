"""What goes wrong when things are started, in one line that a user can act on."""

from __future__ import annotations


class LaunchError(Exception):
    """Something could not be started, or ended too early. `str()` is one line: the cause, then the remedy."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = " ".join(cause.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{self.cause}; {self.remedy}" if self.remedy else self.cause)
