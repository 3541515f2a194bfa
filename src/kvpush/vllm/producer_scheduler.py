"""P's half of the scheduler half: which requests are offered, and what each step makes ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvpush.protocol.ids import RequestId, TransferId
from kvpush.transfer.commands import BlockTable, Command, Finish, Offer, Preempt, Progress
from kvpush.vllm import compat
from kvpush.vllm.identity import identity_of
from kvpush.vllm.params import Produce

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Offered:
    transfer_id: TransferId
    num_prompt_tokens: int
    ready: int = 0


class ProducerScheduler:
    """Turns scheduler outputs into commands for the workers. No clock, no I/O."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._offered: dict[RequestId, _Offered] = {}
        self._live: dict[TransferId, RequestId] = {}
        self._commands: list[Command] = []

    @property
    def idle(self) -> bool:
        return not (self._offered or self._live or self._commands)

    def on_new_request(self, request: Any, params: Produce) -> None:
        """A request whose KV is handed over; a second one under a live transfer id is served without hand-over.

        Raises ValueError, OverflowError or TypeError, and books nothing, if its prompt has no identity.
        """
        prompt = identity_of(request)
        if params.transfer_id in self._live:
            _log.warning(
                "kvpush: transfer %s is in use; request %s is served without hand-over",
                params.transfer_id, request.request_id,
            )  # fmt: skip
            return
        request_id = RequestId(request.request_id)
        self._live[params.transfer_id] = request_id
        self._offered[request_id] = _Offered(params.transfer_id, request.num_prompt_tokens)
        # What is not known to make one token may make more.
        decodes = getattr(request, "max_tokens", None) != 1
        self._commands.append(Offer(request_id, params.transfer_id, prompt, params.consumers, decodes))

    def owns(self, request_id: str) -> bool:
        return request_id in self._offered

    def transfer_id(self, request_id: str) -> TransferId:
        """Of a request that is owned."""
        return self._offered[RequestId(request_id)].transfer_id

    def take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def on_step(self, output: Any) -> tuple[list[Preempt], list[Progress]]:
        """What a scheduler output means: whose blocks are gone, and whose are ready after its forward."""
        if not self._offered:
            return [], []
        preempted = []
        for request_id in compat.preempted_ids(output):
            offered = self._offered.get(RequestId(request_id))
            if offered is not None:
                offered.ready = 0
                preempted.append(Preempt(RequestId(request_id)))
        steps = []
        for new in output.scheduled_new_reqs:
            # First chunk, or (V2 runner) resumed after a preemption: either way this is the whole table.
            if new.req_id in self._offered:
                steps.append(self._progress(new.req_id, new.num_computed_tokens, new.block_ids, output, replace=True))
        cached = output.scheduled_cached_reqs
        resumed = compat.resumed_ids(cached)
        for i, request_id in enumerate(cached.req_ids):
            offered = self._offered.get(RequestId(request_id))
            if offered is None:
                continue
            replace = request_id in resumed
            if offered.ready >= offered.num_prompt_tokens and not replace:
                continue  # P decodes; nothing of it is handed over
            computed, blocks = cached.num_computed_tokens[i], cached.new_block_ids[i]
            steps.append(self._progress(request_id, computed, blocks, output, replace=replace))
        return preempted, steps

    def on_finished(self, request: Any, block_ids: BlockTable, *, aborted: bool) -> bool:
        """Whether the blocks must stay until the workers report. True for every request that was offered: exactly one
        report is owed for it."""
        request_id = RequestId(request.request_id)
        offered = self._offered.pop(request_id, None)
        if offered is None:
            return False
        del self._live[offered.transfer_id]
        held = len(block_ids[0]) * self._block_size if block_ids else 0
        reason = "aborted" if aborted else ""
        if not aborted and min(held, offered.ready) < offered.num_prompt_tokens:
            # Preempted with its last output in flight: its blocks are gone already.
            reason = "incomplete"
        if held < offered.ready:
            # Preempted since the last step (a cache reset does that), and no step will say so any more.
            self._commands.append(Preempt(request_id))
        self._commands.append(Finish(request_id, reason))
        return True

    def _progress(self, request_id: str, computed: int, blocks: Any, output: Any, *, replace: bool) -> Progress:
        offered = self._offered[RequestId(request_id)]
        after = computed + output.num_scheduled_tokens.get(request_id, 0)
        offered.ready = min(after, offered.num_prompt_tokens)
        table: BlockTable = tuple(tuple(group) for group in blocks) if blocks is not None else ((),)
        return Progress(RequestId(request_id), offered.ready, table, replace)
