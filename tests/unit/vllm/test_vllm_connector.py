"""The connector class itself, within the real vLLM: registration, hooks, stats."""

from __future__ import annotations

import logging
import pickle
import time
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_engine import kv_cache_config, vllm_config
from fake_scheduler import Status
from scheduler_cases import consume, output, produce, request
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

import kvpush.vllm
from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.transfer import commands
from kvpush.transfer.commands import Command, Fetch, Finish, Offer, Preempt, Progress
from kvpush.transfer.counters import Counters
from kvpush.transfer.quarantine import Quarantine
from kvpush.transfer.records import Records
from kvpush.transfer.results import LoadFailed, Released, Result, Sent
from kvpush.transfer.sidechannel import RankInfo, SideChannelError, current_process
from kvpush.transfer.sources import PASSED, Event
from kvpush.transfer.thread import TransferThread
from kvpush.transfer.trace import RankTrace, from_lines, read_traces
from kvpush.vllm import compat, plugin
from kvpush.vllm import scheduler as scheduler_module
from kvpush.vllm.config import ConfigError
from kvpush.vllm.connector import KVPushConnector
from kvpush.vllm.identity import UnsupportedModel, identity_of
from kvpush.vllm.metadata import RankMetadata, RankNews, StepMetadata
from kvpush.vllm.stats import COUNTERS, PushPromMetrics, PushStats

pytestmark = pytest.mark.unit
R = RequestId("r")


class SideChannel:
    """In the place of the real one: remembers what it was told."""

    last: SideChannel

    def __init__(self, host: str, port: int, engine: Any, secret: bytes | None, traces: Any = None) -> None:
        self.traces = traces
        self.address, self.ranks, self.trouble, self.stopped = (host, port), [], "", False
        SideChannel.last = self

    def start(self) -> None: ...

    def set_ranks(self, ranks: list[RankInfo]) -> None:
        self.ranks = ranks

    def set_trouble(self, trouble: str) -> None:
        self.trouble = trouble

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def _side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SideChannelServer", SideChannel)


def _connector(role: KVConnectorRole, **extra: Any) -> KVPushConnector:
    return KVPushConnector(vllm_config("engine", **extra), role, kv_cache_config())


@pytest.fixture
def scheduler() -> KVPushConnector:
    return _connector(KVConnectorRole.SCHEDULER, side_channel_host="10.0.0.1", side_channel_port=15000)


class Core:
    """Behind a real transfer thread: books commands, answers those that it is told to answer."""

    def __init__(self) -> None:
        self.idle, self.writing, self.unpacking, self.rank = True, False, False, (0, 0)
        self.levels, self.quarantine = {"open_transfers": 0}, Quarantine()
        self.counters = Counters()
        self.records = Records()
        self.commands: list[tuple[Command, Event]] = []
        self.answers: dict[str, list[Result]] = {}
        self.results: list[Result] = []
        self.fail: Exception | None = None

    def command(self, command: Command, now_s: float, event: Event) -> None:
        self.commands.append((command, event))
        self.results += self.answers.pop(getattr(command, "request_id", ""), [])

    def poll(self, now_s: float) -> None:
        if self.fail is not None:
            raise self.fail

    def take_results(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    def close(self) -> None: ...


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def worker(core: Core) -> Iterator[KVPushConnector]:
    connector = _connector(KVConnectorRole.WORKER)
    half = connector._worker
    assert half is not None
    half._core = core  # type: ignore[assignment]
    half._thread = TransferThread(core)  # type: ignore[arg-type]
    half._thread.start()
    yield connector
    connector.shutdown()


def _step(worker: KVPushConnector, before: list[Command], after: list[Progress] | None = None) -> None:
    metadata = StepMetadata(before=before, after=after or [])
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)


def _until(met: Any, limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


# Start-up


def test_it_is_registered_by_name_however_often_the_plugin_is_loaded() -> None:
    for _ in range(3):
        plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVPushConnector") is KVPushConnector
    assert kvpush.vllm.KVPushConnector is kvpush.vllm.NixlPushConnector is KVPushConnector


def test_a_name_that_somebody_else_has_taken_is_left_to_him(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KVConnectorFactory._registry, "KVPushConnector", lambda: KVConnectorBase_V1)
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVPushConnector") is KVConnectorBase_V1


def test_the_factory_makes_it_by_module_path_under_the_names_of_vllms_own() -> None:
    for name in ("KVPushConnector", "NixlPushConnector"):
        config = SimpleNamespace(kv_connector=name, kv_connector_module_path="kvpush.vllm")
        assert KVConnectorFactory.get_connector_class(config) is KVPushConnector  # type: ignore[arg-type]


def test_it_transfers_hybrid_managers_blocks_whole() -> None:
    config = SimpleNamespace(kv_connector="KVPushConnector", kv_connector_module_path="kvpush.vllm")
    assert KVConnectorFactory.supports_hma_config(config)  # type: ignore[arg-type]


def test_what_cannot_work_is_refused_when_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown key 'colour'"):
        _connector(KVConnectorRole.SCHEDULER, colour="red")
    config: Any = SimpleNamespace(kv_cache_groups=[])
    with pytest.raises(UnsupportedModel, match="this one has 0"):
        KVPushConnector(vllm_config("engine"), KVConnectorRole.WORKER, config)
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.20.0")
    with pytest.raises(compat.UnsupportedVersion, match=r"0\.20\.0"):
        _connector(KVConnectorRole.SCHEDULER)


def test_it_logs_where_vllm_logs() -> None:
    _connector(KVConnectorRole.SCHEDULER)
    ours, theirs = logging.getLogger("kvpush"), logging.getLogger("vllm")
    assert set(theirs.handlers) <= set(ours.handlers) or not theirs.handlers


# Scheduler half


def test_each_rank_must_tell_of_itself(scheduler: KVPushConnector) -> None:
    me = current_process()
    rank = RankInfo(
        pp_rank=0, tp_rank=0, agent="a", metadata=b"m", geometry=b"g",
        pid=me.pid, pid_start=me.pid_start, host_id=me.host_id,
    )  # fmt: skip
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): RankMetadata(msgspec.msgpack.encode(rank))})
    assert SideChannel.last.ranks == [rank]
    assert SideChannel.last.address == ("10.0.0.1", 15000)
    scheduler.set_xfer_handshake_metadata({0: RankMetadata(msgspec.msgpack.encode(rank))})
    with pytest.raises(SideChannelError, match="0 of 1 ranks"):
        scheduler.set_xfer_handshake_metadata({})
    scheduler.shutdown()
    assert SideChannel.last.stopped


def test_a_prefill_leg_from_arrival_to_what_the_router_is_told(scheduler: KVPushConnector) -> None:
    leg = request("r", 10, produce())
    scheduler.on_new_request(leg)
    assert scheduler.get_num_new_matched_tokens(leg, 0) == (0, False)
    scheduler.update_state_after_alloc(leg, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 0)
    metadata = scheduler.build_connector_meta(output(new={"r": ([1, 2, 3], 0, 10)}))
    assert isinstance(metadata, StepMetadata)
    assert metadata.before == [Offer(R, TransferId("t"), identity_of(leg), 1)]
    assert metadata.after == [Progress(R, 10, ((1, 2, 3),), True)]
    leg.status = Status.FINISHED_LENGTH_CAPPED
    held, params = scheduler.request_finished_all_groups(leg, ([1, 2, 3],))
    assert held is True
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_engine_id": "engine",
        "remote_request_id": "r",
        "remote_host": "10.0.0.1",
        "remote_port": 15000,
        "tp_size": 1,
        "pp_size": 1,
        "transfer_mode": "push",
    }
    scheduler.update_connector_output(SimpleNamespace(finished_recving=None, finished_sending={"r"}))
    assert scheduler.build_connector_meta(output()).before == [Finish(R, "")]  # type: ignore[attr-defined]


def test_a_decode_leg_until_it_is_received(scheduler: KVPushConnector) -> None:
    leg = request("r", 10, consume())
    scheduler.on_new_request(leg)
    assert scheduler.get_num_new_matched_tokens(leg, 4) == (6, True)
    assert scheduler.get_loaded_kv_cache_group_ids(leg) == (0,)
    scheduler.update_state_after_alloc(leg, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],)), 6)
    [fetch] = scheduler.build_connector_meta(output()).before  # type: ignore[attr-defined]
    assert fetch == Fetch(R, SendKey(TransferId("t"), 0), 1, identity_of(leg), 4, ((7, 8, 9),), ("p", 1000))
    scheduler.update_connector_output(SimpleNamespace(finished_recving={"r"}, finished_sending=None))
    leg.status = Status.FINISHED_STOPPED
    assert scheduler.request_finished(leg, [7, 8, 9]) == (False, None)


def test_every_transfer_leaves_a_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    scheduler = _connector(KVConnectorRole.SCHEDULER, trace_file=str(path))
    given, taken = request("p", 10, produce("t")), request("d", 10, consume("u"))
    scheduler.on_new_request(given)
    scheduler.on_new_request(taken)
    scheduler.update_state_after_alloc(taken, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],)), 9)
    scheduler.build_connector_meta(output(new={"p": ([1, 2, 3], 0, 10)}))
    given.status = Status.FINISHED_LENGTH_CAPPED
    scheduler.request_finished_all_groups(given, ([1, 2, 3],))
    assert read_traces(path) == []
    ends = (("p", "sent"), ("d", "received"))
    ranks = [RankTrace(request_id=name, host_id="h", times_s={}, outcome=end) for name, end in ends]
    told = RankNews(traces=ranks[:1]).aggregate(RankNews(traces=ranks[1:]))
    scheduler.update_connector_output(
        SimpleNamespace(finished_sending={"p"}, finished_recving={"d"}, kv_connector_worker_meta=told)
    )
    # P may do nothing for hours now: its record is there already.
    [sent] = read_traces(path)
    assert (sent.transfer_id, sent.side, sent.outcome, sent.num_tokens) == ("t", "prefill", "sent", 10)
    assert set(sent.times_s) == {"arrived", "scheduled", "finished", "reported"}
    scheduler.build_connector_meta(output(new={"d": ([7, 8, 9], 9, 1)}))
    [_, received] = read_traces(path)
    assert (received.transfer_id, received.outcome, received.ranks) == ("u", "received", ranks[1:])
    assert set(received.times_s) == {"arrived", "allocated", "reported", "scheduled"}
    assert abs(received.times_s["scheduled"] + received.unix_offset_s - time.time()) < 60
    # The side channel gives the same.
    assert list(from_lines(SideChannel.last.traces(5), "side channel")) == [sent, received]
    assert list(from_lines(SideChannel.last.traces(1), "side channel")) == [received]
    scheduler.shutdown()


def test_a_trace_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace_file: .*Is a directory"):
        _connector(KVConnectorRole.SCHEDULER, trace_file=str(tmp_path))


def test_a_router_may_ask_who_an_engine_is(scheduler: KVPushConnector) -> None:
    probe = request("r", 3, {"kvpush_probe": True})
    scheduler.on_new_request(probe)
    probe.status = Status.FINISHED_LENGTH_CAPPED
    held, params = scheduler.request_finished(probe, [1])
    assert held is False
    assert params is not None
    assert params["remote_engine_id"] == "engine"
    for ordinary in (None, {}, {"kvpush_probe": False}, [1]):
        asked = request("s", 3, ordinary)  # type: ignore[arg-type]
        scheduler.on_new_request(asked)
        assert scheduler.request_finished(asked, [1]) == (False, None)


def test_a_reset_of_the_cache_is_none_of_ours(scheduler: KVPushConnector) -> None:
    assert scheduler.reset_cache() is True


def test_kv_that_is_handed_over_must_be_delivered(scheduler: KVPushConnector) -> None:
    assert scheduler.requires_kv_delivery is True


# Worker half


def test_commands_leave_before_the_forward_and_steps_after_it(worker: KVPushConnector, core: Core) -> None:
    offer = Offer(R, TransferId("t"), identity_of(request("r")), 1)
    progress = Progress(R, 4, ((1,),), True)
    _step(worker, [offer], [progress])
    _until(lambda: core.commands == [(offer, PASSED)])
    time.sleep(0.02)
    assert len(core.commands) == 1  # the forward has not been launched yet
    worker.finish_forward()
    _until(lambda: core.commands == [(offer, PASSED), (progress, PASSED)])
    worker.wait_for_save()  # the other hooks of the same step find nothing left
    worker.get_finished(set())
    time.sleep(0.02)
    assert len(core.commands) == 2


@pytest.mark.parametrize("hook", ["finish_forward", "wait_for_save", "get_finished"])
def test_whichever_hook_comes_first_ends_the_forward(worker: KVPushConnector, core: Core, hook: str) -> None:
    progress = Progress(R, 4, ((1,),), True)
    _step(worker, [], [progress])
    worker.get_finished(set()) if hook == "get_finished" else getattr(worker, hook)()
    _until(lambda: core.commands == [(progress, PASSED)])


def test_nothing_to_say_costs_nothing(worker: KVPushConnector, core: Core) -> None:
    _step(worker, [])
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_kv_connector_stats() is None
    assert core.commands == []


def test_results_are_reported_once_through_either_hook(worker: KVPushConnector, core: Core) -> None:
    offer = Offer(R, TransferId("t"), identity_of(request("r")), 1)
    fetch = Fetch(RequestId("d"), SendKey(TransferId("u"), 0), 1, identity_of(request("d")), 0, ((7, 8, 9),), ("p", 1))
    core.answers = {"r": [Sent(R)], "d": [LoadFailed(RequestId("d"), "x"), Released(RequestId("d"))]}
    _step(worker, [offer, fetch])
    _until(lambda: len(core.commands) == 2)
    time.sleep(0.02)
    found = worker.get_transfer_results({"r"})
    assert (found.finished_sending, found.finished_recving, found.failed_recving) == ({"r"}, {"d"}, {"d"})
    assert worker.get_block_ids_with_load_errors() == {7, 8, 9}
    assert worker.get_finished({"d"}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()


def test_ranks_tell_what_they_know_of_what_they_report(worker: KVPushConnector, core: Core) -> None:
    other = RequestId("o")
    for request_id in (R, other):
        core.records.open(request_id, "t").mark("landed", 4.0)
        core.records.end(request_id, "sent")
    core.answers = {"r": [Sent(R)]}
    _step(worker, [Offer(R, TransferId("t"), identity_of(request("r")), 1)])
    _until(lambda: len(core.commands) == 1)
    time.sleep(0.02)
    assert worker.build_connector_worker_meta() is None
    assert worker.get_finished({"r"}) == ({"r"}, None)
    told = worker.build_connector_worker_meta()
    assert told is not None
    [trace] = told.traces
    assert (trace.request_id, trace.outcome, trace.times_s["landed"]) == ("r", "sent", 4.0)
    assert trace.times_s["collected"] <= time.monotonic()
    assert pickle.loads(pickle.dumps(told)) == told  # it travels between processes
    assert worker.build_connector_worker_meta() is None


def test_a_preemption_waits_at_the_fence_but_not_for_long(core: Core) -> None:
    connector = _connector(KVConnectorRole.WORKER, preempt_wait_s=0.05)
    half = connector._worker
    assert half is not None
    half._core, half._thread = core, TransferThread(core)  # type: ignore[assignment, arg-type]
    half._thread.start()
    try:
        half._fence.begin(R)
        start_s = time.monotonic()
        _step(connector, [Preempt(R), Preempt(RequestId("s"))])
        assert 0.05 <= time.monotonic() - start_s < 1
        _until(lambda: [c for c, _ in core.commands] == [Preempt(R, poisoned=True), Preempt(RequestId("s"))])
        assert not half._fence.begin(R)  # closed until the thread has taken note
    finally:
        connector.shutdown()


def test_a_transfer_thread_that_has_died_ends_the_engine_with_its_reason(worker: KVPushConnector, core: Core) -> None:
    core.fail = KeyError("a defect")
    half = worker._worker
    assert half is not None
    _until(lambda: half._running().failure is not None)
    _step(worker, [Offer(R, TransferId("t"), identity_of(request("r")), 1)])
    with pytest.raises(RuntimeError, match="transfer thread has died"):
        worker.get_finished(set())


def test_hooks_before_the_caches_are_there_say_so() -> None:
    connector = _connector(KVConnectorRole.WORKER)
    assert connector.get_handshake_metadata() is None
    assert connector.get_kv_connector_stats() is None
    with pytest.raises(RuntimeError, match="register_kv_caches has not been called"):
        _step(connector, [Offer(R, TransferId("t"), identity_of(request("r")), 1)])
    connector.shutdown()


# Quarantine


def test_a_worker_tells_of_its_quarantine_when_it_has_changed(worker: KVPushConnector, core: Core) -> None:
    assert worker.build_connector_worker_meta() is None
    core.quarantine = Quarantine(5, ("p:1/pp0tp0",))
    worker.get_finished(set())
    assert worker.build_connector_worker_meta() == RankNews({(0, 0): core.quarantine})
    assert worker.build_connector_worker_meta() is None
    core.quarantine = Quarantine()
    worker.get_finished(set())
    news = worker.build_connector_worker_meta()
    assert news == RankNews({(0, 0): Quarantine()})
    other = RankNews({(0, 1): Quarantine(1)})
    assert other.aggregate(news) == RankNews({(0, 0): Quarantine(), (0, 1): Quarantine(1)})
    assert pickle.loads(pickle.dumps(other)) == other


def _ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvpush has logged; vLLM warns of its own accord."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvpush.")]


def test_above_the_limit_the_engine_loads_nothing_and_says_so_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = _connector(KVConnectorRole.SCHEDULER, quarantine_max_blocks=8)

    def tell(**held: int) -> None:
        news = RankNews({(0, int(rank[1:])): Quarantine(count, (f"p{rank}:1",)) for rank, count in held.items()})
        with caplog.at_level(logging.WARNING, "kvpush.transfer.quarantine"):
            scheduler.update_connector_output(
                SimpleNamespace(finished_recving=None, finished_sending=None, kv_connector_worker_meta=news)
            )

    def probe() -> Any:
        leg = request("probe", 1, {"do_remote_decode": True, "kvpush_probe": True})
        return scheduler.request_finished(leg, [])[1]

    tell(r0=8)
    assert _ours(caplog) == []
    assert "kvpush_unhealthy" not in probe()
    tell(r1=9)
    tell(r1=10)
    assert len(_ours(caplog)) == 1  # once, with the number and the writers
    assert "9 KV blocks" in _ours(caplog)[0]
    assert "pr0:1, pr1:1 may still write" in _ours(caplog)[0]
    assert "9 KV blocks" in SideChannel.last.trouble
    assert "10 KV blocks" in probe()["kvpush_unhealthy"]
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"unhealthy:": 1}
    leg = request("r", 12, consume())
    scheduler.on_new_request(leg)
    assert scheduler.get_num_new_matched_tokens(leg, 0) == (0, False)
    tell(r1=0)
    assert len(_ours(caplog)) == 2
    assert "healthy again" in _ours(caplog)[1]
    assert SideChannel.last.trouble == ""
    assert "kvpush_unhealthy" not in probe()
    assert scheduler.get_num_new_matched_tokens(leg, 0) == (12, True)
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"unhealthy:": -1}


def test_giving_up_the_fence_by_time_is_warned_of_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvpush.vllm.scheduler"):
        _connector(KVConnectorRole.SCHEDULER)
        assert _ours(caplog) == []
        _connector(KVConnectorRole.SCHEDULER, quarantine_release_after_s=600)
    [message] = _ours(caplog)
    assert "after 600 s memory goes back to the pool although" in message
    with pytest.raises(ConfigError, match="quarantine_release_after_s"):
        _connector(KVConnectorRole.SCHEDULER, quarantine_release_after_s=0)


def test_by_default_a_quarter_of_the_pool_may_be_in_quarantine() -> None:
    half = _connector(KVConnectorRole.SCHEDULER)._scheduler
    assert half is not None
    assert half._halves.health.max_blocks == 16
    half = _connector(KVConnectorRole.SCHEDULER, quarantine_max_blocks=0)._scheduler
    assert half is not None
    assert not half._halves.on_quarantines({(0, 0): Quarantine(10_000)})


# Stats


def test_stats_are_differences_and_add_up(worker: KVPushConnector, core: Core) -> None:
    core.counters.add("receives")
    core.levels, core.quarantine = {"open_transfers": 1}, Quarantine(5)
    worker.get_finished(set())
    first = worker.get_kv_connector_stats()
    assert first is not None
    assert first.data == {"receives:": 1, "quarantined_blocks:": 5, "open_transfers:": 1}
    assert worker.get_kv_connector_stats() is None
    core.counters.add("receives", amount=2)
    core.counters.add("loads_failed", "aborted")
    core.levels, core.quarantine = {"open_transfers": 0}, Quarantine(3)
    worker.get_finished(set())
    second = worker.get_kv_connector_stats()
    assert second is not None
    total = KVPushConnector.build_kv_connector_stats(dict(first.data))
    assert total is not None
    total.aggregate(second)
    assert total.reduce() == {"loads_failed:aborted": 1, "open_transfers": 0, "quarantined_blocks": 3, "receives": 3}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert KVPushConnector.build_kv_connector_stats() == PushStats(data={})


def test_the_scheduler_half_has_stats_of_its_own(scheduler: KVPushConnector) -> None:
    scheduler.on_new_request(request("r", 3, {"do_remote_decode": "yes"}))
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"bad_params:": 1}
    assert scheduler.get_kv_connector_stats() is None


def test_metrics_are_counted_for_each_engine() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = KVPushConnector.build_prom_metrics(
        vllm_config("engine"), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    assert isinstance(metrics, PushPromMetrics)
    metrics.observe({"loads_failed:aborted": 2, "receives:": 1, "quarantined_blocks:": 5, "of another version:": 1}, 0)
    metrics.observe({"loads_failed:aborted": 1, "quarantined_blocks:": -2}, 0)
    metrics.observe({"receives:": 7, "open_transfers:": 2, "open_writes:": 1}, 1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})

    assert value("kvpush_loads_failed_total", "0", reason="aborted") == 3
    assert value("kvpush_receives_total", "0", reason="") == 1
    assert value("kvpush_receives_total", "1", reason="") == 7
    assert value("kvpush_quarantined_blocks", "0") == 3
    assert value("kvpush_open_transfers", "1") == 2
    assert value("kvpush_open_writes", "1") == 1


def test_every_counter_that_warns_of_something_is_exported() -> None:
    """What the layers below count, by name, as far as an operator must see it."""
    import re
    from pathlib import Path

    counted = set()
    for layer in ("transfer", "vllm"):
        for path in (Path(kvpush.vllm.__file__).parents[1] / layer).glob("*.py"):
            counted |= set(re.findall(r'counters\.add\(\s*"(\w+)"', path.read_text()))
    assert counted - set(COUNTERS) <= {"messages_sent", "messages_received"}
    assert set(COUNTERS) <= counted


def test_a_steps_metadata_travels_to_the_workers_as_it_is() -> None:
    """vLLM pickles it for each worker process."""
    who, key = identity_of(request("r")), SendKey(TransferId("t"), 0)
    before: list[Command] = [
        commands.Preempt(R),
        commands.Offer(R, TransferId("t"), who, 1),
        commands.Finish(R, "aborted"),
        commands.Announce(TransferId("t"), who, ("p", 1)),
        commands.Withdraw(TransferId("t")),
        commands.Fetch(R, key, 1, who, 0, ((1, 2),), ("p", 1), "e"),
        commands.Refuse(R, "duplicate", 0, ((1,),)),
        commands.Cancel(R),
        commands.Release(key, ("p", 1), True),
        commands.Stalled(),
    ]
    metadata = StepMetadata(before=before, after=[Progress(R, 4, ((1,),), True)])
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    kinds = set(typing.get_args(Command))
    assert {type(command) for command in before} | {Progress} == kinds
