"""Draws a world from a seed: its engines, its requests, what clients and routers do to them, and what breaks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from kvpush.sim.engine import Engine, EngineSpec
from kvpush.sim.request import BLOCK, Request, num_blocks
from kvpush.sim.step import Rules
from kvpush.sim.timing import TIMING
from kvpush.sim.worker import PORT
from kvpush.sim.world import MakeHalf, World
from kvpush.transport.faults import Faults

MAX_PROMPT = 40

STALL_S = TIMING.announced_timeout_s + TIMING.write_timeout_s + 2 * TIMING.peer_timeout_s
"""In a world without faults something happens for a request more often than this: no bound is longer."""

QUARANTINE_S = 3.0
"""How long lost writes may keep memory in quarantine before their writers are killed."""

MAX_S = 200.0
"""Seconds after which a world that never rests is stuck."""


def draw_faults(random: Random) -> Faults:
    """How messages and writes fare between all engines of a world."""
    calm = random.random() < 0.35
    return Faults(
        message_delay_s=(2e-5, random.choice([1e-4, 1e-3, 2e-2])),
        write_delay_s=(5e-5, random.choice([2e-4, 5e-3, 0.05, 0.4])),
        notice_s=(1e-3, random.choice([5e-3, 0.2])),
        pieces=random.choice([1, 3]),
        drop=0.0 if calm else random.choice([0.0, 0.03, 0.15]),
        duplicate=0.0 if calm else random.choice([0.0, 0.1]),
        fail_post=0.0 if calm else random.choice([0.0, 0.03]),
        fail_write=0.0 if calm else random.choice([0.0, 0.04]),
        fail_write_late=0.0 if calm else random.choice([0.0, 0.0, 0.05]),
    )


def draw_spec(random: Random, role: str, mood: str, staged: bool) -> EngineSpec:
    """A gentle engine has room for everybody; a crowded one has room for one prompt."""
    overlap = random.random() < 0.5
    least = num_blocks(MAX_PROMPT) + 2
    sizes = {"gentle": [1000], "crowded": [least, least + 4], "wild": [least, 2 * least, 60]}
    return EngineSpec(
        num_blocks=1 + random.choice(sizes[mood]),
        rules=Rules(
            chunk=random.choice([5, 8, 16, 64]),
            budget=random.choice([16, 64]),
            max_running=random.choice([2, 8]),
            policy=random.choice(["fail", "recompute"]),
            overlap=overlap,
            v2=random.random() < 0.5,
            full_isl=mood != "crowded" and random.random() < 0.4,
            defer_free=overlap and role != "producer",
            drop_stale=role != "consumer" and random.random() < 0.5,
            failed_recving=random.random() < 0.7,
        ),
        prefix_caching=random.random() < 0.7,
        recompute_below_tokens=random.choice([BLOCK, BLOCK, 1, 3 * BLOCK]),
        gpu=random.random() < 0.6,
        stream=random.random() < 0.8,
        integrity=random.random() < 0.15,
        forward_s=(1e-3 if mood == "crowded" else 2e-4, random.choice([2e-3, 1e-2])),
        pause_s=random.choice([1e-4, 1e-3, 2e-2] if mood != "crowded" else [1e-3, 2e-2]),
        # Who takes only staged transfers must not be sent to by who cannot stage.
        path=random.choice(["staged", "auto"] if staged else ["direct", "auto", "peer"]),
        quarantine_max_blocks=random.choice([0, 1, 6]),
    )


class Driver:
    """One world's life. `run` raises what breaks a rule."""

    def __init__(self, seed: int, make_half: MakeHalf, *, traced: bool = False) -> None:
        self.random = random = Random(seed)
        self.seed = seed
        self.mood = random.choice(["gentle", "crowded", "wild", "wild"])
        self.gentle = self.mood == "gentle"
        faults = Faults() if self.gentle else draw_faults(random)
        self.world = World(seed, faults, make_half, one_machine=random.random() < 0.7, traced=traced)
        self.num_transfers = random.choice([1, 2, 4, 8, 16])
        num_p, num_d = random.choice([1, 1, 2, 3]), random.choice([1, 1, 2, 3])
        self.producers = [f"P{i}" for i in range(num_p)]
        self.consumers = [f"D{i}" for i in range(num_d)]
        roles = [*((host, "producer") for host in self.producers), *((host, "consumer") for host in self.consumers)]
        if random.random() < 0.15:  # an engine that does both
            roles.append(("B0", "both"))
            self.producers.append("B0")
            self.consumers.append("B0")
        staged = random.random() < 0.5
        self.specs = {host: draw_spec(random, role, self.mood, staged) for host, role in roles}
        if self.gentle and self.num_transfers <= 2 and random.random() < 0.5:  # prompts that take longer than bounds
            self.specs = {host: replace(spec, forward_s=(0.05, 0.3)) for host, spec in self.specs.items()}
        if random.random() < 0.15:
            self.specs = {host: replace(spec, tp_size=2) for host, spec in self.specs.items()}
        for host, spec in self.specs.items():
            self.world.start(host, spec)
        self.base = [[random.randrange(1000) for _ in range(MAX_PROMPT)] for _ in range(2)]
        self.span_s = random.choice([0.05, 0.05, 0.5, 2.0])
        self.num_requests = self.next_name = 0
        self.calm = False
        self.transfers: dict[str, tuple[str, str]] = {}  # their hosts
        self.moments: list[float] = []

    def run(self) -> None:
        random, world = self.random, self.world
        for _ in range(self.num_transfers):
            self._plan_transfer(random.random() * self.span_s)
        for _ in range(random.choice([0, 0, 1, 3])):
            self._plan_local(random.random() * self.span_s)
        for _ in range(0 if self.gentle else random.choice([0, 0, 0, 1, 2, 4])):
            # Most faults hit while something is going on.
            near_s = random.choice(self.moments) + random.random() * random.choice([0.005, 0.05, 0.5])
            self._plan_fault(random.choice([near_s, near_s, random.random() * (self.span_s + 0.5)]))
        world.run_until(self.span_s + random.choice([0.1, 1.0, 2.0]))
        self._end_faults()
        world.run_to_rest(STALL_S, QUARANTINE_S)
        for engine in world.suspects():
            # Nobody can say what becomes of a lost write while its writer lives; after that, everything is free again.
            world.kill(engine)
            self._restart(engine.host)
        world.run_to_rest(STALL_S, MAX_S)
        world.referee.check_end()

    # Requests

    def _at(self, at_s: float, action: Any) -> None:
        self.world.fabric.after(max(at_s, 0.0), action)

    def _prompt(self) -> tuple[int, ...]:
        """Prompts share beginnings, so that caches are hit."""
        random = self.random
        length = random.choice([1, BLOCK, random.randint(1, MAX_PROMPT), random.randint(1, MAX_PROMPT), MAX_PROMPT])
        shared = random.choice([0, length, random.randint(0, length)])
        return (*random.choice(self.base)[:shared], *(random.randrange(1000) for _ in range(length - shared)))

    def _request(
        self, name: str, prompt: tuple[int, ...], params: dict[str, Any] | None, outputs: int, salt: str | None
    ) -> Request:
        self.num_requests += 1
        return Request(f"{name}-{self.num_requests}", prompt, params, outputs, salt)

    def _plan_transfer(self, at_s: float) -> None:
        """A dispatch to one P and one D, mostly as it should be, and now and then in every way that it should not be.

        In a gentle world some are certain to arrive: nothing is wrong with them, and nobody leaves.
        """
        random = self.random
        sure = self.gentle and random.random() < 0.5
        p = random.choice(self.producers)
        d = random.choice([host for host in self.consumers if host != p or not sure])
        if self.transfers and not sure and random.random() < 0.12:
            name = random.choice(list(self.transfers))
            if random.random() < 0.7:
                p, d = self.transfers[name]
        else:
            name = f"t{self.next_name}"
            self.next_name += 1
            if sure:
                self.world.referee.sure.add(name)
            else:
                self.transfers[name] = (p, d)
        prompt, salt = self._prompt(), random.choice([None, None, "tenant"])
        consumers = random.choice([1, 1, 1, 1, 2, 3])
        produce = {"do_remote_decode": True, "transfer_id": name, "kvpush_consumers": consumers}
        consume = {
            "do_remote_prefill": True, "transfer_id": name, "kvpush_consumers": consumers, "remote_host": p,
            "remote_port": PORT,
        }  # fmt: skip
        if random.random() < 0.05:
            consume["remote_engine_id"] = f"engine-{p}.0" if sure else random.choice([f"engine-{p}.0", "elsewhere"])
        lag_s = random.choice([0.0, 0.001, 0.02, 0.3, 0.6] if sure else [0.0, 0.001, 0.02, 0.3, 1.5])
        p_at, d_at = (at_s, at_s + lag_s) if random.random() < 0.5 else (at_s + lag_s, at_s)
        self.moments += [p_at, d_at]
        if sure or random.random() < 0.9:
            outputs = random.choice([1, 1, 1, 3])
            leg = self._request(name + "p", prompt, produce, outputs, salt)
            self._send(p_at, p, leg, leaves=not sure)
        if random.random() < 0.03:
            leg = self._request(name + "p", prompt, produce, 1, salt)
            self._send(p_at + 0.01 * random.random() + 1e-6, p, leg, leaves=not sure)
        theirs, their_salt = prompt, salt
        if not sure and random.random() < 0.05:
            theirs, their_salt = random.choice([(prompt, "other"), (self._prompt(), salt)])
        for _ in range(consumers + (0 if sure else random.choice([0] * 12 + [1, -1]))):
            host = d if sure or random.random() < 0.92 else random.choice(self.consumers)
            leg = self._request(name + "d", theirs, consume, random.randint(1, 6), their_salt)
            if sure or random.random() < 0.92:
                self._send(d_at + random.choice([0.0, 1e-3 * random.random()]), host, leg, leaves=not sure)
            if random.random() < 0.1:
                # vLLM makes phantoms of requests that have ended, so they come behind those.
                self._phantom(d_at + random.random() * 0.3 + (2e-3 if sure else 0.0), host, name, consume)

    def _plan_local(self, at_s: float) -> None:
        """An ordinary request: it only takes room."""
        host = self.random.choice(list(self.specs))
        self._send(at_s, host, self._request("l", self._prompt(), None, self.random.randint(1, 6), None))

    def _send(self, at_s: float, host: str, request: Request, *, leaves: bool = True) -> None:
        """A request is sent to a host, and perhaps its client leaves."""
        sent: list[Engine] = []

        def arrive() -> None:
            engine = self.world.engines[host]
            if not engine.killed:
                sent.append(engine)
                self.world.note(engine.agent, f"gets {request.request_id}: {request.num_prompt_tokens} tokens")
                engine.add(request)

        def leave() -> None:
            if sent and not sent[0].killed:
                self.world.note(sent[0].agent, f"{request.request_id} is aborted")
                sent[0].abort(request)

        self._at(at_s, arrive)
        if leaves and self.random.random() < 0.2:
            self._at(at_s + self.random.choice([0.0, 0.002, 0.02, 0.3, 1.0]) * self.random.random(), leave)

    def _phantom(self, at_s: float, host: str, name: str, params: dict[str, Any]) -> None:
        """What vLLM makes of an error, a 400 or a disconnect: a prompt of one token that is aborted at once."""
        phantom = self._request(name + "x", (0,), params, 1, None)
        late_s = self.random.choice([0.0, 0.0, 0.001])

        def arrive() -> None:
            engine = self.world.engines[host]
            if not engine.killed:
                engine.add(phantom)
                if late_s:
                    self.world.fabric.after(late_s, partial(engine.abort, phantom), engine.agent)
                else:
                    engine.abort(phantom)

        self._at(at_s, arrive)

    # Faults

    def _plan_fault(self, at_s: float) -> None:
        random = self.random
        kinds = ["stop", "stop at a post", "kill", "cut", "lose", "lose", "post", "write", "late", "reset", "slow"]
        kind = random.choice(kinds)
        host = random.choice(list(self.specs))
        other = random.choice(list(self.specs))
        for_s = random.choice([0.01, 0.3, 1.5, 3.0]) * (0.5 + random.random())
        noticed = random.random() < 0.5
        self._at(at_s, lambda: self._fault(kind, host, other, for_s, noticed))

    def _fault(self, kind: str, host: str, other: str, for_s: float, noticed: bool) -> None:
        world, engine, there = self.world, self.world.engines[host], self.world.engines[other]
        if not engine.running or self.calm:
            return
        worker = self.random.choice(engine.workers)  # of faults that a single process can have
        match kind:
            case "stop":
                for stopped in engine.workers if noticed else [worker]:
                    world.stop(stopped)
                    self._at(for_s, partial(world.resume, stopped))
            case "stop at a post":
                worker.transport.freeze_at_post = True
                self._at(for_s, lambda: world.resume(worker))
            case "kill":
                world.kill(engine)
                if noticed or for_s < 0.5:
                    self._at(for_s, lambda: self._restart(host))
            case "cut" if there is not engine and not there.killed:
                world.cut(engine, there, noticed=noticed)
                self._at(for_s, lambda: world.heal(engine, there))
            case "lose" if there is not engine:
                world.note(worker.agent, f"has lost its connection to {there.agent}", about_process=True)
                worker.transport.lose(there.workers[worker.tp_rank].agent)
            case "post":
                worker.transport.fail_next_post()
            case "write" | "late":
                worker.transport.fail_next_write(after=self.random.random(), may_land=kind == "late")
            case "reset":
                engine.reset_prefix_cache()
            case "slow":
                slow = replace(
                    world.fabric.faults(worker.agent, ""), write_delay_s=self.random.choice([(0.2, 1.2), (4.0, 6.0)])
                )
                world.fabric.set_faults(slow, writer=worker.agent)

    def _restart(self, host: str) -> None:
        if self.world.refuses(host):
            self.world.start(host, self.specs[host])

    def _end_faults(self) -> None:
        """From now on nothing breaks: whatever waits for something must come to an end."""
        world = self.world
        world.note("world", "has no faults any more", about_process=True)
        self.calm = True
        world.fabric.set_faults(Faults())
        for worker in world.agents.values():
            world.fabric.set_faults(None, writer=worker.agent)
            worker.transport.calm()
            world.resume(worker)
        world.heal_all()
        for host in self.specs:
            self._restart(host)
