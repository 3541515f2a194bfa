"""The worker half: one per rank. Owns the transfer thread and what is owed to the engine."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch

from kvpush.plan.paths import CPU_COSTS, GPU_COSTS
from kvpush.protocol.ids import PeerAddress
from kvpush.transfer.addresses import AllowList
from kvpush.transfer.commands import Preempt, Progress
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import SideChannelDialer
from kvpush.transfer.fence import Fence
from kvpush.transfer.hashing import BackgroundHasher
from kvpush.transfer.pieces import PathConfig
from kvpush.transfer.proof import WriterProof
from kvpush.transfer.prover import ProcessProver
from kvpush.transfer.quarantine import Quarantine
from kvpush.transfer.records import Record
from kvpush.transfer.reports import Reports
from kvpush.transfer.sidechannel import RankInfo, current_process, secret_from_environment
from kvpush.transfer.sight import Sight
from kvpush.transfer.sources import PASSED, Event
from kvpush.transfer.thread import TransferThread
from kvpush.transfer.trace import RankTrace
from kvpush.transport.base import Region
from kvpush.transport.nixl import NixlTransport
from kvpush.vllm import compat
from kvpush.vllm.cache import PagedCache
from kvpush.vllm.config import Options
from kvpush.vllm.identity import check_cache, check_engine, engine_info, rank_fingerprint
from kvpush.vllm.metadata import RankMetadata, RankNews, StepMetadata
from kvpush.vllm.peers import exported, opener
from kvpush.vllm.staging import build_staging, regions_of

_log = logging.getLogger(__name__)

GPU_NIXL_THREADS = 4
"""NIXL threads that post the runs of one write side by side; with thousands of runs four halve the time."""

MAX_UNREPORTED = 1024
"""Records that are kept until their request is reported; a few never are, because the engine has let go before."""


class PushWorker:
    """All methods but none of the waiting: the engine's main thread stands still only in `before_forward`, for at most
    `preempt_wait_s`, and only when blocks are preempted that a transfer reads."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        check_engine(vllm_config)
        check_cache(kv_cache_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._fence = Fence()
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._reports = Reports(self._block_size)
        self._steps: list[Progress] = []
        self._core: TransferCore | None = None
        self._thread: TransferThread | None = None
        self._rank: RankInfo | None = None
        self._cuda = False
        self._quarantine = self._told = Quarantine()
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._traces: list[RankTrace] = []

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Makes the caches reachable for peers and starts the transfer thread."""
        options, cache = self._options, PagedCache(kv_caches, self._kv_cache_config)
        pp_rank, tp_rank = compat.rank_of()
        secret = secret_from_environment()
        process = current_process()
        num_threads = options.num_threads
        if num_threads is None:
            num_threads = GPU_NIXL_THREADS if cache.device is not None else 0
        transport = NixlTransport(f"kvpush-{uuid.uuid4().hex}", backends=options.backends, num_threads=num_threads)
        transport.register([Region(address, length, cache.device) for address, length in cache.regions])
        role = self._vllm_config.kv_transfer_config
        staging = build_staging(cache, options, producer=role.is_kv_producer, consumer=role.is_kv_consumer)
        if staging is not None:
            transport.register(regions_of(staging))
        area = None if staging is None else staging.receive
        self._rank = RankInfo(
            pp_rank=pp_rank,
            tp_rank=tp_rank,
            agent=transport.name,
            metadata=transport.metadata(),
            geometry=msgspec.msgpack.encode(cache.geometry),
            pid=process.pid,
            pid_start=process.pid_start,
            host_id=process.host_id,
            staging=b"" if area is None else msgspec.msgpack.encode(area),
            fingerprint=rank_fingerprint(self._vllm_config, self._kv_cache_config),
            peer=exported(cache, options, consumer=role.is_kv_consumer),
        )
        allowed = AllowList([*options.allowed_hosts, options.side_channel_host])
        config = CoreConfig(
            sender=PeerAddress(options.side_channel_host, options.side_channel_port, pp_rank, tp_rank),
            cache=cache.geometry,
            timing=options.timing,
            hasher=BackgroundHasher(cache.hash_blocks, cache.select_device) if options.integrity != "off" else None,
            integrity_share=self._integrity_share(),
            stream=options.stream,
            paths=PathConfig(
                options.path,
                CPU_COSTS if cache.device is None else GPU_COSTS,
                staging,
                opener(cache, options, process, producer=role.is_kv_producer),
            ),
            quarantine_max_blocks=options.max_quarantined(self._kv_cache_config.num_blocks),
            clock=time.monotonic,
        )
        mine = engine_info(self._vllm_config, self._kv_cache_config, incarnation=f"worker-{os.getpid()}")
        sight = Sight()
        dialer = SideChannelDialer(mine.of(self._rank), allowed, secret, options.handshake_timeout_s, sight=sight)
        prover = ProcessProver(WriterProof(secret, sight=sight), allowed)
        self._core = TransferCore(config, transport, dialer, prover, self._fence)
        self._cuda = cache.device is not None
        self._thread = TransferThread(self._core, on_start=cache.select_device)
        if options.switch_interval_s and self._vllm_config.kv_transfer_config.is_kv_producer:
            # P posts while the main thread launches the next chunk. D's thread has time until the next step, and making
            # it faster costs every token that is being decoded.
            sys.setswitchinterval(min(sys.getswitchinterval(), options.switch_interval_s))
        self._thread.start()
        _log.info(
            "kvpush: %s registered %d regions, %.2f GiB, block size %d, %d layers",
            transport.name, len(cache.regions), sum(length for _, length in cache.regions) / 2**30,
            self._block_size, len(cache.geometry.bases),
        )  # fmt: skip

    @property
    def counters(self) -> Any:
        return self._core.counters if self._core is not None else None

    @property
    def levels(self) -> dict[str, int]:
        """What is open now (see `stats.GAUGES`), and what is in quarantine as of the last `collect`."""
        if self._core is None:
            return {}
        return {**self._core.levels, "quarantined_blocks": self._quarantine.num_blocks}

    def news(self) -> RankNews | None:
        """What the scheduler half has to know of this rank as of the last `collect`; None if that has not changed."""
        failed, quarantine = self._reports.take_failures(), self._quarantine
        changed = {self._core.rank: quarantine} if self._core is not None and quarantine != self._told else {}
        self._told = quarantine
        traces, self._traces = self._traces, []
        return RankNews(changed, failed, traces) if changed or failed or traces else None

    def handshake_metadata(self) -> RankMetadata | None:
        return None if self._rank is None else RankMetadata(msgspec.msgpack.encode(self._rank))

    def before_forward(self, metadata: StepMetadata) -> None:
        """Commands that must leave before this step's forward overwrites or computes anything."""
        self._running().on_step()
        if not metadata.before and not metadata.after:
            return
        preempted = [command.request_id for command in metadata.before if isinstance(command, Preempt)]
        poisoned = self._fence.preempt(preempted, self._options.preempt_wait_s) if preempted else set()
        self._steps += metadata.after
        self._running().submit(self._reports.admit(metadata.before, poisoned))

    def after_forward(self) -> None:
        """The forward of the step has been launched (CUDA) or is done (CPU): what it makes ready may be read after it.

        Called by whichever hook comes first; the others of the same step find nothing left to do.
        """
        if self._steps:
            steps, self._steps = self._steps, []
            self._running().submit(steps, self._record_event())

    def collect(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """(finished_sending, finished_recving, failed_recving) of this step: see `Reports.collect`."""
        self.after_forward()
        results = self._running().take_results()
        if self._core is not None:
            # Behind the results: a release is never seen before its quarantine's end. And once for the whole step: a
            # version may drop what is told without reports, blocks or stats; with one of these it goes through.
            self._quarantine = self._core.quarantine
        sent, received, failed = self._reports.collect(finished_req_ids, results)
        if sent or received:
            self._note(sent | received)
        return sent, received, failed

    def take_invalid_blocks(self) -> set[int]:
        return self._reports.take_invalid_blocks()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def _integrity_share(self) -> float:
        """A drafter writes KV behind the forward, while it is pushed: digests of such blocks would not agree."""
        share = self._options.integrity_share
        if share and getattr(self._vllm_config, "speculative_config", None) is not None:
            _log.warning("kvpush: with speculative decoding this engine sends no digests of what it pushes (integrity)")
            return 0.0
        return share

    def _note(self, reported: Collection[str]) -> None:
        """Completes the records of the requests that are reported now."""
        core, rank = self._core, self._rank
        if core is None:
            return
        now_s = time.monotonic()
        self._records.update((str(record.request_id), record) for record in core.records.take_ended())
        for request_id in reported:
            record = self._records.pop(request_id, None)
            if record is not None:
                pp_rank, tp_rank, host = (rank.pp_rank, rank.tp_rank, rank.host_id) if rank is not None else (0, 0, "")
                self._traces.append(RankTrace.of(record, pp_rank, tp_rank, host, now_s))
        while len(self._records) > MAX_UNREPORTED:
            self._records.popitem(last=False)

    def _record_event(self) -> Event:
        if not self._cuda:
            return PASSED
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def _running(self) -> TransferThread:
        if self._thread is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._thread
