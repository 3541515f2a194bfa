"""D's half of the scheduler half: which requests wait for P, and what each of them owes or is owed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.protocol.prompt import PromptIdentity
from kvpush.transfer.commands import Announce, BlockTable, Cancel, Command, Fetch, Refuse, Release, Withdraw
from kvpush.transfer.counters import Counters
from kvpush.transfer.quarantine import Health
from kvpush.vllm.identity import identity_of
from kvpush.vllm.params import Consume

_log = logging.getLogger(__name__)

MAX_RECENT = 4096
"""Transfer ids that are remembered after their last request: phantoms come right behind it."""


class _Stage(Enum):
    NEW = auto()  # not admitted yet
    LOADING = auto()  # has blocks, waits for the workers' report
    DONE = auto()  # received, failed, released or refused: never asks again


@dataclass(slots=True)
class _Load:
    request_id: RequestId
    params: Consume
    num_prompt_tokens: int
    prompt: PromptIdentity
    stage: _Stage = _Stage.NEW
    consumer: int | None = None
    phantom: bool = False
    refused: str = ""  # why it is computed here although P would bring it


@dataclass(slots=True)
class _Transfer:
    """The live requests of one transfer id. next_consumer: indices are given in order of admission attempts, because a
    phantom hardly ever gets that far. announced: P was told that somebody waits. closed: that nobody else comes.
    failed: a load of it has failed, so that the others need not try."""

    loads: dict[RequestId, _Load] = field(default_factory=dict)
    next_consumer: int = 0
    announced: bool = False
    closed: bool = False
    failed: bool = False

    def take_index(self, load: _Load) -> int:
        """The consumer index of a load, the same whenever it is asked for."""
        if load.consumer is None:
            load.consumer, self.next_consumer = self.next_consumer, self.next_consumer + 1
        return load.consumer


class ConsumerScheduler:
    """Turns scheduler calls into commands for the workers. No clock, no I/O."""

    def __init__(
        self, recompute_below_tokens: int, counters: Counters, health: Health, *, prefix_caching: bool
    ) -> None:
        self._recompute_below = recompute_below_tokens
        self._counters, self._health = counters, health
        self._prefix_caching = prefix_caching
        self._loads: dict[RequestId, _Load] = {}
        self._transfers: dict[TransferId, _Transfer] = {}
        self._recent: OrderedDict[TransferId, PromptIdentity | None] = OrderedDict()
        self._commands: list[Command] = []
        self._unannounced: dict[RequestId, _Load] = {}

    @property
    def idle(self) -> bool:
        return not (self._loads or self._transfers or self._commands or self._unannounced)

    def on_new_request(self, request: Any, params: Consume) -> None:
        """A request whose KV comes from P. Raises as `identity_of` does, and books nothing then."""
        load = _Load(RequestId(request.request_id), params, request.num_prompt_tokens, identity_of(request))
        self._loads[load.request_id] = self._unannounced[load.request_id] = load
        self._transfers.setdefault(params.transfer_id, _Transfer()).loads[load.request_id] = load

    def owns(self, request_id: str) -> bool:
        return request_id in self._loads

    def transfer_id(self, request_id: str) -> TransferId:
        """Of a request that is owned."""
        return self._loads[RequestId(request_id)].params.transfer_id

    def matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that P will bring, True), (0, False) for none, (None, False) for ask again.

        Asked every step while there is no room, and again after preemptions and failures; never changes what is owed.
        """
        load = self._loads.get(RequestId(request_id))
        if load is None or load.stage is not _Stage.NEW:
            return 0, False
        missing = load.num_prompt_tokens - num_computed_tokens
        if missing <= self._recompute_below:
            return 0, False
        transfer = self._transfers[load.params.transfer_id]
        known = transfer.take_index(load) < load.params.consumers
        # What failed once would fail again, and waiting for its memory may take for ever.
        load.refused = "sibling_failed" if transfer.failed else "" if self._health.healthy else "quarantine"
        if load.refused:
            return 0, False
        if self._prefix_caching and known and self._sibling_loads(transfer, load):
            return None, False  # it will hit the cache that its sibling fills
        return missing, True

    def on_allocated(self, request_id: str, blocks: BlockTable, num_external_tokens: int) -> None:
        """The request has blocks; the first call decides what becomes of its transfer."""
        load = self._loads.get(RequestId(request_id))
        if load is None or load.stage is not _Stage.NEW:
            return
        self._unannounced.pop(load.request_id, None)
        transfer = self._transfers[load.params.transfer_id]
        if num_external_tokens == 0:
            load.stage = _Stage.DONE
            load.phantom = self._is_phantom(load, transfer)
            if not load.phantom:
                if load.refused:
                    self._counters.add("loads_refused", load.refused)
                self._release(load, transfer)
            elif len(transfer.loads) == 1:
                self._close(load, transfer)
            return
        duplicate = transfer.take_index(load) >= load.params.consumers
        load.stage = _Stage.LOADING
        params, first_token = load.params, load.num_prompt_tokens - num_external_tokens
        if duplicate:
            _log.warning("kvpush: transfer %s is in use; request %s is refused", params.transfer_id, request_id)
            self._commands.append(Refuse(load.request_id, "duplicate", first_token, blocks))
            return
        self._commands.append(
            Fetch(
                request_id=load.request_id,
                key=SendKey(params.transfer_id, transfer.take_index(load)),
                consumers=params.consumers,
                prompt=load.prompt,
                first_token=first_token,
                blocks=blocks,
                peer=(params.host, params.port),
                engine_id=params.engine_id,
            )
        )

    def on_reported(self, request_id: str) -> None:
        """The workers have reported the request as received, or as released after a failure."""
        load = self._loads.get(RequestId(request_id))
        if load is not None:
            load.stage = _Stage.DONE

    def on_failed(self, request_id: str) -> None:
        """The request's load has failed: those of its transfer that have not begun to load are computed here."""
        load = self._loads.get(RequestId(request_id))
        # A duplicate, that was refused, says nothing about the transfer.
        if load is not None and load.consumer is not None and load.consumer < load.params.consumers:
            self._transfers[load.params.transfer_id].failed = True

    def on_finished(self, request_id: str) -> None:
        """The request has ended. Whether its blocks must stay is vLLM's own business: it holds those that load."""
        load = self._loads.pop(RequestId(request_id), None)
        if load is None:
            return
        self._unannounced.pop(load.request_id, None)
        transfer_id = load.params.transfer_id
        transfer = self._transfers[transfer_id]
        if load.stage is _Stage.LOADING:
            # If the workers have reported it meanwhile they ignore this.
            self._commands.append(Cancel(load.request_id))
        elif load.stage is _Stage.NEW:  # rejected, or aborted in the queue
            load.phantom = self._is_phantom(load, transfer)
            if not load.phantom:
                self._release(load, transfer)
        del transfer.loads[load.request_id]
        if not transfer.loads:
            del self._transfers[transfer_id]
            self._close(load, transfer)
            if transfer.announced:
                self._commands.append(Withdraw(transfer_id))
        self._remember(load)

    def take_commands(self) -> list[Command]:
        """The commands since the last call; who has been left without blocks in this step is announced to its P."""
        for load in self._unannounced.values():
            params = load.params
            self._commands.append(Announce(params.transfer_id, load.prompt, (params.host, params.port)))
            self._transfers[params.transfer_id].announced = True
        self._unannounced.clear()
        commands, self._commands = self._commands, []
        return commands

    def _sibling_loads(self, transfer: _Transfer, load: _Load) -> bool:
        return any(other.stage is _Stage.LOADING for other in transfer.loads.values() if other is not load)

    def _is_phantom(self, load: _Load, transfer: _Transfer) -> bool:
        """Whether vLLM has made this request up: its prompt is one token, and not that of the others under its id.

        A phantom carries the transfer id of a real request and must not touch it; mostly it is aborted at once, but it
        may be scheduled before.
        """
        if load.consumer is not None or load.num_prompt_tokens > 1:
            return False
        others: list[PromptIdentity | None] = [other.prompt for other in transfer.loads.values() if other is not load]
        if not others and load.params.transfer_id in self._recent:
            others = [self._recent[load.params.transfer_id]]
        return load.prompt not in others

    def _release(self, load: _Load, transfer: _Transfer) -> None:
        """A request needs nothing from P."""
        params, consumer = load.params, transfer.take_index(load)
        if consumer < params.consumers:
            self._commands.append(Release(SendKey(params.transfer_id, consumer), (params.host, params.port)))

    def _close(self, load: _Load, transfer: _Transfer) -> None:
        """The last request of a transfer goes: whoever has not come by now never will.

        A phantom that is the only one says so too: the real request was rejected before it came this far. But behind
        its own request it says nothing.
        """
        params, left = load.params, transfer.next_consumer
        known = load.phantom and params.transfer_id in self._recent
        if left < params.consumers and not known and not transfer.closed:
            transfer.closed = True
            self._commands.append(Release(SendKey(params.transfer_id, left), (params.host, params.port), True))

    def _remember(self, load: _Load) -> None:
        transfer_id = load.params.transfer_id
        if load.phantom and transfer_id in self._recent:
            return
        self._recent[transfer_id] = None if load.phantom else load.prompt
        self._recent.move_to_end(transfer_id)
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
