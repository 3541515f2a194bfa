"""The serving benchmark: the same requests at the same times through one engine pair per connector.

    python -m kvpush.bench.serve --shape 0.6b --connectors vllm-push,kvpush-push --pools fresh,aged \\
        --cells 1024:8:60,4096:8:60 --out bench/results/raw

Exit status: 0 all measured without an error; 1 something could not be measured, failed or was stopped by the time
limit; 2 wrong arguments. What was measured is written in every case, after each cell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpush.bench.connectors import Connector, connectors_named
from kvpush.bench.engines import EngineError, EngineOptions, EnginePair
from kvpush.bench.environment import Environment, command_line, environment, now_iso
from kvpush.bench.raw import CellResult, ServeRaw, write_raw
from kvpush.bench.record import figures
from kvpush.bench.session import PairSession, TimeIsUp, engines_say
from kvpush.bench.shapes import SHAPES, Shape, shape_named, vocabulary_of, write_synthetic_model
from kvpush.bench.workload import Cell, parse_cells
from kvpush.launch.errors import LaunchError
from kvpush.launch.fleet import READY_TIMEOUT_S, Fleet

# An engine pair needs about this long to come up; less time than this left is not worth a start.
LEAST_START_S = 30.0
# Of the time limit, kept for stopping the engines.
STOP_RESERVE_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run was asked to do, checked."""

    shape: Shape
    connectors: list[Connector]
    pools: list[str]
    cells: list[Cell]
    out: Path
    options: EngineOptions
    vocabulary: int
    variant: str
    osl: int
    seed: int
    age_requests: int
    age_concurrency: int
    timeout_s: float
    start_timeout_s: float
    deadline_s: float


def parser() -> argparse.ArgumentParser:
    """The command line; its help is the reference."""
    made = argparse.ArgumentParser(
        prog="python -m kvpush.bench.serve", description="Serving benchmark of one P and one D engine."
    )
    add = made.add_argument
    add("--shape", required=True, choices=sorted(SHAPES), help="model shape; smollm2 needs --model")
    add("--connectors", required=True, help="comma-separated: vllm-pull, vllm-push, kvpush-push, kvpush-pull")
    add("--pools", default="fresh", help="comma-separated: fresh, aged (in this order, on one engine pair)")
    add("--cells", required=True, help="ISL:QPS:N, comma-separated")
    add("--out", required=True, type=Path, help="directory for the raw files; logs go to its folder logs")
    add("--osl", type=int, default=128, help="tokens asked of each request (default 128)")
    add("--seed", type=int, default=1, help="fixes arrival times and prompts (default 1)")
    add("--time-limit-s", type=float, help="begin nothing that would end later; engines are stopped within it")
    add("--model", type=Path, help="model directory; synthetic shapes make their own")
    add("--device", choices=("cuda", "cpu"), help="default: the shape's")
    add("--gpus", default="0,1", help="CUDA ordinals of the prefill and the decode engine (default 0,1)")
    add("--max-model-len", type=int, help="default: the shape's")
    add("--max-num-batched-tokens", type=int, default=8192, help="chunk budget (default 8192)")
    add("--engine-args", default="", help="further vLLM arguments for both engines, as one string; needs --variant")
    add("--kvpush-config", default="", help="JSON object with further keys of kvpush's configuration; needs --variant")
    add("--variant", default="", help="name for a non-standard set-up; keeps its figures apart from the standard ones")
    add("--age-requests", type=int, default=700, help="requests that age the pools (default 700)")
    add("--age-concurrency", type=int, default=48, help="how many of them at once (default 48)")
    add("--request-timeout-s", type=float, default=120.0, help="a request without an answer by then is an error")
    add("--start-timeout-s", type=float, default=READY_TIMEOUT_S, help="for an engine pair to come up")
    return made


def _kvpush_config(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--kvpush-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--kvpush-config must be a JSON object, not {text!r}")
    return config


def _pools(text: str) -> list[str]:
    pools = [pool.strip() for pool in text.split(",") if pool.strip()]
    if not pools or set(pools) - {"fresh", "aged"} or len(set(pools)) != len(pools):
        raise ValueError(f"--pools {text!r}: give fresh, aged or both")
    # An aged pool does not become fresh again.
    return sorted(pools, reverse=True)


def _gpus(text: str) -> tuple[int, int]:
    try:
        prefill, decode = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--gpus {text!r} is not two ordinals, such as 0,1") from None
    return prefill, decode


def plan(args: argparse.Namespace, scratch: Path, began_s: float) -> Plan:
    """Checks the arguments. scratch: where a synthetic model may be written. Raises ValueError naming what is wrong."""
    shape = shape_named(args.shape)
    config = _kvpush_config(args.kvpush_config)
    if (config or args.engine_args) and not args.variant:
        raise ValueError("--kvpush-config and --engine-args need --variant, a name that keeps their figures apart")
    if not all(part.isalnum() for part in args.variant.split("-")) and args.variant:
        raise ValueError(f"--variant {args.variant!r} must be letters, digits and single dashes")
    cells, osl = parse_cells(args.cells), args.osl
    longest = args.max_model_len or shape.max_model_len
    for cell in cells:
        if osl < 1 or cell.isl + osl > longest:
            raise ValueError(f"{cell.isl} prompt and {osl} output tokens do not fit into {longest}")
    for name in ("age_requests", "age_concurrency", "request_timeout_s", "start_timeout_s", "max_num_batched_tokens"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above zero, not {getattr(args, name)}")
    connectors, pools, gpus = connectors_named(args.connectors), _pools(args.pools), _gpus(args.gpus)
    if args.model is not None:
        model = args.model
    elif shape.decoder is not None:
        model = write_synthetic_model(shape.decoder, scratch / shape.name)
    else:
        raise ValueError(f"shape {shape.name} is a real model: give its directory with --model")
    options = EngineOptions(
        model=model.resolve(),
        device=args.device or shape.device,
        dummy_weights=args.model is None,
        max_model_len=longest,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpus=gpus,
        extra_args=tuple(shlex.split(args.engine_args)),
        kvpush_config=config,
    )
    limit = float("inf") if args.time_limit_s is None else args.time_limit_s - STOP_RESERVE_S
    return Plan(
        shape=shape,
        connectors=connectors,
        pools=pools,
        cells=cells,
        out=args.out,
        options=options,
        vocabulary=vocabulary_of(model),
        variant=args.variant,
        osl=osl,
        seed=args.seed,
        age_requests=args.age_requests,
        age_concurrency=args.age_concurrency,
        timeout_s=args.request_timeout_s,
        start_timeout_s=args.start_timeout_s,
        deadline_s=began_s + limit,
    )


def describe(connector: Connector, result: CellResult) -> str:
    """One line for the terminal."""
    got = figures(result.requests)
    numbers = "  ".join(f"{name.removesuffix('_ms')} {value:.2f}" for name, value in got.items()) or "no answer"
    good = len(result.requests) - len(result.errors)
    return f"{connector.name} {result.pool} isl={result.isl} qps={result.qps:g} n={good}/{result.n}  {numbers} (ms)"


class PairRun:
    """One connector: starts its engines, measures what was asked, writes the raw file after each step."""

    def __init__(self, asked: Plan, connector: Connector, facts: Environment) -> None:
        self.asked = asked
        self.connector = connector
        now = now_iso()
        parts = [asked.shape.name, connector.name, asked.variant, now.translate({ord(c): None for c in "-:"})]
        self.stem = "-".join(["serve", *filter(None, parts)])
        self.raw = ServeRaw(
            shape=asked.shape.name,
            connector=connector.name,
            variant=asked.variant,
            date=now,
            command=command_line("kvpush.bench.serve"),
            environment=facts,
            kvpush_config=dict(asked.options.kvpush_config) if connector.ours else {},
            unfinished=[f"{pool}/{cell.isl}/{cell.qps:g}" for pool in asked.pools for cell in asked.cells],
        )

    def save(self) -> Path:
        path = self.asked.out / f"{self.stem}.json"
        write_raw(path, self.raw)
        return path

    def run(self) -> bool:
        """Returns whether every cell was measured without a failed request. Always stops the engines."""
        left_s = self.asked.deadline_s - time.monotonic()
        good = True
        try:
            if left_s < LEAST_START_S:
                raise TimeIsUp
            with Fleet(self.asked.out / "logs" / self.stem) as fleet:
                timeout_s = min(self.asked.start_timeout_s, left_s)
                pair = EnginePair.start(fleet, self.connector, self.asked.options, timeout_s)
                self.raw.start_s = round(pair.start_s, 1)
                self.raw.engines = {engine.spec.role: engine.argv for engine in pair.engines}
                print(f"{self.connector.name}: engines up in {pair.start_s:.1f} s", flush=True)
                good = asyncio.run(self._measure(pair))
        except TimeIsUp:
            good = self._problem(f"time is up; not measured: {' '.join(self.raw.unfinished)}")
        except (EngineError, LaunchError) as error:
            good = self._problem(str(error))
        finally:
            print(f"{self.connector.name}: {self.save()}", flush=True)
        return good

    def _problem(self, text: str) -> bool:
        self.raw.problem = text
        print(f"{self.connector.name}: {text}", file=sys.stderr, flush=True)
        return False

    async def _measure(self, pair: EnginePair) -> bool:
        asked, good = self.asked, True
        session = PairSession(pair, asked.vocabulary, asked.seed, asked.osl, asked.deadline_s, asked.timeout_s)
        self.raw.warm_up = await session.warm_up([cell.isl for cell in asked.cells])
        for pool in asked.pools:
            if pool == "aged":
                self.raw.ageing = load = await session.age(asked.age_requests, asked.age_concurrency)
                print(f"{self.connector.name}: aged in {load.wall_s:.1f} s, {load.errors} errors {load.failures or ''}")
                good = good and not load.errors
            for cell in asked.cells:
                result = await session.measure(pool, cell)
                self.raw.cells.append(result)
                if result.complete:
                    self.raw.unfinished.remove(f"{pool}/{cell.isl}/{cell.qps:g}")
                self.save()
                print(describe(self.connector, result), flush=True)
                print(f"  {engines_say(result)}", flush=True)
                for warning in result.warnings:
                    print(f"  WARNING {warning}", flush=True)
                good = good and result.complete and not result.errors
                if result.dead_engines:
                    raise EngineError(f"engines died: {', '.join(result.dead_engines)}; see {self.asked.out}/logs")
        return good


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    began_s = time.monotonic()
    args = parser().parse_args(argv)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpush-bench-")))
        try:
            asked = plan(args, scratch, began_s)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        facts = environment()
        good = True
        for connector in asked.connectors:
            good = PairRun(asked, connector, facts).run() and good
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
