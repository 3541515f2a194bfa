"""What tells two sets of weights of one shape apart: a digest of samples of their tensors."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvpush.transfer.sidechannel import UNKNOWN

_log = logging.getLogger(__name__)

MAX_TENSORS = 1024
"""Tensors that are looked at; dense models up to 70B have fewer. Which of more, their names decide."""
SAMPLE_BYTES = 64
"""Read at the beginning, in the middle and at the end of each."""
MAX_HEADER_BYTES = 100 * 2**20
INDEX = "model.safetensors.index.json"


def model_weights(vllm_config: Any) -> str:
    """The digest of the engine's checkpoint; "unknown" where it is no directory of safetensors files on this machine.

    Only contents count, so it is the same on every host and however the tensors are spread over files; sizes and times
    of files would not be. It costs milliseconds, because it samples: training changes nearly every tensor.
    """
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    if str(getattr(load, "load_format", "")).rpartition(".")[2].lower() == "dummy":
        return f"dummy, seed {getattr(model, 'seed', None)}"
    try:
        directory = _directory(str(model.model), model.revision, getattr(load, "download_dir", None))
        return UNKNOWN if directory is None else weights_digest(_checkpoint(directory))
    except (OSError, ValueError) as error:
        _log.warning("kvpush: the weights of %s cannot be told from others of their shape: %s", model.model, error)
        return UNKNOWN


@lru_cache(maxsize=1024)
def adapter_weights(lora_int_id: int, path: str) -> str:  # noqa: ARG001
    """The digest of a LoRA adapter on this machine, "" if there is none at this path.

    lora_int_id: the engine's number for one life of the adapter; a new one is looked at again.
    """
    file = Path(path) / "adapter_model.safetensors"
    try:
        found = weights_digest([file]) if file.is_file() else UNKNOWN
        return "" if found == UNKNOWN else found
    except (OSError, ValueError) as error:
        _log.warning("kvpush: the adapter in %s is known by its name alone: %s", path, error)
        return ""


def weights_digest(files: list[Path]) -> str:
    """32 hex digits over names, kinds and samples of the tensors in safetensors files; "unknown" if there are none.

    Raises OSError, or ValueError naming the file for what is no such file.
    """
    tensors: dict[str, tuple[Path, int, Mapping[str, Any]]] = {}
    for path in files:
        start, header = _header(path)
        tensors |= {name: (path, start, entry) for name, entry in header.items()}
    if not tensors:
        return UNKNOWN
    digest = hashlib.blake2b(digest_size=16, person=b"kvpush-weights")
    chosen = sorted(tensors, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())[:MAX_TENSORS]
    opened: dict[Path, int] = {}
    try:
        for name in chosen:
            path, start, entry = tensors[name]
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY)
            first, end = entry["data_offsets"]
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            for offset in (first, (first + end) // 2, max(first, end - SAMPLE_BYTES)):
                digest.update(os.pread(opened[path], min(SAMPLE_BYTES, end - offset), start + offset))
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return digest.hexdigest()


def _header(path: Path) -> tuple[int, dict[str, Mapping[str, Any]]]:
    """(where the data begins, name -> dtype, shape, data_offsets) of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        try:
            header = json.loads(file.read(size))
            found = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for entry in found.values():
                first, end = entry["data_offsets"]
                if not 0 <= first <= end or not {"dtype", "shape"} <= entry.keys():
                    raise ValueError("offsets")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file: {error!r}") from None
    return 8 + size, found


def _directory(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where the checkpoint lies: a path as it is, or the place of a model's name in the local cache of the hub."""
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _checkpoint(directory: Path) -> list[Path]:
    """The files that make up the model: those that the index names, or all but a second form of the same weights."""
    index = directory / INDEX
    if index.is_file():
        named = json.loads(index.read_text())["weight_map"].values()
        return [directory / name for name in sorted(set(named))]
    files = sorted(directory.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith("consolidated")] or files
