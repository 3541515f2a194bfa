"""Who this engine is to its peers: what must be equal at both sides for KV to mean the same."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from kvpush.protocol.messages import VERSION
from kvpush.protocol.prompt import PromptIdentity, prompt_identity
from kvpush.transfer.sidechannel import EngineInfo, host_id
from kvpush.vllm import compat
from kvpush.vllm.weights import model_weights


class UnsupportedModel(ValueError):
    """The model's KV cache is of a kind that this version does not transfer."""


# Entries of a model's configuration that say where and how it was saved, not what it computes.
_INCIDENTAL = ("_name_or_path", "transformers_version", "architectures_version", "torch_dtype", "dtype")


def check_cache(kv_cache_config: Any) -> None:
    """Raises UnsupportedModel unless all layers stand in one group of full attention (MLA included)."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise UnsupportedModel(
            f"kvpush transfers models with one full-attention KV cache group; this one has {len(groups)} ({kinds})"
        )
    spec = groups[0].kv_cache_spec
    names = {cls.__name__ for cls in type(spec).__mro__}
    if (
        "FullAttentionSpec" not in names
        or getattr(spec, "sliding_window", None)
        or getattr(spec, "attention_chunk_size", None)
    ):
        raise UnsupportedModel(f"kvpush transfers full attention only; this model's KV cache is {spec}")


def check_engine(vllm_config: Any) -> None:
    """Raises UnsupportedModel for what vLLM can do and this version does not hand over rightly."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "data_parallel_size"):
        size = int(getattr(parallel, name, 1) or 1)
        if size > 1:
            raise UnsupportedModel(f"kvpush does not work with {name} {size} yet; leave it at 1")
    if getattr(model, "enable_sleep_mode", False):
        raise UnsupportedModel("kvpush does not work with sleep mode: waking up gives the KV cache other memory")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedModel("kvpush does not work with calculate_kv_scales: each engine would use scales of its own")


def fingerprint(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """Name -> value of everything that determines the KV of a prompt, and how its blocks are cut."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return {
        # Only the last part of the path: the same weights may lie elsewhere on another host.
        "model": os.path.basename(str(model.model).rstrip("/")),
        "model revision": str(model.revision),
        "model config": _digest(model.hf_config),
        "quantization": str(model.quantization),
        "activation dtype": str(model.dtype),
        "kv cache dtype": f"{cache.cache_dtype} {getattr(spec, 'dtype', '')}",
        "kv cache kind": type(spec).__name__,
        "kv heads": str(getattr(spec, "num_kv_heads", "")),
        "head size": str(getattr(spec, "head_size", "")),
        "layers": str(len(kv_cache_config.kv_cache_groups[0].layer_names)),
        "block size": str(spec.block_size),
        "block layout": compat.block_layout(vllm_config),
        "weights": model_weights(vllm_config),
        "draft model": _draft(vllm_config),
        "vllm": ".".join(str(part) for part in compat.major_minor(compat.vllm_version())),
    }


def rank_fingerprint(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """The part of it that only a worker knows, once its model is loaded."""
    layers = kv_cache_config.kv_cache_groups[0].layer_names
    # The inside of a block is the backend's own business, and whole blocks travel.
    return {"attention backend": compat.attention_backends(vllm_config, layers)}


def engine_info(vllm_config: Any, kv_cache_config: Any, incarnation: str) -> EngineInfo:
    """What the side channel says of this engine; equal in its scheduler and its workers but for the incarnation."""
    parallel = vllm_config.parallel_config
    return EngineInfo(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        incarnation=incarnation,
        mode="push",
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        protocol_version=VERSION,
        host_id=host_id(),
        fingerprint=fingerprint(vllm_config, kv_cache_config),
    )


def identity_of(request: Any) -> PromptIdentity:
    """The prompt identity of a vLLM request that has token ids.

    Raises ValueError for an empty prompt, OverflowError or TypeError for token ids that are none.
    """
    return prompt_identity(
        request.prompt_token_ids,
        lora=compat.lora_identity(request),
        multimodal=compat.multimodal_hashes(request),
        cache_salt=getattr(request, "cache_salt", None),
    )


def _draft(vllm_config: Any) -> str:
    """A drafter of its own has KV in the same group; both sides must have the same one."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return "none"
    model = os.path.basename(str(getattr(speculative, "model", "")).rstrip("/"))
    return f"{getattr(speculative, 'method', '')} {model}"


def _digest(hf_config: Any) -> str:
    content = {key: value for key, value in hf_config.to_dict().items() if key not in _INCIDENTAL}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
