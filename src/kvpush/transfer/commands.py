"""What an engine tells its transfer threads. Plain data: it travels from the scheduler process to the workers.

A block table is one tuple of block ids per KV cache group; a peer is the (host, port) of an engine's side channel.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.protocol.prompt import PromptIdentity

BlockTable = tuple[tuple[int, ...], ...]
SideChannel = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Offer:
    """P: this request's KV is to be handed over to `consumers` D requests.

    decodes: P makes more than one token of it, and so goes on writing into the prompt's last block.
    """

    request_id: RequestId
    transfer_id: TransferId
    prompt: PromptIdentity
    consumers: int
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """P: after this step's forward the KV of prompt tokens [0, ready) exists.

    blocks: what the table gains, or the whole table if `replace` (first step, or resumed after a preemption).
    """

    request_id: RequestId
    ready: int
    blocks: BlockTable
    replace: bool


@dataclass(frozen=True, slots=True)
class Preempt:
    """P: the request's blocks were taken back; whoever runs the step has asked the fence before."""

    request_id: RequestId
    poisoned: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """P: the engine is done with the request and holds its blocks until `Sent`. aborted: its KV is not complete."""

    request_id: RequestId
    aborted: str = ""


@dataclass(frozen=True, slots=True)
class Announce:
    """D: a request waits for blocks."""

    transfer_id: TransferId
    prompt: PromptIdentity
    peer: SideChannel


@dataclass(frozen=True, slots=True)
class Withdraw:
    """D: an announced request is gone without having got blocks; nothing is owed to P."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Fetch:
    """D: the request has blocks; P shall write tokens [first_token, prompt.num_tokens) into them.

    engine_id: whom the client, or the router, expects at `peer`; None asserts nothing.
    """

    request_id: RequestId
    key: SendKey
    consumers: int
    prompt: PromptIdentity
    first_token: int
    blocks: BlockTable
    peer: SideChannel
    engine_id: str | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """D: the request's load fails without P having been asked (a duplicate transfer id).

    first_token, blocks: as in `Fetch`; the engine must be told which of its blocks hold nothing.
    """

    request_id: RequestId
    reason: str
    first_token: int
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class Cancel:
    """D: the request's client has left."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Release:
    """D: a consumer, or every one that has not registered, needs nothing from P."""

    key: SendKey
    peer: SideChannel
    all_consumers: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """P: the engine computes nothing, because the head of its queue finds no blocks. Said with every such step.

    over: it computes again. With async scheduling a step may schedule nothing although the one before it still runs.
    """

    over: bool = False


Command = Stalled | Offer | Progress | Preempt | Finish | Announce | Withdraw | Fetch | Refuse | Cancel | Release
