"""Removes one guard after another from a copy of the source and lets the simulator find out (docs/simulator.md).

Each mutation replaces a piece of text that occurs exactly once. A mutant that survives means that the simulator does
not see what the guard is for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Mutation:
    """In `path` below src/kvpush, `old` becomes `new`."""

    name: str
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """worlds: how many it took to find the mutant, None if it survived. rule: what it broke."""

    worlds: int | None
    rule: str


MUTATIONS = [
    # The fence at D
    Mutation(
        "release memory without waiting for quiet", "protocol/receive_table.py",
        "if not receive.fenced or receive.may_write:", "if not receive.fenced:",
    ),
    Mutation(
        "release memory when quiet stays away", "protocol/receive_table.py",
        "receive.step(ReceiveEvent.QUIET_TIMEOUT)\n",
        "receive.step(ReceiveEvent.QUIET_TIMEOUT)\n            receive.quiet |= set(receive.may_write)\n"
        "            return [*actions, *self.release_if_quiet(receive)]\n",
    ),
    Mutation(
        "release memory when the peer is lost", "protocol/consumer.py",
        'actions += self._receives.fail(receive, "peer_lost", now_s)',
        'receive.quiet |= set(receive.may_write)\n                actions += self._receives.fail(receive, "peer_lost", now_s)',
    ),
    Mutation(
        "take a broken connection for the writer's end", "transfer/consumer_side.py",
        "actions = self._consumer.on_disconnected(event.agent, now_s)",
        "actions = self._consumer.on_gone(event.agent, now_s)",
    ),
    Mutation(
        "forget who has got a registration", "protocol/consumer.py",
        "receive.admit(agent, address)\n", "receive.writers[agent] = address\n        receive.quiet.add(agent)\n",
    ),
    Mutation(
        "register although the request was given up", "protocol/consumer.py",
        "if not isinstance(message, Register):\n            return True\n", "return True\n",
    ),
    Mutation(
        "do not look at the attempt of a message", "protocol/consumer.py",
        "if message.attempt < current:\n            return []", "if False:\n            return []",
    ),
    Mutation(
        "cancel only once", "protocol/receive_table.py",
        "if now_s - receive.last_cancel_s >= interval_s:", "if False:",
    ),
    Mutation(
        "take no notice of a silent producer", "protocol/consumer.py",
        "return any(self._liveness.silent_s(address, now_s) > limit_s", "return any(False and limit_s",
    ),
    Mutation("never ping", "protocol/consumer.py", "return actions + self._ping(now_s)", "return actions"),
    # The fence at P
    Mutation(
        "commit while pieces are in flight", "protocol/send_table.py",
        "if send.pieces:\n            return []\n        if send.state", "if send.pieces and send.terminal:\n            return []\n        if send.state",
    ),
    Mutation(
        "say quiet while pieces are in flight", "protocol/send_table.py",
        "if event is not SendEvent.CANCEL or not send.pieces:", "if True:",
    ),
    Mutation("call a failure quiet", "protocol/send.py", "quiet=not self.pieces", "quiet=True"),
    Mutation(
        "give blocks back while they are read", "protocol/send_table.py",
        "if any(send.reads_blocks or not send.terminal for send", "if any(not send.terminal for send",
    ),
    Mutation(
        "post pieces of requests that are preempted", "transfer/fence.py",
        "if request_id in self._closed:", "if False:",
    ),
    Mutation(
        "do not own up to reads that go on after a preemption", "transfer/fence.py",
        "self._poisoned |= busy\n            return busy", "return set()",
    ),
    Mutation(
        "commit what was poisoned", "transfer/fence.py",
        "yield request_id in self._poisoned", "yield False",
    ),
    Mutation(
        "let poisoned sends go on", "protocol/producer.py",
        "if send.pieces or local.finished:\n                send.poisoned = True",
        "if local.finished:\n                send.poisoned = True",
    ),
    Mutation(
        "do not count a held piece as owed again", "protocol/producer.py",
        "            send.unpost(ended, now_s)\n", "            pass\n",
    ),
    Mutation(
        "call a lost write ended", "transfer/producer_side.py",
        "if landed.may_land:",
        "if False:",
    ),
    Mutation("take a failed write for landed", "transfer/producer_side.py", "if landed.error:", "if False:"),
    Mutation(
        "go on where the last attempt was", "protocol/send.py",
        "self.attempt = registration.attempt\n        self.posted = registration.first_token\n",
        "self.attempt = registration.attempt\n",
    ),
    # What is ready
    Mutation(
        "keep what was ready before a preemption", "protocol/producer.py",
        'is preempted while its blocks are read")\n        local.ready = 0', 'is preempted while its blocks are read")',
    ),
    Mutation(
        "believe forwards that were launched before a preemption", "transfer/sources.py",
        "self._tables.pop(request_id, None)\n        self._pending = deque(step for step in self._pending if step.request_id != request_id)",
        "self._tables.pop(request_id, None)",
    ),
    Mutation("do not wait for the forward", "transfer/sources.py", "self._pending[0].event.query()", "True"),
    Mutation(
        "post blocks that are not full", "protocol/send.py",
        "return self.local.ready // block_size * block_size", "return self.local.ready",
    ),
    Mutation(
        "tell nobody of preemptions", "vllm/producer_scheduler.py",
        "preempted.append(Preempt(RequestId(request_id)))", "pass",
    ),
    # Who meets whom
    Mutation(
        "do not compare prompts", "protocol/rendezvous.py",
        "if registration.prompt != self.prompt:", "if False:",
    ),
    Mutation("write from token 0", "protocol/send.py", "self.posted = self.registration.first_token\n", "self.posted = 0\n"),
    Mutation(
        "remember no ends", "protocol/tombstones.py",
        "stone = self.get(key, agent)\n        return", "stone = self.get(key, agent)\n        return False and",
    ),
    Mutation(
        "serve a consumer twice", "protocol/claims.py",
        "if claim.engine != address.engine or (key.pp_rank, key.tp_rank) in claim.ended:", "if False:",
    ),
    Mutation(
        "load under a transfer id that is taken", "vllm/consumer_scheduler.py",
        "duplicate = transfer.take_index(load) >= load.params.consumers", "duplicate = False",
    ),
    Mutation(
        "believe phantoms", "vllm/consumer_scheduler.py",
        "elif not has_siblings and transfer_id not in self._recent:", "else:",
    ),
    # Reports
    Mutation(
        "name a load's cached blocks as invalid", "transfer/reports.py",
        "command.blocks[0][first_block:]", "command.blocks[0]",
    ),
    Mutation(
        "forget to name invalid blocks", "transfer/reports.py",
        "self._invalid.update(blocks)", "pass",
    ),
    Mutation(
        "load again after a failure", "vllm/consumer_scheduler.py",
        "if load is None or load.stage is not _Stage.NEW:\n            return 0, False",
        "if load is None:\n            return 0, False",
    ),
    Mutation(
        "report received before the last commit", "protocol/receive_table.py",
        "receive.accepted.add(address)\n        if receive.state is ReceiveState.REGISTERED and receive.all_accepted:",
        "receive.accepted.add(address)\n        if False:",
    ),
    # Bounds
    Mutation("wait for ever for a request", "protocol/rendezvous.py", "if registration.received_s < before_s]", "if False]"),
    Mutation(
        "hold a request that nobody claims", "protocol/producer.py",
        "if now_s - local.waiting_since_s > bound_s:", "if False:",
    ),
    Mutation(
        "wait for ever for a write", "protocol/producer.py",
        "if now_s - oldest_s > self._timing.write_timeout_s:", "if False:",
    ),
    Mutation(
        "wait for ever for the scheduler of P", "protocol/producer.py",
        "late = now_s - send.waiting_since_s > self._timing.admission_timeout_s", "late = False",
    ),
]  # fmt: skip


def apply(mutation: Mutation, src: Path) -> None:
    """Raises ValueError if the text is not there exactly once."""
    path = src / "kvpush" / mutation.path
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.path}: the text of {mutation.name!r} is there {count} times")
    path.write_text(text.replace(mutation.old, mutation.new))


def hunt(mutation: Mutation, worlds: int, jobs: int, first: int) -> Verdict:
    """Runs worlds on the mutated source until one breaks a rule."""
    with tempfile.TemporaryDirectory(prefix="kvpush-mutant-") as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutation, src)
        command = [sys.executable, str(ROOT / "scripts" / "sim.py"), "--stop", "--worlds", str(worlds)]
        command += ["--jobs", str(jobs), "--first", str(first)]
        done = subprocess.run(
            command, env=os.environ | {"KVPUSH_SRC": str(src), "PYTHONPATH": str(src)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    found = re.search(r"^world (\d+): (.*)$", done.stdout, re.MULTILINE)
    if found:
        return Verdict(int(found[1]) - first + 1, found[2])
    if done.returncode:
        raise RuntimeError(f"the simulator failed on {mutation.name!r}: {done.stderr[-2000:]}")
    return Verdict(None, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=10_000, help="worlds for each mutant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", default="", help="only mutations whose name contains this")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if not chosen:
        parser.error(f"no mutation has {options.only!r} in its name")
    start_s, survived = time.monotonic(), 0
    print(f"{'mutation':<58} {'worlds':>7}  what it broke")
    for mutation in chosen:
        verdict = hunt(mutation, options.worlds, options.jobs, options.first)
        survived += verdict.worlds is None
        worlds = "-" if verdict.worlds is None else str(verdict.worlds)
        print(f"{mutation.name:<58} {worlds:>7}  {verdict.rule[:120] or 'SURVIVED'}", flush=True)
    found, took_s = len(chosen) - survived, time.monotonic() - start_s
    print(f"{found} of {len(chosen)} mutants found in {took_s:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
