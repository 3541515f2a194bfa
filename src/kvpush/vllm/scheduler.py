"""The scheduler half: the requests of both roles, the side channel, and what is told to routers. One per engine."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvpush.protocol.messages import VERSION
from kvpush.transfer.commands import BlockTable
from kvpush.transfer.sidechannel import RankInfo, SideChannelError, SideChannelServer, secret_from_environment
from kvpush.transfer.trace import TraceSide, to_line
from kvpush.transfer.tracebook import TraceBook
from kvpush.transfer.tracefile import TraceFile
from kvpush.vllm import compat
from kvpush.vllm.config import ConfigError, Options
from kvpush.vllm.halves import SchedulerHalves
from kvpush.vllm.identity import check_cache, check_engine, engine_info
from kvpush.vllm.metadata import RankMetadata, RankNews, StepMetadata

_log = logging.getLogger(__name__)


class PushScheduler:
    """Runs on the engine's scheduler thread; nothing here waits for the network."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        check_engine(vllm_config)
        check_cache(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = options
        self._engine = engine_info(vllm_config, kv_cache_config, incarnation=uuid.uuid4().hex)
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._halves = SchedulerHalves(
            block_size,
            options.recompute_below_tokens or block_size,
            prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            quarantine_max_blocks=options.max_quarantined(kv_cache_config.num_blocks),
        )
        self.counters = self._halves.counters
        self._num_ranks = self._engine.tp_size * self._engine.pp_size
        self._book = TraceBook(self._engine.engine_id, self._engine.host_id)
        self._trace_file = _open_trace_file(options.trace_file)
        self._side_channel = SideChannelServer(
            options.side_channel_host, options.side_channel_port, self._engine, secret_from_environment(),
            lambda count: [to_line(trace) for trace in self._book.last(count)],
        )  # fmt: skip
        self._side_channel.start()
        release_after_s = options.timing.quarantine_release_after_s
        if release_after_s is not None:
            _log.warning(
                "kvpush: quarantine_release_after_s is set: after %g s memory goes back to the pool although a prefill "
                "engine may still write to it. If one that was stopped or cut off continues later than that, it writes "
                "into the KV of other requests, and their answers are wrong without any error",
                release_after_s,
            )
        _log.info(
            "kvpush: engine %s, protocol %d, side channel %s:%d",
            self._engine.engine_id, VERSION, options.side_channel_host, options.side_channel_port,
        )  # fmt: skip

    @property
    def idle(self) -> bool:
        return self._halves.idle

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
        self._halves.on_new_request(request)
        request_id = request.request_id
        produces = self._halves.produces(request_id)
        if produces or self._halves.consumes(request_id):
            side: TraceSide = "prefill" if produces else "decode"
            transfer_id = self._halves.transfer_id(request_id)
            self._book.arrived(request_id, transfer_id, side, request.num_prompt_tokens, time.monotonic())

    def matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._halves.matched_tokens(request_id, num_computed_tokens)

    def on_allocated(self, request_id: str, blocks: Any, num_external_tokens: int) -> None:
        consumes = self._halves.consumes(request_id)
        table = tuple(tuple(group) for group in blocks.get_block_ids()) if consumes else ()
        self._halves.on_allocated(request_id, table, num_external_tokens)
        if consumes:
            self._book.allocated(request_id, num_external_tokens, time.monotonic())

    def build_metadata(self, output: Any) -> StepMetadata:
        """Everything that this step has to tell the workers."""
        before, after = self._halves.on_step(output)
        self._book.step(output.num_scheduled_tokens, time.monotonic())
        self._note_ended()
        return StepMetadata(before=before, after=after)

    @property
    def levels(self) -> dict[str, int]:
        """See `stats.GAUGES`."""
        return {"unhealthy": int(not self._halves.health.healthy)}

    def on_news(self, news: object) -> None:
        """What the workers have told with this step's output, if anything."""
        if not isinstance(news, RankNews):
            return
        self._book.told(news.traces)
        self._halves.on_failed(news.failed)
        if self._halves.on_quarantines(news.quarantines):
            self._side_channel.set_trouble(self._halves.health.trouble)

    def on_reported(self, sent: set[str] | None, received: set[str] | None) -> None:
        """What every rank has reported with this step's output; `on_news` comes before."""
        self._halves.on_reported(received)
        self._book.reported([*(sent or ()), *(received or ())], time.monotonic())
        self._note_ended()  # there may be no further step for a long time

    def on_finished(self, request: Any, block_ids: BlockTable) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay, and what the client (a router) is told."""
        request_id = request.request_id
        produces, consumes = self._halves.produces(request_id), self._halves.consumes(request_id)
        if produces or consumes:
            self._book.finished(request_id, time.monotonic())
            self._note_ended()
            held = self._halves.on_finished(request, block_ids)
            return held, None if consumes else self._identity(request)
        params = request.kv_transfer_params
        probed = isinstance(params, Mapping) and params.get("kvpush_probe") is True
        return False, self._identity(request) if probed else None

    def close(self) -> None:
        self._side_channel.stop()
        if self._trace_file is not None:
            self._trace_file.close()

    def _note_ended(self) -> None:
        ended = self._book.take(time.time() - time.monotonic())
        if self._trace_file is not None:
            self._trace_file.write(ended)

    def _identity(self, request: Any) -> dict[str, Any]:
        """Who this engine is, in the keys that routers know; a decode engine can use it as its kv_transfer_params."""
        params = request.kv_transfer_params or {}
        trouble = self._halves.health.trouble
        return {
            **({"kvpush_unhealthy": trouble} if trouble else {}),
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


def _open_trace_file(path: str | None) -> TraceFile | None:
    """Raises ConfigError naming the option if the file cannot be opened."""
    if path is None:
        return None
    try:
        return TraceFile(Path(path))
    except OSError as error:
        raise ConfigError(f"trace_file: {error}") from None
