"""The options: validated as a whole, an unknown or impossible key is named."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvpush.protocol.timing import Timing
from kvpush.vllm import compat
from kvpush.vllm.config import DEFAULT_PORT, ConfigError, Options, parse_options

pytestmark = pytest.mark.unit


def test_nothing_given_is_all_defaults() -> None:
    assert parse_options({}, {}) == Options()


def test_options_and_bounds_stand_side_by_side() -> None:
    options = parse_options({"stream": False, "peer_timeout_s": 20, "allowed_hosts": ["10.0.0.0/8"]}, {})
    assert options.stream is False
    assert options.timing == Timing(peer_timeout_s=20)
    assert options.allowed_hosts == ("10.0.0.0/8",)


def test_the_environment_gives_host_and_port_unless_the_configuration_does() -> None:
    environment = {"KVPUSH_SIDE_CHANNEL_HOST": "10.0.0.1", "KVPUSH_SIDE_CHANNEL_PORT": "15000"}
    options = parse_options({}, environment)
    assert (options.side_channel_host, options.side_channel_port) == ("10.0.0.1", 15000)
    options = parse_options({"side_channel_port": 16000}, environment)
    assert (options.side_channel_host, options.side_channel_port) == ("10.0.0.1", 16000)
    with pytest.raises(ConfigError, match="KVPUSH_SIDE_CHANNEL_PORT is not a number: 'x'"):
        parse_options({}, {"KVPUSH_SIDE_CHANNEL_PORT": "x"})


def test_the_environment_names_a_trace_file_unless_the_configuration_does() -> None:
    environment = {"KVPUSH_TRACE_FILE": "/t/env.jsonl"}
    assert parse_options({}, environment).trace_file == "/t/env.jsonl"
    assert parse_options({"trace_file": "/t/mine.jsonl"}, environment).trace_file == "/t/mine.jsonl"
    assert parse_options({}, {"KVPUSH_TRACE_FILE": ""}).trace_file is None


def test_an_unknown_key_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown key .side_chanel_port..*side_channel_port") as raised:
        parse_options({"side_chanel_port": 1}, {})
    assert "peer_timeout_s" in str(raised.value)
    with pytest.raises(ConfigError, match="unknown key 'timing'"):
        parse_options({"timing": {}}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("side_channel_port", 0),
        ("side_channel_port", 65_536),
        ("side_channel_port", "14600"),
        ("side_channel_host", ""),
        ("side_channel_host", 7),
        ("backends", []),
        ("backends", "UCX"),
        ("num_threads", -1),
        ("num_threads", 65),
        ("num_threads", 1.5),
        ("stream", "yes"),
        ("integrity", "sometimes"),
        ("integrity_sample", -0.1),
        ("integrity_sample", 1.1),
        ("integrity_sample", "1%"),
        ("integrity_sample", float("nan")),
        ("recompute_below_tokens", 0),
        ("preempt_wait_s", -0.1),
        ("preempt_wait_s", 1.5),
        ("preempt_wait_s", float("nan")),
        ("switch_interval_s", -1),
        ("switch_interval_s", 2),
        ("handshake_timeout_s", 0),
        ("handshake_timeout_s", float("inf")),
        ("allowed_hosts", "10.0.0.0/8"),
        ("allowed_hosts", ["10.0.0.0/99"]),
        ("allowed_hosts", [7]),
        ("peer_timeout_s", 0),
        ("peer_timeout_s", "10"),
        ("peer_timeout_s", True),
        ("peer_timeout_s", float("nan")),
        ("ping_interval_s", 10),
        ("announced_timeout_s", 1),
        ("tombstone_s", 1e9),
        ("trace_file", "relative.jsonl"),
        ("trace_file", 7),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_key(key: str, value: object) -> None:
    names = {"allowed_hosts": "allowed_hosts|allow list"}
    with pytest.raises(ConfigError, match=names.get(key, key)):
        parse_options({key: value}, {})


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 0.01),
        ({"integrity": "sample", "integrity_sample": 0.2}, 0.2),
        ({"integrity": "off", "integrity_sample": 0.2}, 0.0),
        ({"integrity": "always", "integrity_sample": 0.2}, 1.0),
    ],
)
def test_which_share_of_transfers_is_digested(given: dict[str, Any], share: float) -> None:
    assert parse_options(given, {}).integrity_share == share


def test_each_data_parallel_rank_takes_the_next_port() -> None:
    def config(index: int) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=index))

    assert compat.shift_port(Options(), config(0)).side_channel_port == DEFAULT_PORT
    assert compat.shift_port(Options(), config(3)).side_channel_port == DEFAULT_PORT + 3
    old = SimpleNamespace(parallel_config=SimpleNamespace())  # a version without the field
    assert compat.shift_port(Options(), old).side_channel_port == DEFAULT_PORT
    with pytest.raises(ValueError, match="side_channel_port"):
        compat.shift_port(Options(side_channel_port=65_535), config(1))


# Versions


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1.dev5+g123", "0.32.0+cpu", "0.32"])
def test_tested_versions_pass_silently(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compat.check_version(version)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.27.0", "0.33.2", "0.0.0", "0.31.0rc1"])
def test_versions_in_range_that_were_never_tested_warn(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compat.check_version(version)
    assert version in caplog.text


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0.0", "0.9.1", "dev", "", "v0.32"])
def test_other_versions_are_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(compat.UnsupportedVersion, match=r"0\.26"):
        compat.check_version(version)


def test_what_versions_leave_out_is_nothing() -> None:
    assert compat.preempted_ids(SimpleNamespace(preempted_req_ids=None)) == set()
    assert compat.preempted_ids(SimpleNamespace()) == set()
    assert compat.preempted_ids(SimpleNamespace(preempted_req_ids={"a"})) == {"a"}
    assert compat.resumed_ids(SimpleNamespace()) == set()
    assert compat.resumed_ids(SimpleNamespace(resumed_req_ids={"a"})) == {"a"}


def test_handshake_metadata_is_keyed_by_both_ranks_whichever_way_it_comes() -> None:
    assert compat.by_pp_and_tp({0: "a", 1: "b"}) == {(0, 0): "a", (0, 1): "b"}
    assert compat.by_pp_and_tp({(0, 0): "a", (1, 0): "b"}) == {(0, 0): "a", (1, 0): "b"}


def test_blocks_of_cpus_are_told_apart_by_what_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def config(device: str) -> Any:
        return SimpleNamespace(device_config=SimpleNamespace(device_type=device))

    assert compat.block_layout(config("cuda")) == compat.block_layout(SimpleNamespace()) == "strides"
    found = set()
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx, raising=False)
        found.add(compat.block_layout(config("cpu")))
    assert len(found) == 2
