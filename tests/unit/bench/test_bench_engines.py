"""Command lines, environments and models of engines, without starting any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpush.bench.connectors import CONNECTORS
from kvpush.bench.engines import EngineOptions, engine_spec
from kvpush.bench.shapes import SHAPES, Decoder, model_config, vocabulary_of, write_synthetic_model
from kvpush.launch.engine import EngineSpec, command, environment

pytestmark = pytest.mark.unit

CUDA = EngineOptions(Path("/m"), "cuda", dummy_weights=True, max_model_len=20_000, gpus=(2, 5))
CPU = EngineOptions(Path("/m"), "cpu", dummy_weights=False, max_model_len=8_192, kvpush_config={"integrity": "always"})


def value_of(spec: EngineSpec, option: str) -> str:
    argv = command(spec)
    return argv[argv.index(option) + 1]


def transfer_config(spec: EngineSpec) -> dict[str, Any]:
    return json.loads(value_of(spec, "--kv-transfer-config"))


@pytest.mark.parametrize(
    ("name", "kv_connector"), [("kvpush-push", "KVPushConnector"), ("kvpush-pull", "KVPullConnector")]
)
def test_our_connectors_get_their_side_channel_and_our_options(name: str, kv_connector: str) -> None:
    spec = engine_spec(CONNECTORS[name], CPU, "decode")
    config = transfer_config(spec)
    assert (config["kv_connector"], config["kv_role"]) == (kv_connector, "kv_consumer")
    assert config["kv_connector_extra_config"] == {
        "side_channel_host": "127.0.0.1",
        "side_channel_port": spec.side_channel_port,
        "integrity": "always",
    }


@pytest.mark.parametrize(("name", "kv_connector"), [("vllm-push", "NixlPushConnector"), ("vllm-pull", "NixlConnector")])
def test_vllms_connectors_take_their_side_channel_from_the_environment(name: str, kv_connector: str) -> None:
    for options, more in ((CUDA, {}), (CPU, {"kv_buffer_device": "cpu"})):
        spec = engine_spec(CONNECTORS[name], options, "prefill")
        assert transfer_config(spec) == {"kv_connector": kv_connector, "kv_role": "kv_producer", **more}
        env = environment(spec, {})
        assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(spec.side_channel_port)


def test_cuda_engines_get_the_measured_set_up() -> None:
    for role, gpu in (("prefill", "2"), ("decode", "5")):
        spec = engine_spec(CONNECTORS["vllm-push"], CUDA, role)  # type: ignore[arg-type]
        assert value_of(spec, "--load-format") == "dummy"
        assert value_of(spec, "--attention-backend") == "FLASH_ATTN"
        assert value_of(spec, "--max-num-batched-tokens") == "8192"
        assert value_of(spec, "--max-model-len") == "20000"
        assert value_of(spec, "--gpu-memory-utilization") == "0.8"
        assert json.loads(value_of(spec, "--compilation-config"))["cudagraph_mode"] == "FULL_DECODE_ONLY"
        assert "--no-enable-prefix-caching" in command(spec)
        env = environment(spec, {})
        assert (env["CUDA_VISIBLE_DEVICES"], env["UCX_TLS"]) == (gpu, "all")
        assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_cpu_engines_run_eager_with_real_weights() -> None:
    spec = engine_spec(CONNECTORS["vllm-push"], CPU, "prefill")
    assert "--enforce-eager" in command(spec)
    assert "--load-format" not in command(spec)
    assert int(value_of(spec, "--block-size")) % 32 == 0
    assert "CUDA_VISIBLE_DEVICES" not in environment(spec, {})


def test_both_engines_of_a_pair_have_ports_of_their_own() -> None:
    specs = [engine_spec(CONNECTORS["kvpush-push"], CPU, role) for role in ("prefill", "decode")]  # type: ignore[arg-type]
    assert len({port for spec in specs for port in (spec.port, spec.side_channel_port)}) == 4


def test_the_shapes_are_those_of_qwen3() -> None:
    """KV bytes a token: 28 layers * 8 heads * 2 * 128 * 2, and with 36 layers 2.25 MiB a block of 16."""
    small, large = SHAPES["0.6b"].decoder, SHAPES["8b"].decoder
    assert small is not None
    assert large is not None
    assert small.kv_bytes_per_token() == 114_688
    assert large.kv_bytes_per_token() * 16 == 36 * 65_536
    assert model_config(large)["hidden_size"] == 4096


def test_a_synthetic_model_has_config_and_tokenizer(tmp_path: Path) -> None:
    decoder = Decoder(2, 64, 128, 2, 1, vocabulary=100)
    model = write_synthetic_model(decoder, tmp_path / "model")
    assert vocabulary_of(model) == 100
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 100
    assert tokenizer["model"]["vocab"]["t99"] == 99


@pytest.mark.parametrize("content", [None, "{", "{}", '{"vocab_size": "many"}', '{"vocab_size": 3}', "[]"])
def test_a_directory_without_a_model_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        vocabulary_of(tmp_path)
