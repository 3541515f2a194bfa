"""The questions of a soak and their right answers, which one engine alone has given before anything broke."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

LONGEST_TOKENS = 1500
ANSWER_TOKENS = 12
# Several prompts begin with the same tokens, so that caches at both sides hold a part of them.
FAMILIES = 4
FAMILY_SHARE = 0.5
FAMILY_PREFIX_TOKENS = (40, 150, 420, 900)
# Nats between the best and the second best token. In float32 the order in which sums are formed moves logits by a
# thousandth of this; where two tokens are closer, "the right text" would be a matter of luck.
LEAST_MARGIN = 2e-3
TOKEN_IDS = (100, 40_000)


class ReferenceError(Exception):
    """One engine alone does not answer; the text says how."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt as token ids, and the greedy text of one engine alone."""

    prompt: tuple[int, ...]
    text: str


def draw(seed: int, number: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to LONGEST_TOKENS tokens, short ones more often; equal for equal seeds."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(*TOKEN_IDS) for _ in range(count))

    prefixes = [tokens(FAMILY_PREFIX_TOKENS[family % len(FAMILY_PREFIX_TOKENS)]) for family in range(FAMILIES)]
    prompts = []
    for _ in range(number):
        if rng.random() < FAMILY_SHARE:
            prefix = rng.choice(prefixes)
            prompts.append(prefix + tokens(rng.randint(1, LONGEST_TOKENS - len(prefix)) // 3 + 1))
        else:
            prompts.append(tokens(round(LONGEST_TOKENS ** rng.random())))
    return prompts


def body(prompt: Sequence[int], model: str, **fields: Any) -> dict[str, Any]:
    """A greedy completion of exactly ANSWER_TOKENS tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


async def ask_one_engine(
    session: aiohttp.ClientSession, url: str, model: str, prompts: Sequence[Sequence[int]]
) -> list[Reference]:
    """Asks the engine itself, one prompt at a time, so that nothing is batched and nothing is handed over.

    Prompts whose answer hangs on a near tie are left out. Raises ReferenceError.
    """
    found = []
    for number, prompt in enumerate(prompts):
        # A salt of its own keeps a prompt's blocks from being taken for those of the soak.
        asked = body(prompt, model, logprobs=2, cache_salt=f"reference-{number}")
        async with session.post(f"{url}/v1/completions", json=asked) as response:
            answer = await response.read()
            if response.status != 200:
                raise ReferenceError(f"{url} answered {response.status}: {answer[:300].decode(errors='replace')}")
        choice = msgspec.json.decode(answer)["choices"][0]
        if margin(choice["logprobs"]["top_logprobs"]) >= LEAST_MARGIN:
            found.append(Reference(tuple(prompt), choice["text"]))
    return found


def margin(top_logprobs: Sequence[Mapping[str, float]]) -> float:
    """The smallest distance between the best and the second best token of all steps, 0 if one is not known."""
    distances = []
    for step in top_logprobs:
        best = sorted(step.values(), reverse=True)
        distances.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return min(distances, default=0.0)
