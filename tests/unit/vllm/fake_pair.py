"""A prefill and a decode engine of `fake_engine`, and what a router would ask of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fake_engine import Engine, World
from fake_scheduler import Request, Status, next_token

from kvpush.transport.memory import Faults

DELIVERED = Status.FINISHED_LENGTH_CAPPED


class FakePair:
    """Options of both engines stand in `common`, those of one in `p` or `d`."""

    def __init__(
        self, *, seed: int = 0, faults: Faults | None = None, p: dict[str, Any] | None = None,
        d: dict[str, Any] | None = None, **common: Any,
    ) -> None:  # fmt: skip
        self.world = World(random.Random(seed), seed, faults)
        self.p = self.world.start("P", **{**common, **(p or {})})
        self.d = self.world.start("D", **{**common, **(d or {})})
        self.requests: list[Request] = []
        self.frozen: set[str] = set()

    @property
    def now_s(self) -> float:
        return self.world.now_s

    def prefill(self, transfer: str, prompt: list[int], consumers: int = 1, max_tokens: int = 1) -> Request:
        params = {"do_remote_decode": True, "transfer_id": transfer, "kvpush_consumers": consumers}
        return self._add(self.p, prompt, params, max_tokens)

    def load(self, transfer: str, prompt: list[int], consumers: int = 1, max_tokens: int = 3) -> Request:
        params = {
            "do_remote_prefill": True, "transfer_id": transfer, "remote_host": "P", "remote_port": 1000,
            "kvpush_consumers": consumers,
        }  # fmt: skip
        return self._add(self.d, prompt, params, max_tokens)

    def alone(self, engine: Engine, prompt: list[int], max_tokens: int = 3) -> Request:
        return self._add(engine, prompt, None, max_tokens)

    def both(self, transfer: str, prompt: list[int]) -> tuple[Request, Request]:
        return self.prefill(transfer, prompt), self.load(transfer, prompt)

    def run(self, duration_s: float, step_s: float = 0.002) -> None:
        end_s = self.now_s + duration_s
        self.until(lambda: self.now_s >= end_s, duration_s + 1, step_s)

    def until(self, met: Callable[[], bool], limit_s: float, step_s: float = 0.002) -> float:
        """Steps both engines, but those whose process is stopped or frozen by the test; returns how long it took."""
        start_s = self.now_s
        while not met():
            assert self.now_s - start_s <= limit_s, self.describe()
            for engine in self.world.engines.values():
                if engine.running and engine.host not in self.frozen:
                    engine.step()
            self.world.advance(step_s)
        return self.now_s - start_s

    def end(self, limit_s: float = 60.0, step_s: float = 0.01) -> None:
        """Everything ends: nothing is left in any table, every block is free, and every text is right."""
        engines = [self.p, self.d]
        self.until(lambda: all(engine.idle for engine in engines), limit_s, step_s)
        for engine in engines:
            blocks = engine.ranks[0].memory.shape[0]
            assert sorted(engine.scheduler.pool.free) == list(range(1, blocks)), engine.host
            for rank in engine.ranks:
                assert rank.core.counters.total("protocol_errors") == 0
                assert rank.core.quarantine.num_blocks == 0
                assert rank.transport.in_flight == 0
        for request in self.requests:
            assert request.freed
            assert request.tokens == self.text(request.prompt_token_ids, len(request.outputs))
            if request.status is DELIVERED:
                assert len(request.outputs) == request.max_tokens

    def count(self, engine: Engine, name: str, label: str = "") -> int:
        return sum(rank.core.counters.get(name, label) for rank in engine.ranks)

    @staticmethod
    def text(prompt: list[int], num_outputs: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_outputs):
            tokens.append(next_token(tokens))
        return tokens

    def describe(self) -> str:
        lines = [f"{self.now_s:.2f} s"]
        for engine in (self.p, self.d):
            lines.append(f"{engine.host}: idle {engine.idle}, {list(engine.scheduler.requests.values())}")
            lines += [f"  {rank.agent}: {dict(rank.core.counters._total)}" for rank in engine.ranks]
        return "\n".join(lines)

    def _add(self, engine: Engine, prompt: list[int], params: dict[str, Any] | None, max_tokens: int) -> Request:
        name = f"{engine.host}-{len(self.requests)}"
        request = engine.add(name, list(prompt), params, max_tokens)
        self.requests.append(request)
        return request


def prompt(num_tokens: int, which: int = 0) -> list[int]:
    """A prompt of its own for each `which`, from its first token on."""
    return [which * 1000 + place for place in range(num_tokens)]
