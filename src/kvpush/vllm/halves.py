"""Both roles of the scheduler half behind one face, free of vLLM's classes, clocks and I/O: simulators drive it too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kvpush.transfer.commands import BlockTable, Command, Progress, Stalled
from kvpush.transfer.counters import Counters
from kvpush.transfer.quarantine import Health, Quarantine, Rank
from kvpush.vllm.consumer_scheduler import ConsumerScheduler
from kvpush.vllm.params import BadParams, Consume, Params, Probe, Produce, parse_params
from kvpush.vllm.producer_scheduler import ProducerScheduler

_log = logging.getLogger(__name__)

_COMPLETE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


class SchedulerHalves:
    """What the scheduler half does for requests. produces, consumes: the roles that this engine may take.

    recompute_below_tokens: what D computes itself rather than ask for it. quarantine_max_blocks: with more blocks in
    quarantine at any rank, prompts are computed here and nothing is loaded; 0 sets no limit.
    """

    def __init__(
        self,
        block_size: int,
        recompute_below_tokens: int,
        *,
        prefix_caching: bool = True,
        produces: bool = True,
        consumes: bool = True,
        quarantine_max_blocks: int = 0,
    ) -> None:
        self._produces, self._consumes = produces, consumes
        self._producer = ProducerScheduler(block_size)
        self.counters = Counters()
        self.health = Health(quarantine_max_blocks)
        self._consumer = ConsumerScheduler(
            recompute_below_tokens, self.counters, self.health, prefix_caching=prefix_caching
        )
        self._without_blocks: set[str] = set()  # asked for in this step, and not admitted
        self._stalled = False

    @property
    def idle(self) -> bool:
        return self._producer.idle and self._consumer.idle

    def on_new_request(self, request: Any) -> None:
        """Takes up a request that is to be handed over; any other one, and what does not fit, is an ordinary request.

        Never raises: no hook can refuse a request, an exception here ends the engine.
        """
        try:
            params = self._params(request)
            if isinstance(params, Produce):
                self._producer.on_new_request(request, params)
            elif isinstance(params, Consume):
                self._consumer.on_new_request(request, params)
            else:
                return
        except (ValueError, TypeError, OverflowError) as error:
            # Beside BadParams: a prompt that has no identity (empty, or token ids that are none).
            self.counters.add("bad_params")
            _log.warning("kvpush: request %s is served without transfer: %s", request.request_id, error)
            return
        self.counters.add("transfer_id_fallbacks", amount=int(params.fallback))

    def matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, load = self._consumer.matched_tokens(request_id, num_computed_tokens)
        if found is not None:
            self._without_blocks.add(request_id)
        return found, load

    def on_allocated(self, request_id: str, blocks: BlockTable, num_external_tokens: int) -> None:
        self._without_blocks.discard(request_id)
        self._consumer.on_allocated(request_id, blocks, num_external_tokens)

    def on_step(self, output: Any) -> tuple[list[Command], list[Progress]]:
        """Everything that a scheduler output has to tell the workers: before the forward, and after it."""
        commands = self._producer.take_commands()
        preempted, steps = self._producer.on_step(output)
        commands += self._consumer.take_commands()
        if output.num_scheduled_tokens:
            if self._stalled:
                commands.append(Stalled(over=True))
            self._stalled = False
        elif self._produces and self._without_blocks:
            commands.append(Stalled())
            self._stalled = True
        self._without_blocks.clear()
        return [*preempted, *commands], steps

    def on_reported(self, received: Iterable[str] | None) -> None:
        for request_id in received or ():
            self._consumer.on_reported(request_id)

    def on_failed(self, failed: Iterable[str]) -> None:
        """Loads that have failed at a rank; their blocks may be held for long yet."""
        for request_id in failed:
            self._consumer.on_failed(request_id)

    def on_quarantines(self, quarantines: Mapping[Rank, Quarantine]) -> bool:
        """What ranks hold in quarantine now; True if the engine has become unhealthy by it, or healthy again."""
        return self.health.update(quarantines)

    def produces(self, request_id: str) -> bool:
        """The request's KV is handed over."""
        return self._producer.owns(request_id)

    def consumes(self, request_id: str) -> bool:
        """The request's KV comes, or came, from P."""
        return self._consumer.owns(request_id)

    def transfer_id(self, request_id: str) -> str:
        """Of a request that this engine produces or consumes."""
        half = self._producer if self._producer.owns(request_id) else self._consumer
        return half.transfer_id(request_id)

    def on_finished(self, request: Any, block_ids: BlockTable) -> bool:
        """Whether the blocks must stay until the workers have reported."""
        if self._consumer.owns(request.request_id):
            self._consumer.on_finished(request.request_id)
            return False
        return self._producer.on_finished(request, block_ids, aborted=request.status.name not in _COMPLETE)

    def _params(self, request: Any) -> Params:
        """What the request wants. Raises BadParams if this engine cannot do that."""
        params = parse_params(request.kv_transfer_params, request.request_id)
        if params is None or isinstance(params, Probe):
            return params
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            # Some positions may have token ids: those say nothing about the others.
            raise BadParams("prompt_embeds have no token ids to compare")
        if isinstance(params, Produce) and not self._produces:
            raise BadParams("do_remote_decode: this engine's kv_role is kv_consumer")
        if isinstance(params, Consume) and not self._consumes:
            raise BadParams("do_remote_prefill: this engine's kv_role is kv_producer")
        return params
