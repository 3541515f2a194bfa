"""One engine request, with the attributes that vLLM's has and a connector reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvpush.sim.content import Content, content_of

BLOCK = 4


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


_FINISHED = {Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_ABORTED, Status.FINISHED_ERROR}


@dataclass(eq=False, slots=True)
class Request:
    """computed: tokens that exist, those of steps in flight included. placeholders: outputs that steps in flight will
    bring; stale: steps that were in flight when it was preempted, dropped if `drop_stale`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    max_tokens: int
    cache_salt: str | None = None
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    outputs: int = 0
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0
    drop_stale: bool = False
    preemptions: int = 0
    last_step: int = 0
    loads: int = 0
    content: Content = field(init=False)
    lora_request: None = None
    mm_features: tuple[()] = ()

    def __post_init__(self) -> None:
        self.content = content_of(self.prompt_token_ids, self.cache_salt, self.max_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def known(self) -> int:
        """Tokens whose KV can be computed: the prompt, and outputs that exist or are on their way."""
        return len(self.prompt_token_ids) + self.outputs + self.placeholders

    @property
    def finished(self) -> bool:
        return self.status in _FINISHED

    @property
    def hands_over(self) -> bool:
        return bool(self.kv_transfer_params and self.kv_transfer_params.get("do_remote_decode"))

    def keys(self, num_tokens: int) -> list[int]:
        """Prefix cache keys of the whole blocks among the first `num_tokens`."""
        return self.content.chain[BLOCK - 1 : num_tokens : BLOCK]


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)
