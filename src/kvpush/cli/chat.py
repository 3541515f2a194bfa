"""A streaming client for `/v1/chat/completions`, as much of it as the demo needs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TRANSFER_HEADER = "x-kvpush-transfer-id"
# Between two pieces of an answer. A dead engine is noticed earlier, by its process.
SILENCE_TIMEOUT_S = 60.0


class ChatError(Exception):
    """The server refused, failed or fell silent; one line."""


@dataclass(slots=True)
class Answer:
    """ttft_s: from sending to the first text. transfer_id: None unless a router answered.

    tokens, margins: for each token its text, and by how many nats the best stood before the second best; empty unless
    they were asked for.
    """

    text: str = ""
    prompt_tokens: int = 0
    ttft_s: float | None = None
    transfer_id: str | None = None
    tokens: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    on_text: Callable[[str], None] = lambda _: None,
    *,
    margins: bool = False,
) -> Answer:
    """Sends one chat request and reads its stream. Raises ChatError."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    if margins:
        body |= {"logprobs": True, "top_logprobs": 2}
    answer = Answer()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_TIMEOUT_S)
    began_s = time.monotonic()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, timeout=timeout) as response:
            if response.status != 200:
                raise ChatError(f"{url} answered {response.status}: {_message(await response.text())}")
            answer.transfer_id = response.headers.get(TRANSFER_HEADER)
            finished = False
            async for line in response.content:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    finished = True
                elif data and line.startswith(b"data:"):
                    text = _take(json.loads(data), answer)
                    if text and answer.ttft_s is None:
                        answer.ttft_s = time.monotonic() - began_s
                    if text:
                        on_text(text)
            if not finished:
                raise ChatError(f"{url} broke off its answer")
    except TimeoutError:
        raise ChatError(f"{url} was silent for {SILENCE_TIMEOUT_S:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ChatError(f"{url}: {' '.join(str(error).split()) or type(error).__name__}") from None
    return answer


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Adds one event of the stream; returns its text."""
    if "error" in event:
        raise ChatError(_message(json.dumps(event)))
    if event.get("usage"):
        answer.prompt_tokens = int(event["usage"]["prompt_tokens"])
    text = ""
    for choice in event.get("choices", []):
        text += choice.get("delta", {}).get("content") or ""
        for token in (choice.get("logprobs") or {}).get("content") or []:
            best = sorted((each["logprob"] for each in token["top_logprobs"]), reverse=True)
            answer.tokens.append(token["token"])
            answer.margins.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    answer.text += text
    return text


def _message(body: str) -> str:
    """The message in an OpenAI error body, or the body itself; one line, cut."""
    try:
        error = json.loads(body)["error"]
        body = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(body.split())[:300] or "no message"
