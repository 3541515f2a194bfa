"""Clients that ask without a pause, and judge every answer: right, an error, or one of the things that must not be."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvpush.bench.raw import SoakRequest
from kvpush.bench.soak.prompts import Reference, body

DATA, DONE = b"data: ", b"[DONE]"
STREAM_SHARE = 0.5
SAMPLES_SHARE = 0.08
MOST_SAMPLES = 3
# A client that was refused does not come back in the same moment.
PAUSE_AFTER_ERROR_S = 0.3
# The router gives up at its own limit; a client that has heard nothing a little later never will.
BOUND_MARGIN_S = 5.0

GOOD = ("right", "error", "aborted")
"""What a request may come to. All other outcomes break the promise."""


@dataclass(slots=True)
class Answer:
    """What has come so far. texts: of each choice. finished: choices that said why they ended. ended: it is whole."""

    status: int = 0
    texts: list[str] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    error: str = ""
    ended: bool = False


class Traffic:
    """Keeps `concurrency` requests in flight. Everything runs in one event loop.

    url: the router's. bound_s: what the router allows a request. counts: outcome -> requests; errors: why -> requests.
    bad: everything that must not be.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        references: Sequence[Reference],
        seed: int,
        bound_s: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.bad: list[SoakRequest] = []
        self.longest_s = 0.0
        self._session = session
        self._url = url
        self._model = model
        self._references = references
        self._rng = random.Random(seed)
        self._bound_s = bound_s
        self._began_s = time.monotonic()
        self._clients: set[asyncio.Task[Any]] = set()
        self._in_flight: dict[int, asyncio.Task[Any]] = {}
        self._number = 0
        self._stopping = False

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def start(self, concurrency: int) -> None:
        self._clients |= {asyncio.create_task(self._client()) for _ in range(concurrency)}

    def burst(self, number: int) -> None:
        """So many more at once, each of which asks one question."""
        self._clients |= {asyncio.create_task(self._one()) for _ in range(number)}

    def abort(self, number: int) -> int:
        """So many clients leave in the middle of their request; returns how many there were."""
        chosen = self._rng.sample(sorted(self._in_flight), min(number, len(self._in_flight)))
        for one in chosen:
            self._in_flight[one].cancel()
        return len(chosen)

    async def stop(self) -> None:
        """Asks nothing more, and returns when every request has ended."""
        self._stopping = True
        while self._clients:
            done, self._clients = await asyncio.wait(self._clients)
            for task in done:
                task.result()

    async def _client(self) -> None:
        while not self._stopping:
            if await self._one() == "error":
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async def _one(self) -> str:
        reference = self._rng.choice(self._references)
        fields: dict[str, Any] = {"stream": self._rng.random() < STREAM_SHARE}
        if self._rng.random() < SAMPLES_SHARE:
            # vLLM takes n > 1 only with sampling; among one candidate that is greedy all the same.
            fields |= {"n": self._rng.randint(2, MOST_SAMPLES), "temperature": 1.0, "top_k": 1}
        self._number += 1
        number, began_s, answer = self._number, time.monotonic(), Answer()
        task = asyncio.ensure_future(self._ask(reference, fields, answer))
        self._in_flight[number] = task
        await asyncio.wait({task}, timeout=self._bound_s + BOUND_MARGIN_S)
        stuck = not task.done()
        if stuck:
            task.cancel()
            await asyncio.wait({task})
        del self._in_flight[number]
        took_s = time.monotonic() - began_s
        outcome = (
            "stuck" if stuck else "aborted" if task.cancelled() else self._judge(reference, answer, fields, took_s)
        )
        if not task.cancelled() and task.exception() is not None:
            raise task.exception() or AssertionError
        self.counts[outcome] += 1
        self.longest_s = max(self.longest_s, took_s if outcome != "aborted" else 0.0)
        if outcome == "error":
            self.errors[answer.error] += 1
        if outcome not in GOOD:
            self.bad.append(
                SoakRequest(
                    at_s=round(began_s - self._began_s, 3),
                    took_s=round(took_s, 3),
                    outcome=outcome,
                    prompt_tokens=len(reference.prompt),
                    fields=fields,
                    expected=reference.text,
                    texts=answer.texts,
                    detail=answer.error,
                )
            )
        return outcome

    def _judge(self, reference: Reference, answer: Answer, fields: dict[str, Any], took_s: float) -> str:
        return judge(reference, answer, fields.get("n", 1), took_s >= self._bound_s)

    async def _ask(self, reference: Reference, fields: dict[str, Any], answer: Answer) -> None:
        """Fills in the answer as it comes; an error becomes part of it."""
        asked = body(reference.prompt, self._model, **fields)
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=asked) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.error = f"{response.status}: {message_of(await response.read())}"
                elif fields["stream"]:
                    await self._stream(response, answer)
                else:
                    content = msgspec.json.decode(await response.read())
                    choices = sorted(content["choices"], key=lambda choice: choice["index"])
                    answer.texts = [choice["text"] for choice in choices]
                    answer.reasons = [choice["finish_reason"] for choice in choices]
                    answer.ended = True
        except (aiohttp.ClientError, OSError) as error:
            answer.error = type(error).__name__

    @staticmethod
    async def _stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
        async for line in response.content:
            if not line.startswith(DATA):
                continue
            payload = line[len(DATA) :].strip()
            if payload == DONE:
                answer.ended = True
                return
            content = msgspec.json.decode(payload)
            if content.get("error") is not None:
                answer.error = f"in the stream: {message_of(payload)}"
                return
            for choice in content["choices"]:
                index = choice["index"]
                answer.texts += [""] * (index + 1 - len(answer.texts))
                answer.reasons += [None] * (index + 1 - len(answer.reasons))
                answer.texts[index] += choice["text"]
                answer.reasons[index] = choice.get("finish_reason") or answer.reasons[index]


def judge(reference: Reference, answer: Answer, choices: int, late: bool) -> str:
    """What an answer has come to.

    right: every choice has the text of one engine alone. error: the client was told so, and nothing that came before
    is wrong. wrong: another text, or a text cut short as if it were whole. stuck: nothing but the router's own limit
    has ended it.
    """
    if any(not reference.text.startswith(text) for text in answer.texts):
        return "wrong"
    if answer.error:
        return "stuck" if late or answer.status == 504 else "error"
    whole = answer.ended and answer.texts == [reference.text] * choices
    return "right" if whole and answer.reasons == ["length"] * choices else "wrong"


def message_of(answer: bytes, limit: int = 120) -> str:
    """The message of an error answer, without what differs from one to the next."""
    try:
        content = msgspec.json.decode(answer)
        error = content.get("error", content) if isinstance(content, dict) else {}
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except msgspec.DecodeError:
        text = answer.decode(errors="replace")
    return text[:limit].split(" (incident")[0]
