"""Random lives of several transfer cores: whatever happens, nothing is wrong, stuck or left behind.

The world checks each byte that lands against who owns the block, and each received prompt byte for byte.
"""

from __future__ import annotations

import random

import pytest
from transfer_world import BLOCK, TIMING, Faults, Gate, Request, World, identity

from kvpush.protocol.ids import SendKey, TransferId
from kvpush.transfer import commands

pytestmark = pytest.mark.unit

ENDS = ("Sent", "Received", "Released")


class Walk:
    """One P or two, one D or two, and up to some forty transfers."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        faults = Faults(
            message_delay_s=(20e-6, rng.choice([1e-4, 5e-3])),
            write_delay_s=(50e-6, rng.choice([2e-4, 0.05, 0.3])),
            drop=rng.choice([0.0, 0.0, 0.05]),
            duplicate=rng.choice([0.0, 0.1]),
            fail_post=rng.choice([0.0, 0.02]),
            fail_write=rng.choice([0.0, 0.02]),
            pieces=rng.choice([1, 4]),
        )
        self.producers = ["P", "Q"][: rng.choice([1, 2])]
        self.consumers = ["D", "E"][: rng.choice([1, 2])]
        options = {"integrity": rng.random() < 0.3, "stream": rng.random() < 0.8, "num_blocks": 200}
        self.options = options
        self.world = World(*self.producers, *self.consumers, seed=seed, faults=faults, **options)
        self.prefilling: list[tuple[str, Request, Gate | None]] = []
        self.loading: list[tuple[str, Request]] = []
        self.lives: dict[str, int] = {}
        self.stopped: list[tuple[str, float]] = []
        self.kills = 0
        self.next_transfer = 0

    def step(self) -> None:
        rng, world = self.rng, self.world
        action = rng.random()
        if action < 0.25:
            self.dispatch()
        elif action < 0.65 and self.prefilling:
            self.prefill()
        elif action < 0.72 and self.prefilling:
            self.preempt()
        elif action < 0.76 and self.loading:
            host, request = rng.choice(self.loading)
            if self.up(host) and not request.ended:
                world.cancel(host, request)
        elif action < 0.79 and self.prefilling:
            self.abort()
        elif action < 0.82 and not self.stopped and self.kills < 3:
            self.break_something()
        for agent, until_s in list(self.stopped):
            if world.now_s >= until_s:
                self.stopped.remove((agent, until_s))
                if world.fabric.state(agent) == "stopped":
                    world.fabric.resume(agent)
        world.run(rng.choice([0.0005, 0.002, 0.02]))

    def up(self, host: str) -> bool:
        return self.world[host].running

    def dispatch(self) -> None:
        rng, world = self.rng, self.world
        p, d = rng.choice(self.producers), rng.choice(self.consumers)
        name, self.next_transfer = f"t{self.next_transfer}", self.next_transfer + 1
        num_tokens = rng.randint(1, 5 * BLOCK)
        consumers = rng.choice([1, 1, 1, 2])
        prompt = rng.choice(["p", "q", "r"])
        legs = ["P", *("D" for _ in range(consumers))]
        if rng.random() < 0.1:
            legs.remove(rng.choice(legs))  # the router died, or a leg was rejected
        rng.shuffle(legs)
        for i, leg in enumerate(legs):
            host = p if leg == "P" else d
            if not self.up(host) or len(world[host].free) < 20:
                continue
            if leg == "P":
                request = world.offer(p, name, num_tokens, consumers=consumers, prompt=prompt)
                self.prefilling.append((p, request, None))
            else:
                consumer = legs[:i].count("D")
                first = BLOCK * rng.randint(0, (num_tokens - 1) // BLOCK)
                if rng.random() < 0.1:
                    world[d].tell(commands.Release(SendKey(TransferId(name), consumer), (p, 1000)))
                    continue
                if rng.random() < 0.2:
                    world[d].tell(commands.Announce(TransferId(name), identity(prompt, num_tokens), (p, 1000)))
                theirs = "another prompt" if rng.random() < 0.05 else prompt
                fetched = world.fetch(
                    d, name, num_tokens, peer=p, consumer=consumer, consumers=consumers, first_token=first,
                    prompt=theirs,
                )  # fmt: skip
                self.loading.append((d, fetched))
            world.run(rng.choice([0.0, 0.001, 0.01]))

    def pick(self) -> tuple[str, Request, Gate | None] | None:
        entry = self.rng.choice(self.prefilling)
        if self.world[entry[0]].requests.get(entry[1].request_id) is not entry[1]:
            self.prefilling.remove(entry)  # of a life that is over
            return None
        return entry if self.up(entry[0]) else None

    def open_gate(self, host: str, request: Request, gate: Gate | None) -> None:
        if gate is not None and not gate.passed:
            self.world[host].compute(request, 0, request.ready)
            gate.passed = True

    def prefill(self) -> None:
        entry = self.pick()
        if entry is None:
            return
        host, request, gate = entry
        self.prefilling.remove(entry)
        self.open_gate(host, request, gate)
        if request.ready < request.num_tokens and len(self.world[host].free) > 10:
            upto = self.rng.randint(request.ready + 1, request.num_tokens)
            later = Gate() if self.rng.random() < 0.3 else None
            if later is None:
                self.world.prefill(host, request, upto, replace=request.ready == 0)
            else:
                self.world.prefill(host, request, upto, later, replace=request.ready == 0)
            self.prefilling.append((host, request, later))
        elif request.ready == request.num_tokens:
            self.world.finish(host, request)
        else:
            self.prefilling.append((host, request, None))

    def preempt(self) -> None:
        entry = self.pick()
        if entry is None:
            return
        host, request, gate = entry
        self.prefilling.remove(entry)
        self.open_gate(host, request, gate)
        self.world.preempt(host, request)
        self.prefilling.append((host, request, None))

    def abort(self) -> None:
        entry = self.pick()
        if entry is None:
            return
        host, request, gate = entry
        self.prefilling.remove(entry)
        self.open_gate(host, request, gate)
        self.world.finish(host, request, aborted="aborted")

    def break_something(self) -> None:
        rng, world = self.rng, self.world
        host = rng.choice([*self.producers, *self.consumers])
        if not self.up(host):
            return
        agent = world[host].agent
        match rng.choice(["stop", "kill", "cut"]):
            case "stop":
                world.fabric.stop(agent)
                self.stopped.append((agent, world.now_s + rng.uniform(0.1, 6)))
            case "kill":
                self.kills += 1
                world.fabric.kill(agent)
                world.run(rng.choice([0.0, 0.1, 3]), step_s=0.01)
                world.start(host, **self.options)  # type: ignore[arg-type]
            case "cut":
                other = world[rng.choice([*self.producers, *self.consumers])].agent
                if other != agent:
                    world.fabric.cut(agent, other, noticed_by_writers=rng.random() < 0.5)
                    world.run(rng.choice([0.05, 1, 4]), step_s=0.01)
                    if rng.random() < 0.3:
                        # What it had sent outlives it, and lands when the link is whole again.
                        self.kills += 1
                        world.fabric.kill(agent, lingers=True)
                        world.run(rng.choice([0.1, 3]), step_s=0.01)
                        world.start(host, **self.options)  # type: ignore[arg-type]
                    world.fabric.heal(agent, other)

    def finish(self) -> None:
        """Lets every request end, and everything that has a bound reach it."""
        world = self.world
        for agent, _ in self.stopped:
            if world.fabric.state(agent) == "stopped":
                world.fabric.resume(agent)
        world.fabric.set_faults(Faults())
        for _ in range(200):
            if not self.prefilling:
                break
            self.prefill()
            world.run(0.002)
        assert self.prefilling == []

        def ended() -> bool:
            return all(
                request.ended and request.ended[-1] in ENDS
                for engine in world.engines.values()
                for request in engine.requests.values()
            ) and all(engine.core.idle for engine in world.engines.values())

        bound_s = 2 * sum((TIMING.rendezvous_timeout_s, TIMING.unclaimed_timeout_s, TIMING.peer_timeout_s))
        world.until(ended, bound_s, step_s=0.01)
        world.run(0.2, step_s=0.01)  # a late message may open something once more; levels are as of the last tick
        world.until(ended, bound_s, step_s=0.01)
        world.check_idle()
        for engine in world.engines.values():
            for request in engine.requests.values():
                if request.blocks:
                    engine.give_back(request)
            assert sorted(engine.free) == list(range(1, 200))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_nothing_is_wrong_stuck_or_left_behind(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(150):
        walk.step()
    walk.finish()
