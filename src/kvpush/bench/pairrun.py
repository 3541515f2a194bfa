"""One connector's part of a run: its engine pair, its raw file, and what of it is still to be measured."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from kvpush.bench.connectors import Connector
from kvpush.bench.engines import EngineError, EnginePair, Pair
from kvpush.bench.environment import Environment, command_line, now_iso
from kvpush.bench.options import Plan
from kvpush.bench.raw import CellResult, RawError, ServeRaw, read_raw, write_raw
from kvpush.bench.repeats import cell_figures
from kvpush.bench.session import PairSession, TimeIsUp, engines_say
from kvpush.bench.workload import Cell
from kvpush.launch.fleet import Fleet


class PairRun:
    """Measures cells one at a time and writes the raw file after each. facts: of this machine and its software."""

    def __init__(self, asked: Plan, connector: Connector, facts: Environment) -> None:
        self.asked = asked
        self.connector = connector
        self.good = True
        self._facts = facts
        self._session: PairSession | None = None
        self._aged = False
        now = now_iso()
        parts = [asked.shape.name, connector.name, asked.variant, now.translate({ord(c): None for c in "-:"})]
        self.path = asked.out / ("-".join(["serve", *filter(None, parts)]) + ".json")
        self.raw = ServeRaw(
            shape=asked.shape.name,
            connector=connector.name,
            variant=asked.variant,
            date=now,
            command=command_line("kvpush.bench.serve"),
            environment=facts,
            kvpush_config=dict(asked.options.kvpush_config) if connector.ours else {},
            preset=asked.preset,
            slo=asked.slo,
            asked=asked.asked(connector),
        )
        if asked.resume:
            self._resume(now)
        self._note_unfinished()

    @property
    def running(self) -> bool:
        """The engines are up, as far as is known."""
        return self._session is not None

    @property
    def log_dir(self) -> Path:
        """Where the engines' logs go."""
        return self.asked.out / "logs" / self.path.stem

    def missing(self) -> list[tuple[str, int, Cell]]:
        """(pool, repeat, cell) that have not been measured to their end."""
        done = {(cell.pool, cell.repeat, cell.isl, cell.qps) for cell in self.raw.cells if cell.complete}
        return [
            (pool, repeat, cell)
            for pool, repeat, cell in self.asked.wanted()
            if (pool, repeat, cell.isl, cell.qps) not in done
        ]

    def save(self) -> Path:
        self._note_unfinished()
        write_raw(self.path, self.raw)
        return self.path

    def start(self, fleet: Fleet) -> None:
        """Engines up and warm. Raises LaunchError, EngineError or TimeIsUp."""
        pair: Pair
        if self.asked.attached is not None:
            pair = self.asked.attached
        else:
            timeout_s = min(self.asked.start_timeout_s, self.asked.deadline_s - time.monotonic())
            started = EnginePair.start(fleet, self.connector, self.asked.options, timeout_s)
            self.raw.start_s = round(started.start_s, 1)
            self.raw.engines = {engine.spec.role: engine.argv for engine in started.engines}
            pair = started
            print(f"{self.connector.name}: engines up in {started.start_s:.1f} s", flush=True)
        asked = self.asked
        session = PairSession(pair, asked.vocabulary, asked.seed, asked.osl, asked.deadline_s, asked.timeout_s)
        self.raw.warm_up = asyncio.run(session.warm_up([cell.isl for cell in asked.cells]))
        self._session, self._aged = session, False

    def stop(self) -> None:
        """The engines are gone, or will be."""
        self._session = None

    def measure(self, pool: str, repeat: int, cell: Cell) -> None:
        """One cell, aged first if need be. Raises EngineError if an engine has died, TimeIsUp."""
        session = self._session
        assert session is not None, "start comes first"
        if pool == "aged" and not self._aged:
            self._age(session)
        result = asyncio.run(session.measure(pool, cell, repeat))
        key = (pool, repeat, cell.isl, cell.qps)
        self.raw.cells = [old for old in self.raw.cells if (old.pool, old.repeat, old.isl, old.qps) != key]
        self.raw.cells.append(result)
        self.save()
        self._tell(result)
        self.good = self.good and result.complete and not result.errors
        if result.dead_engines:
            raise EngineError(f"engines died: {', '.join(result.dead_engines)}; see {self.log_dir}")

    def problem(self, text: str) -> None:
        """Why what is missing was not measured."""
        self.good = False
        self.raw.problem = text
        print(f"{self.connector.name}: {text}", file=sys.stderr, flush=True)

    def _age(self, session: PairSession) -> None:
        self.raw.ageing = load = asyncio.run(session.age(self.asked.age_requests, self.asked.age_concurrency))
        self._aged = True
        self.good = self.good and not load.errors
        failures = load.failures or ""
        print(f"{self.connector.name}: aged in {load.wall_s:.1f} s, {load.errors} errors {failures}", flush=True)

    def _tell(self, result: CellResult) -> None:
        print(describe(self.connector, result, self.raw), flush=True)
        print(f"  {engines_say(result)}", flush=True)
        for warning in result.warnings:
            print(f"  WARNING {warning}", flush=True)

    def _resume(self, now: str) -> None:
        """Takes up the newest raw file that asks for the same and is not finished, if there is one.

        Raises ValueError if it was measured with other software: its cells could not be compared with what follows.
        """
        for path in sorted(self.asked.out.glob(f"serve-{self.asked.shape.name}-{self.connector.name}-*.json"))[::-1]:
            try:
                raw = read_raw(path)
            except RawError:
                continue
            if not isinstance(raw, ServeRaw) or raw.variant != self.raw.variant or raw.asked != self.raw.asked:
                continue
            if raw.environment != self._facts:
                raise ValueError(f"{path} was measured on another machine or with other versions; measure anew")
            raw.slo, raw.problem = self.raw.slo, None
            # A cell in which an engine died is complete and says so; here it gets another chance.
            raw.cells = [cell for cell in raw.cells if cell.complete and not cell.dead_engines]
            raw.resumed = [*raw.resumed, now]
            self.path, self.raw = path, raw
            self.good = all(not cell.errors for cell in raw.cells)
            print(f"{self.connector.name}: goes on with {path}, {len(raw.cells)} cells are there", flush=True)
            return

    def _note_unfinished(self) -> None:
        self.raw.unfinished = [self._name(*each) for each in self.missing()]

    def _name(self, pool: str, repeat: int, cell: Cell) -> str:
        return f"{pool}/{cell.isl}/{cell.qps:g}" + (f"#{repeat}" if self.asked.repeats > 1 else "")


def give_up(run: PairRun, error: Exception) -> None:
    """Books why a run ends early."""
    if isinstance(error, TimeIsUp):
        run.save()
        run.problem(f"time is up; not measured: {' '.join(run.raw.unfinished)}")
    else:
        run.problem(str(error))


def describe(connector: Connector, result: CellResult, raw: ServeRaw) -> str:
    """One line for the terminal."""
    names = ("ttft_mean_ms", "ttft_p99_ms", "handoff_p50_ms", "prefill_response_mean_ms", "tpot_mean_ms", "tpot_p99_ms")
    got = cell_figures(result, raw.slo)
    numbers = "  ".join(f"{name.removesuffix('_ms')} {got[name]:.2f}" for name in names if name in got) or "no answer"
    if "goodput_qps" in got:
        numbers += f"  goodput {got['goodput_qps']:.2f}/s"
    good = len(result.requests) - len(result.errors)
    where = f"{connector.name} {result.pool} isl={result.isl} qps={result.qps:g} #{result.repeat}"
    return f"{where} n={good}/{result.n}  {numbers} (ms)"
