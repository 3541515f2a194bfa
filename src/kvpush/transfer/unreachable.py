"""Addresses that gave no answer a moment ago: whoever wants to send there next is told so at once."""

from __future__ import annotations

from kvpush.protocol.ids import PeerAddress

MAX_ADDRESSES = 1024


class Unreachables:
    """Address -> why nobody answers there, for as long as that is worth remembering.

    Time comes with `tick`; between two ticks it stands still. retry_s: after that the address is tried again.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._until_s: dict[PeerAddress, float] = {}
        self._reasons: dict[PeerAddress, str] = {}
        self._now_s = 0.0

    def tick(self, now_s: float) -> None:
        self._now_s = now_s
        for address in [address for address, until_s in self._until_s.items() if until_s <= now_s]:
            self.forget(address)

    def add(self, address: PeerAddress, reason: str) -> None:
        self.forget(address)
        self._until_s[address], self._reasons[address] = self._now_s + self._retry_s, reason
        if len(self._until_s) > MAX_ADDRESSES:
            self.forget(next(iter(self._until_s)))

    def forget(self, address: PeerAddress) -> None:
        self._until_s.pop(address, None)
        self._reasons.pop(address, None)

    def reason(self, address: PeerAddress) -> str | None:
        """Why an address gave no answer lately; None if it may be tried."""
        return self._reasons.get(address)
