"""What is raised when somebody breaks the protocol."""

from __future__ import annotations

from typing import Literal


class ProtocolError(Exception):
    """An event that is not legal in the present state. Nothing has changed when it is raised.

    fault: "peer" if what arrived from the other side was wrong (count it and drop it), "local" if this side
    called in the wrong order (a defect of ours).
    """

    def __init__(self, fault: Literal["peer", "local"], message: str) -> None:
        super().__init__(f"{fault} fault: {message}")
        self.fault = fault
