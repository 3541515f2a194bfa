"""The scheduler half: both roles, the side channel, and what is told to routers. One per engine."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from kvpush.protocol.messages import VERSION
from kvpush.transfer.commands import BlockTable
from kvpush.transfer.counters import Counters
from kvpush.transfer.sidechannel import RankInfo, SideChannelError, SideChannelServer, secret_from_environment
from kvpush.vllm import compat
from kvpush.vllm.config import Options
from kvpush.vllm.consumer_scheduler import ConsumerScheduler
from kvpush.vllm.identity import check_cache, engine_info
from kvpush.vllm.metadata import RankMetadata, StepMetadata
from kvpush.vllm.params import BadParams, Consume, Params, Probe, Produce, parse_params
from kvpush.vllm.producer_scheduler import ProducerScheduler

_log = logging.getLogger(__name__)


class PushScheduler:
    """Runs on the engine's scheduler thread; nothing here waits for the network."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        check_cache(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._options = options
        self._engine = engine_info(vllm_config, kv_cache_config, incarnation=uuid.uuid4().hex)
        self.counters = Counters()
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._producer = ProducerScheduler(block_size)
        self._consumer = ConsumerScheduler(
            options.recompute_below_tokens or block_size, prefix_caching=vllm_config.cache_config.enable_prefix_caching
        )
        self._num_ranks = self._engine.tp_size * self._engine.pp_size
        self._side_channel = SideChannelServer(
            options.side_channel_host, options.side_channel_port, self._engine, secret_from_environment()
        )
        self._side_channel.start()
        _log.info(
            "kvpush: engine %s, protocol %d, side channel %s:%d",
            self._engine.engine_id, VERSION, options.side_channel_host, options.side_channel_port,
        )  # fmt: skip

    @property
    def idle(self) -> bool:
        return self._producer.idle and self._consumer.idle

    def set_ranks(self, metadata: Mapping[Any, RankMetadata]) -> None:
        """What the workers tell of themselves. Raises SideChannelError if a rank is missing."""
        ranks = [msgspec.msgpack.decode(entry.rank, type=RankInfo) for entry in compat.by_pp_and_tp(metadata).values()]
        if len(ranks) != self._num_ranks:
            raise SideChannelError(f"{len(ranks)} of {self._num_ranks} ranks have told what peers need to reach them")
        self._side_channel.set_ranks(ranks)

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
        return self._consumer.matched_tokens(request_id, num_computed_tokens)

    def on_allocated(self, request_id: str, blocks: Any, num_external_tokens: int) -> None:
        if self._consumer.owns(request_id):
            table = tuple(tuple(group) for group in blocks.get_block_ids())
            self._consumer.on_allocated(request_id, table, num_external_tokens)

    def build_metadata(self, output: Any) -> StepMetadata:
        """Everything that this step has to tell the workers."""
        commands = self._producer.take_commands()
        preempted, steps = self._producer.on_step(output)
        commands += self._consumer.take_commands()
        return StepMetadata(before=[*preempted, *commands], after=steps)

    def on_reported(self, received: set[str] | None) -> None:
        for request_id in received or ():
            self._consumer.on_reported(request_id)

    def on_finished(self, request: Any, block_ids: BlockTable) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay, and what the client (a router) is told."""
        request_id = request.request_id
        if self._consumer.owns(request_id):
            self._consumer.on_finished(request_id)
            return False, None
        aborted = request.status.name not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
        if self._producer.owns(request_id):
            return self._producer.on_finished(request, block_ids, aborted=aborted), self._identity(request)
        params = request.kv_transfer_params
        probed = isinstance(params, Mapping) and params.get("kvpush_probe") is True
        return False, self._identity(request) if probed else None

    def close(self) -> None:
        self._side_channel.stop()

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

    def _identity(self, request: Any) -> dict[str, Any]:
        """Who this engine is, in the keys that routers know; a decode engine can use it as its kv_transfer_params."""
        params = request.kv_transfer_params or {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": params.get("transfer_id"),
            "remote_engine_id": self._engine.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._options.side_channel_host,
            "remote_port": self._options.side_channel_port,
            "tp_size": self._engine.tp_size,
            "pp_size": self._engine.pp_size,
            "transfer_mode": "push",
        }
