"""Who an engine is to its peers, and what makes two prompts the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_cases import request

from kvpush.vllm import compat
from kvpush.vllm.identity import UnsupportedModel, check_cache, engine_info, fingerprint, identity_of

pytestmark = pytest.mark.unit


class FullAttentionSpec:
    block_size, dtype, num_kv_heads, head_size = 16, "bfloat16", 8, 128
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads = 1


class MambaSpec:
    block_size = 16


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.1+cpu")


def _cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs or (FullAttentionSpec(),)]
    return SimpleNamespace(kv_cache_groups=groups)


def _config(**changes: Any) -> Any:
    model = {
        "model": "/weights/org/model/",
        "revision": None,
        "quantization": None,
        "dtype": "bfloat16",
        "hf_config": {"hidden_size": 8, "_name_or_path": "/weights/org/model"},
        **changes,
    }
    hf_config = model.pop("hf_config")
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, hf_config=SimpleNamespace(to_dict=lambda: hf_config)),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
    )


def test_one_model_in_two_places_is_the_same_model() -> None:
    here = _config()
    there = _config(
        model="/elsewhere/model",
        hf_config={"hidden_size": 8, "_name_or_path": "hub/model", "transformers_version": "5", "torch_dtype": "x"},
    )
    assert fingerprint(here, _cache()) == fingerprint(there, _cache())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": "other"}, "model"),
        ({"revision": "main"}, "model revision"),
        ({"hf_config": {"hidden_size": 16}}, "model config"),
        ({"hf_config": {"hidden_size": 8, "rope_scaling": {"factor": 2.0}}}, "model config"),
        ({"quantization": "fp8"}, "quantization"),
        ({"dtype": "float16"}, "activation dtype"),
        ({"cache_dtype": "fp8"}, "kv cache dtype"),
    ],
)
def test_whatever_changes_the_kv_is_in_the_fingerprint(changes: dict[str, Any], key: str) -> None:
    one, other = fingerprint(_config(), _cache()), fingerprint(_config(**changes), _cache())
    assert {name for name in one if one[name] != other[name]} == {key}


def test_whatever_cuts_the_cache_in_another_way_is_in_the_fingerprint() -> None:
    one = fingerprint(_config(), _cache())
    for name, value, key in (
        ("block_size", 32, "block size"),
        ("num_kv_heads", 4, "kv heads"),
        ("head_size", 64, "head size"),
        ("dtype", "float8", "kv cache dtype"),
    ):
        spec = FullAttentionSpec()
        setattr(spec, name, value)
        other = fingerprint(_config(), _cache(spec))
        assert {entry for entry in one if one[entry] != other[entry]} == {key}
    assert fingerprint(_config(), _cache(MLAAttentionSpec()))["kv cache kind"] == "MLAAttentionSpec"


def test_the_version_counts_without_its_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = fingerprint(_config(), _cache())
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.4")
    assert fingerprint(_config(), _cache()) == one
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.33.0")
    assert fingerprint(_config(), _cache()) != one


def test_an_engine_says_who_it_is() -> None:
    info = engine_info(_config(), _cache(), "life")
    assert (info.engine_id, info.incarnation, info.mode, info.tp_size, info.pp_size) == ("e", "life", "push", 2, 1)


def test_one_full_attention_group_is_transferred() -> None:
    check_cache(_cache(FullAttentionSpec()))
    check_cache(_cache(MLAAttentionSpec()))


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        ((FullAttentionSpec(), MambaSpec()), "this one has 2.*FullAttentionSpec, MambaSpec"),
        ((MambaSpec(),), "full attention only"),
        ((), "this one has 0"),
    ],
)
def test_other_caches_are_refused_by_name(specs: tuple[Any, ...], complaint: str) -> None:
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    with pytest.raises(UnsupportedModel, match=complaint):
        check_cache(groups)


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_windows_are_refused(field: str) -> None:
    spec = FullAttentionSpec()
    setattr(spec, field, 1024)
    with pytest.raises(UnsupportedModel, match="full attention only"):
        check_cache(_cache(spec))


def test_prompts_are_the_same_if_their_kv_is() -> None:
    one = identity_of(request("a"))
    assert identity_of(request("b")) == one
    lora = SimpleNamespace(lora_name="adapter", lora_int_id=1, lora_path="hub/adapter")
    picture = SimpleNamespace(identifier="hash")
    for changed in (
        request("a", 11),
        request("a", token=6),
        request("a", lora_request=lora),
        request("a", cache_salt="tenant"),
        request("a", mm_features=(picture,)),
        request("a", mm_features=(picture, picture)),
    ):
        assert identity_of(changed) != one
