"""Two models of one shape are told apart by their weights, wherever and however those are stored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scheduler_cases import request

from kvpush.transfer.sidechannel import UNKNOWN
from kvpush.vllm import compat, weights
from kvpush.vllm.identity import identity_of
from kvpush.vllm.weights import adapter_weights, model_weights, weights_digest

pytestmark = pytest.mark.unit

Tensors = dict[str, np.ndarray]


def save(path: Path, tensors: Tensors) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + tensor.nbytes],
        }
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensors(seed: int = 0, count: int = 6) -> Tensors:
    random = np.random.default_rng(seed)
    return {f"layers.{i}.weight": random.normal(size=(17, 31)).astype(np.float32) for i in range(count)}


def config(model: Path | str, **load: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, seed=7),
        load_config=SimpleNamespace(**{"load_format": "auto", "download_dir": None, **load}),
    )


def test_the_same_tensors_are_the_same_however_they_are_spread_over_files(tmp_path: Path) -> None:
    whole = tensors()
    names = list(whole)
    one = weights_digest([save(tmp_path / "model.safetensors", whole)])
    parts = [
        save(tmp_path / "b.safetensors", {name: whole[name] for name in reversed(names[2:])}),
        save(tmp_path / "a.safetensors", {name: whole[name] for name in names[:2]}),
    ]
    assert weights_digest(parts) == one
    assert len(one) == 32


def test_other_weights_of_the_same_shape_are_others(tmp_path: Path) -> None:
    found = {weights_digest([save(tmp_path / "model.safetensors", tensors(seed))]) for seed in range(8)}
    assert len(found) == 8


@pytest.mark.parametrize("place", [0, (17 * 31) // 2 + 3, 17 * 31 - 1])
def test_samples_are_taken_all_over_a_tensor(tmp_path: Path, place: int) -> None:
    whole = tensors()
    one = weights_digest([save(tmp_path / "model.safetensors", whole)])
    whole["layers.3.weight"].reshape(-1)[place] += 1
    assert weights_digest([save(tmp_path / "model.safetensors", whole)]) != one


def test_names_shapes_and_kinds_count(tmp_path: Path) -> None:
    whole = tensors()
    one = weights_digest([save(tmp_path / "m", whole)])
    renamed = {name.replace("3", "7"): tensor for name, tensor in whole.items()}
    reshaped = {name: tensor.reshape(31, 17) for name, tensor in whole.items()}
    assert len({one, *(weights_digest([save(tmp_path / "m", other)]) for other in (renamed, reshaped))}) == 3


def test_of_more_tensors_than_are_looked_at_the_same_ones_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_TENSORS", 3)
    whole = tensors(count=40)
    one = weights_digest([save(tmp_path / "m", whole)])
    assert weights_digest([save(tmp_path / "m", dict(reversed(whole.items())))]) == one
    assert weights_digest([save(tmp_path / "m", tensors(seed=1, count=40))]) != one


def test_a_model_is_found_by_its_path_and_the_index_says_which_files_count(tmp_path: Path) -> None:
    whole = tensors()
    first = save(tmp_path / "model-00001.safetensors", whole)
    one = model_weights(config(tmp_path))
    assert one == weights_digest([first])
    save(tmp_path / "consolidated.safetensors", tensors(seed=5))  # another form of the same model
    assert model_weights(config(tmp_path)) == one
    save(tmp_path / "left-over.safetensors", {"other": np.ones((2, 2), np.float32)})
    assert model_weights(config(tmp_path)) != one
    index = {"weight_map": dict.fromkeys(whole, "model-00001.safetensors")}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    assert model_weights(config(tmp_path)) == one


def test_what_cannot_be_told_is_unknown_and_never_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert model_weights(config(tmp_path)) == UNKNOWN
    assert model_weights(config("no-such/model", download_dir=str(tmp_path))) == UNKNOWN
    assert model_weights(SimpleNamespace(model_config=SimpleNamespace(model="gone", revision=None))) == UNKNOWN
    broken = (b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]", b'\x0f\0\0\0\0\0\0\0{"a": {"b": 1}}', b"\x05\0\0\0\0\0\0\0{")
    with caplog.at_level(logging.WARNING):
        for content in broken:
            (tmp_path / "model.safetensors").write_bytes(content)
            assert model_weights(config(tmp_path)) == UNKNOWN
    assert caplog.text.count("model.safetensors is no safetensors file") == len(broken)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / weights.INDEX).write_text('{"weight_map": {"a": "missing.safetensors"}}')
    assert model_weights(config(tmp_path)) == UNKNOWN


@pytest.mark.parametrize("load_format", ["dummy", "LoadFormat.DUMMY"])
def test_random_weights_are_those_of_their_seed(tmp_path: Path, load_format: str) -> None:
    save(tmp_path / "model.safetensors", tensors())
    assert model_weights(config(tmp_path, load_format=load_format)) == "dummy, seed 7"


# Adapters


def _lora(path: Path | str, number: int, name: str = "adapter") -> Any:
    lora = SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))
    return identity_of(request("a", lora_request=lora))


def test_adapters_of_one_name_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("here", "there", "other")]
    for place, seed in zip(places, (0, 0, 1), strict=True):
        place.mkdir()
        save(place / "adapter_model.safetensors", tensors(seed, 2))
    here, there, other = (_lora(place, number) for number, place in enumerate(places, 1))
    assert here == there
    assert here != other
    assert _lora(places[0], 1, "another name") != here
    assert _lora("hub/adapter", 9) == _lora("hub/adapter", 10)  # not on this machine: the name alone


def test_an_adapter_that_was_loaded_anew_is_looked_at_anew(tmp_path: Path) -> None:
    save(tmp_path / "adapter_model.safetensors", tensors(0, 2))
    first = _lora(tmp_path, 101)
    save(tmp_path / "adapter_model.safetensors", tensors(1, 2))
    assert _lora(tmp_path, 101) == first
    assert _lora(tmp_path, 102) != first


def test_an_adapter_that_cannot_be_read_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    assert adapter_weights(201, str(tmp_path)) == ""


# Attention backends


def test_backends_are_those_of_the_layers_in_the_cache() -> None:
    def layer(name: str) -> Any:
        backend = SimpleNamespace(get_name=lambda: name)
        return SimpleNamespace(get_attn_backend=lambda: backend)

    context = {"a": layer("FLASH_ATTN"), "b": layer("FLASH_ATTN"), "c": layer("FLASHINFER"), "moe": object()}
    engine = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert compat.attention_backends(engine, ["a", "b"]) == "FLASH_ATTN"
    assert compat.attention_backends(engine, ["c", "a", "moe", "gone"]) == "FLASHINFER, FLASH_ATTN"
    assert compat.attention_backends(engine, ["moe"]) == UNKNOWN
    assert compat.attention_backends(SimpleNamespace(), ["a"]) == UNKNOWN
