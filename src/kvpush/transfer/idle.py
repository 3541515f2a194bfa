"""Connections over which nothing has come for long: is there still somebody at the other end?

A peer that dies while it shares nothing with us is missed by nobody, and what its connection holds would be held for
ever: memory of the transport, its metadata, a file descriptor of its process.
"""

from __future__ import annotations

from collections.abc import Collection

from kvpush.protocol.ids import AgentName


class IdleWatch:
    """When each peer was last heard, and when it was asked. Time comes with `tick`.

    check_s: silence after which a peer is asked. answer_s: what it may take to answer.
    """

    def __init__(self, check_s: float, answer_s: float) -> None:
        self._check_s, self._answer_s = check_s, answer_s
        self._heard_s: dict[AgentName, float] = {}
        self._asked_s: dict[AgentName, float] = {}
        self._now_s = 0.0

    def heard(self, agent: AgentName) -> None:
        """Something has come from a peer, or something depends on it: its whole time is before it."""
        if agent in self._heard_s:
            self._heard_s[agent] = self._now_s
            self._asked_s.pop(agent, None)

    def forget(self, agent: AgentName) -> None:
        """There is no connection to this peer any more."""
        self._heard_s.pop(agent, None)
        self._asked_s.pop(agent, None)

    def tick(self, connected: Collection[AgentName], now_s: float) -> tuple[list[AgentName], list[AgentName]]:
        """(who is to be asked now, who has been asked and has not answered) of the peers that are connected."""
        self._now_s = now_s
        for agent in connected:
            self._heard_s.setdefault(agent, now_s)
        silent = [agent for agent, heard_s in self._heard_s.items() if now_s - heard_s > self._check_s]
        ask = [agent for agent in silent if agent not in self._asked_s]
        dead = [agent for agent, asked_s in self._asked_s.items() if now_s - asked_s > self._answer_s]
        self._asked_s |= dict.fromkeys(ask, now_s)
        return ask, dead
