"""Several prompts in one completion request: one transfer each, one answer in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvpush.router import sse
from kvpush.router.errors import ApiError, MirroredError, status_in
from kvpush.router.legs import Body


def split(body: Mapping[str, Any], limit: int) -> list[Body] | None:
    """One body a prompt, or None if the request holds a single one (a flat list of integers is one prompt).

    Raises ApiError (400) if there are more than `limit`.
    """
    prompt = body.get("prompt")
    if (
        not isinstance(prompt, msgspec.Raw)
        or bytes(prompt)[:1] != b"["
        or bytes(prompt)[1:].lstrip()[:1] not in (b'"', b"[")
    ):
        return None
    prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if len(prompts) == 1:
        return None
    if len(prompts) > limit:
        message = f"prompt holds {len(prompts)} prompts, this router takes at most {limit} in one request"
        raise ApiError(400, message, outcome="rejected", param="prompt")
    return [{**body, "prompt": each} for each in prompts]


def merge_answers(answers: Sequence[bytes], choices_per_prompt: int, answer_id: str) -> bytes:
    """One completion of several: choices in the order of the prompts, usage summed. Raises ApiError (502)."""
    contents = [_decoded(answer) for answer in answers]
    merged = {**contents[0], "id": answer_id}
    merged["choices"] = [
        {**choice, "index": prompt * choices_per_prompt + choice["index"]}
        for prompt, content in enumerate(contents)
        for choice in sorted(content["choices"], key=lambda choice: choice["index"])
    ]
    usages = [content["usage"] for content in contents if content.get("usage") is not None]
    if usages:
        merged["usage"] = add_usage(usages)
    if "metrics" in merged:
        merged["metrics"] = None  # they describe one prompt
    return msgspec.json.encode(merged)


class StreamMerger:
    """Rewrites the events of several streams into those of one."""

    def __init__(self, choices_per_prompt: int, answer_id: str) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._id = answer_id
        self._created: Any = None
        self._usages: list[Mapping[str, Any]] = []
        self._usage_event: Mapping[str, Any] | None = None

    def event(self, prompt: int, payload: bytes) -> bytes | None:
        """The event to send for one that a prompt's stream has sent, None if there is nothing to send yet.

        Raises ApiError for an error event, and for what is no event of a completion.
        """
        if payload == sse.DONE:
            return None
        content = _decoded(payload)
        if self._created is None:
            self._created = content.get("created")
        if not content["choices"] and content.get("usage") is not None:
            self._usages.append(content["usage"])
            self._usage_event = content
            return None
        first = prompt * self._choices_per_prompt
        choices = [{**choice, "index": first + choice["index"]} for choice in content["choices"]]
        return sse.event(msgspec.json.encode(self._common({**content, "choices": choices})))

    def end(self) -> bytes:
        """The last events: the usage of all prompts if any stream told its own, and the end mark."""
        last = b""
        if self._usage_event is not None:
            usage = {**self._usage_event, "usage": add_usage(self._usages)}
            last = sse.event(msgspec.json.encode(self._common(usage)))
        return last + sse.event(sse.DONE)

    def _common(self, content: dict[str, Any]) -> dict[str, Any]:
        content["id"] = self._id
        if self._created is not None:
            content["created"] = self._created
        return content


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums usage objects field by field, nested ones too; other values are taken from the first that has any."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        if values and all(isinstance(value, dict) for value in values):
            total[key] = add_usage(values)
        elif values and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            total[key] = sum(values)
        else:
            total[key] = values[0] if values else None
    return total


def _decoded(answer: bytes) -> dict[str, Any]:
    """A completion or a chunk of one, with its choices checked. Raises ApiError."""
    try:
        content = msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        raise ApiError(502, f"The decode engine's answer is not JSON: {error}", outcome="decode_failed") from None
    if isinstance(content, dict) and isinstance(content.get("error"), dict):
        raise MirroredError(status_in(answer), answer, "application/json", outcome="decode_failed", retryable=False)
    choices = content.get("choices") if isinstance(content, dict) else None
    if not isinstance(choices, list) or not all(
        isinstance(choice, dict) and isinstance(choice.get("index"), int) for choice in choices
    ):
        raise ApiError(502, "The decode engine's answer is no completion", outcome="decode_failed")
    return content  # type: ignore[no-any-return]
