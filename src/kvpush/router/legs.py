"""From a client's body to the bodies of the two legs. Pure: no I/O, and no body is ever changed in place.

Values are kept as the bytes that the client sent (`msgspec.Raw`): what a leg takes over is identical in both legs to
the byte, numbers and escapes included, and a long prompt is never decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvpush.router.errors import ApiError
from kvpush.router.identity import Identity

Body = dict[str, Any]

# Keys that shape only the output. Everything else stays on the prefill leg, because it may enter the prompt: tools and
# tool_choice do (a server option leaves tools out for tool_choice "none", and some renderers write the choice into the
# prompt), response_format does for some models, and unknown keys may. A forced tool choice cannot make the leg fail:
# vLLM ignores what it cannot parse of a cut-off answer.
# The leg makes one token with plain greedy sampling, so that nothing about the output slows it down.
OUTPUT_KEYS: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "early_stopping",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "top_k",
        "top_logprobs",
        "top_p",
        "use_beam_search",
        "watermarking",
    }
)
# Only plain completions: no chat template can see it there.
COMPLETION_OUTPUT_KEYS: Final = frozenset({"response_format", "max_completion_tokens"})
OUTPUT_PREFIX: Final = "guided_"

# What a prefill engine hands over to at most (`kvpush_consumers`); more than that is not worth a transfer.
MAX_CONSUMERS: Final = 1024

_FALSE: Final = frozenset({"", "0", "f", "false", "n", "no", "off"})


def parse_body(data: bytes) -> Body:
    """The top level of a JSON object, values undecoded. Raises ApiError (400) if it is anything else."""
    try:
        data.decode()  # undecoded values are not checked by the parser
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        message = f"The body is not a JSON object: {error}"
    raise ApiError(400, message, outcome="rejected")


def encode(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def value_of(body: Mapping[str, Any], key: str) -> Any:
    """The decoded value of a key; None if it is absent, NaN if it holds a number that no float can."""
    value = body.get(key)
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return math.nan


def drop_client_params(body: Body) -> tuple[Body, bool]:
    """Returns the body without transfer parameters that the client has put in, and whether there were any.

    They would let a client name another request's transfer, or make an engine connect to an address of its choice. vLLM
    reads them from `vllm_xargs` too when the request itself has none.
    """
    clean = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    dropped = len(clean) != len(body) and value_of(body, "kv_transfer_params") is not None
    extra = body.get("vllm_xargs")
    if isinstance(extra, msgspec.Raw) and bytes(extra)[:1] == b"{":
        arguments = msgspec.json.decode(extra, type=dict[str, msgspec.Raw])
        if arguments.pop("kv_transfer_params", None) is not None:
            clean["vllm_xargs"] = arguments
            dropped = True
    return clean, dropped


def consumer_count(body: Mapping[str, Any]) -> int | None:
    """How many engine requests the decode engine makes of one prompt, or None if `n` is nothing that it accepts."""
    n = value_of(body, "n")
    count = 1 if n is None else _integer(n)
    return count if count is not None and count >= 1 else None


def local_reason(body: Mapping[str, Any], *, chat: bool) -> str | None:
    """Why a request has to be prefilled on the decode engine itself, or None if its KV can be transferred.

    - `beam_search`: vLLM makes fresh engine requests for every step, without the transfer parameters.
    - `best_of`: how many engine requests it becomes differs between versions.
    - `prompt_logprobs`: they need the prompt computed where they are asked for (an echo with logprobs implies them).
    - `truncation`: a negative limit stands for a length that depends on max_tokens, which the prefill leg changes.
    - `prompt_embeds`: such prompts have no token ids to match by.
    - `n`: more samples than one prefill can be handed over to.
    - `malformed`: the decode engine will say best what is wrong.
    """
    count = consumer_count(body)
    if count is None:
        return "malformed"
    if count > MAX_CONSUMERS:
        return "n"
    if is_on(body, "use_beam_search"):
        return "beam_search"
    best_of = value_of(body, "best_of")
    if best_of is not None and _integer(best_of) != count:
        return "best_of"
    if value_of(body, "prompt_embeds") is not None:
        return "prompt_embeds"
    if value_of(body, "prompt_logprobs") is not None:
        return "prompt_logprobs"
    if is_on(body, "echo") and (chat or value_of(body, "logprobs") is not None):
        return "prompt_logprobs"
    truncate = value_of(body, "truncate_prompt_tokens")
    if truncate is not None:
        limit = _integer(truncate)
        if limit is None:
            return "malformed"
        if limit < 0:
            return "truncation"
    return None


def prefill_body(body: Mapping[str, Any], params: Mapping[str, Any], *, chat: bool) -> Body:
    """The body that makes an engine compute the same prompt and one token.

    ignore_eos, because vLLM's own connectors hand over only what ended by its length, and the one token may be the end.
    """
    dropped = OUTPUT_KEYS if chat else OUTPUT_KEYS | COMPLETION_OUTPUT_KEYS
    leg = {key: value for key, value in body.items() if key not in dropped and not key.startswith(OUTPUT_PREFIX)}
    leg.update(max_tokens=1, n=1, stream=False, temperature=0.0, ignore_eos=True, kv_transfer_params=params)
    if chat:
        # vLLM takes max_completion_tokens before max_tokens; older engines know only the latter.
        leg["max_completion_tokens"] = 1
    return leg


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> Body:
    """The client's body with the transfer parameters; without any, the engine does the prefill itself."""
    leg = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    if params is not None:
        leg["kv_transfer_params"] = params
    return leg


def prefill_params(mode: str, transfer_id: str, consumers: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "transfer_mode": mode,
        "kvpush_consumers": consumers,
        "remote_engine_id": None,
        "remote_host": None,
        "remote_port": None,
    }
    if mode == "pull":
        params["remote_block_ids"] = None
    return params


def push_decode_params(transfer_id: str, consumers: int, identity: Identity) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": identity.engine_id,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "transfer_mode": "push",
        "kvpush_consumers": consumers,
    }


def pull_decode_params(transfer_id: str, consumers: int, answered: Mapping[str, Any]) -> dict[str, Any]:
    """What the prefill engine has answered, and what identifies the transfer if it did not say so itself."""
    return {"transfer_id": transfer_id, "kvpush_consumers": consumers, **answered}


def _integer(value: Any) -> int | None:
    """Reads an integer as leniently as the engines do: 2, 2.0 and "2" are the same."""
    if isinstance(value, str):
        try:
            return int(value.strip())
        except ValueError:
            return None
    if isinstance(value, (bool, int)):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def is_on(body: Mapping[str, Any], key: str) -> bool:
    """Whether a flag is set. What is no flag counts as set: the cautious reading costs only a local prefill."""
    value = value_of(body, key)
    return value.strip().lower() not in _FALSE if isinstance(value, str) else bool(value)
