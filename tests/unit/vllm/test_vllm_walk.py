"""Random lives of prefill and decode engines: the connector between a fake vLLM and real transfer cores.

The fake scheduler asserts what vLLM asserts, the fake runner checks all KV that it decodes from, the fabric checks into
whose blocks bytes land. Here everything happens to them; in the end nothing may be left.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_engine import TIMING, World
from fake_scheduler import BLOCK, Request, Status, next_token

from kvpush.transport.memory import Faults

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("no_side_channel")]


class Walk:
    """calm: nothing fails by itself, and nobody makes a mistake; only aborts, phantoms and full pools remain."""

    def __init__(self, seed: int, shape: str, *, calm: bool = False) -> None:
        self.calm = calm
        self.rng = rng = random.Random(f"{seed} {shape}")
        faults = (
            Faults()
            if calm
            else Faults(
                write_delay_s=(50e-6, rng.choice([2e-4, 5e-3, 0.05])),
                fail_post=rng.choice([0.0, 0.03]),
                fail_write=rng.choice([0.0, 0.03]),
                drop=rng.choice([0.0, 0.02]),
            )
        )
        self.world = World(rng, seed, faults)
        common: dict[str, Any] = {
            "shape": shape,
            "tp_size": rng.choice([1, 1, 2]),
            "integrity": False,
            "kv_delivery": shape != "v2-0.26" and rng.random() < 0.5,
        }
        self.policy = rng.choice(["fail", "recompute"])
        for host in ("P", "D"):
            self.world.start(
                host,
                num_blocks=rng.choice([30, 60] if calm else [14, 24, 60]),
                overlap=rng.random() < 0.5,
                prefix_caching=rng.random() < 0.7,
                policy=self.policy,
                chunk=rng.choice([3, 8, 32]),
                **common,
            )
        self.prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 6 * BLOCK))] for _ in range(30 if calm else 3)]
        self.prompts += [self.prompts[0] + [rng.randrange(50) for _ in range(rng.randint(1, 9))]]
        self.live: list[tuple[str, Request]] = []
        self.all: list[Request] = []
        self.transfers = 0
        self.names = 0

    def act(self) -> None:
        rng = self.rng
        action = rng.random()
        if action < 0.2:
            self.dispatch()
        elif action < 0.25:
            self.abort()
        elif action < 0.27 and self.transfers and not self.calm:
            self.phantom(f"t{rng.randrange(self.transfers)}", rng.choice([1, 3]))
        elif action < 0.29:
            self.add(rng.choice("PD"), rng.choice(self.prompts), rng.choice([None, {}, {"do_remote_decode": 1}]), 3)
        elif action < 0.30:
            self.world.engines[rng.choice("PD")].scheduler.reset_prefix_cache()
        for host in rng.sample(["P", "D"], rng.randint(1, 2)):
            self.world.engines[host].step()
        self.world.advance(rng.choice([1e-4, 1e-3, 1e-3, 0.02]))

    def add(self, host: str, prompt: list[int], params: dict[str, Any] | None, max_tokens: int) -> Request:
        self.names += 1
        request = self.world.engines[host].add(f"{host}-{self.names}", list(prompt), params, max_tokens)
        self.live.append((host, request))
        self.all.append(request)
        return request

    def dispatch(self) -> None:
        """The legs of one transfer, in any order, with steps in between; now and then one is missing or too many."""
        rng = self.rng
        transfer = f"t{self.transfers}"
        chance = 0.0 if self.calm else rng.random()
        if self.transfers and 0.0 < chance < 0.07:
            transfer = f"t{rng.randrange(self.transfers)}"  # used before, and perhaps still in use
        else:
            self.transfers += 1
        consumers = rng.choice([1, 1, 1, 3])
        prompt = rng.choice(self.prompts)
        legs = ["P", *["D"] * consumers]
        if 0.0 < chance < 0.17:
            legs.remove(rng.choice(legs))
        if chance > 0.95:
            legs.append(rng.choice(legs))
        rng.shuffle(legs)
        for leg in legs:
            theirs = rng.choice(self.prompts) if rng.random() < 0.04 and not self.calm else prompt
            if leg == "P":
                params = {"do_remote_decode": True, "transfer_id": transfer, "kvpush_consumers": consumers}
                self.add("P", theirs, params, rng.choice([1, 1, 4]))
            else:
                self.add("D", theirs, self.params(transfer, consumers), rng.choice([1, 5, 9]))
            if rng.random() < 0.3:
                for host in "PD":
                    self.world.engines[host].step()
                self.world.advance(1e-3)

    def params(self, transfer: str, consumers: int) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_host": "P",
            "remote_port": 1000,
            "kvpush_consumers": consumers,
        }

    def abort(self) -> None:
        self.live = [(host, request) for host, request in self.live if not request.finished]
        if not self.live:
            return
        host, request = self.rng.choice(self.live)
        self.world.engines[host].abort(request)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and self.rng.random() < 0.7:
            self.phantom(params["transfer_id"], params["kvpush_consumers"])

    def phantom(self, transfer: str, consumers: int) -> None:
        """What the API server submits after an error, a rejection or a disconnect; mostly it is aborted at once."""
        request = self.add("D", [0], self.params(transfer, consumers), 1)
        if self.rng.random() < 0.2:
            self.world.engines["D"].step()
        self.world.engines["D"].abort(request)

    def finish(self) -> None:
        world = self.world
        world.fabric.set_faults(Faults())
        # Requests that wait for a full pool have their bounds one after the other.
        end_s = world.now_s + 20 * (TIMING.unclaimed_timeout_s + TIMING.rendezvous_timeout_s + TIMING.peer_timeout_s)
        while not all(engine.idle for engine in world.engines.values()):
            assert world.now_s < end_s, self.describe()
            for engine in world.engines.values():
                engine.step()
            world.advance(0.01)
        for engine in world.engines.values():
            blocks = engine.ranks[0].memory.shape[0]
            assert sorted(engine.scheduler.pool.free) == list(range(1, blocks)), engine.host
            for rank in engine.ranks:
                assert rank.core.counters.total("protocol_errors") == 0
                assert rank.transport.in_flight == 0
        for request in self.all:
            assert request.finished
            assert request.freed
            expected = list(request.prompt_token_ids)
            while len(expected) < len(request.tokens):
                expected.append(next_token(expected))
            assert request.tokens == expected

    def describe(self) -> str:
        lines = []
        for host, engine in self.world.engines.items():
            lines.append(f"{host}: {list(engine.scheduler.requests.values())}")
            for rank in engine.ranks:
                lines.append(f"  {rank.agent}: core idle {rank.core.idle}, {rank.worker._reports.__dict__}")
        return "\n".join(lines)


@pytest.mark.parametrize("shape", ["v1", "v2", "v2-0.26"])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_each_request_ends_once_and_right(seed: int, shape: str) -> None:
    walk = Walk(seed, shape)
    for _ in range(250):
        walk.act()
    walk.finish()
    assert any(request.status is Status.FINISHED_LENGTH_CAPPED for request in walk.all)


@pytest.mark.parametrize("shape", ["v1", "v2", "v2-0.26"])
@pytest.mark.parametrize("seed", range(6))
def test_if_nobody_makes_a_mistake_every_load_arrives(seed: int, shape: str) -> None:
    """But for those whose client or whose P leg was aborted, and those whose source blocks were taken while read."""
    walk = Walk(seed, shape, calm=True)
    for _ in range(250):
        walk.act()
    walk.finish()
    failed = {
        label
        for rank in walk.world.engines["D"].ranks
        for (name, label) in rank.core.counters._total
        if name == "loads_failed"
    }
    assert failed <= {"aborted", "poisoned", "stopped"}  # stopped: the end of an abort that has overtaken its reason
    loaded = [request for request in walk.all if request.loads]
    assert len(loaded) > 10
    assert sum(request.status is Status.FINISHED_LENGTH_CAPPED for request in loaded) > len(loaded) / 2
