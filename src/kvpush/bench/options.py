"""What the serving benchmark is asked to do: its command line, presets, and the checked plan that comes of both."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpush.bench import presets
from kvpush.bench.connectors import Connector, connectors_named
from kvpush.bench.engines import AttachedPair, EngineOptions
from kvpush.bench.raw import Slo
from kvpush.bench.shapes import SHAPES, Shape, shape_named, vocabulary_of, write_synthetic_model
from kvpush.bench.workload import Cell, parse_cells
from kvpush.launch.errors import LaunchError
from kvpush.launch.fleet import READY_TIMEOUT_S
from kvpush.launch.models import demo_model

# Of the time limit, kept for stopping the engines.
STOP_RESERVE_S = 20.0
REQUIRED = ("shape", "connectors", "cells", "out")
INTERLEAVES = ("runs", "cells")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run was asked to do, checked. deadline_s: on `time.monotonic()`.

    interleave: `runs`: one connector's engines at a time, all cells, then the next connector, and so for each repeat;
    `cells`: the engines of all connectors are up at once and take turns cell by cell.
    attached: engines that run already, in place of some that are started here.
    """

    shape: Shape
    connectors: list[Connector]
    pools: list[str]
    cells: list[Cell]
    out: Path
    options: EngineOptions
    vocabulary: int
    variant: str
    preset: str
    interleave: str
    repeats: int
    resume: bool
    slo: Slo | None
    osl: int
    seed: int
    age_requests: int
    age_concurrency: int
    timeout_s: float
    start_timeout_s: float
    deadline_s: float
    attached: AttachedPair | None = None

    def asked(self, connector: Connector) -> dict[str, Any]:
        """What decides what is measured, as JSON: two runs of which it is equal measure the same."""
        options = self.options
        return {
            "model": options.model.name if options.dummy_weights else str(options.model),
            "device": options.device,
            "pools": self.pools,
            "cells": [f"{cell.isl}:{cell.qps:g}:{cell.n}" for cell in self.cells],
            "repeats": self.repeats,
            "interleave": self.interleave,
            "osl": self.osl,
            "seed": self.seed,
            "ageing": [self.age_requests, self.age_concurrency] if "aged" in self.pools else [],
            "max_model_len": options.max_model_len,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "engine_args": list(options.extra_args),
            "kvpush_config": dict(options.kvpush_config) if connector.ours else {},
            "attached": [] if self.attached is None else [self.attached.prefill_url, self.attached.decode_url],
        }

    def wanted(self) -> list[tuple[str, int, Cell]]:
        """(pool, repeat, cell), in the order of measurement: an aged pool does not become fresh again."""
        return [(pool, repeat, cell) for pool in self.pools for repeat in range(self.repeats) for cell in self.cells]


def parser() -> argparse.ArgumentParser:
    """The command line; its help is the reference."""
    made = argparse.ArgumentParser(
        prog="kvpush bench serve", description="Serving benchmark of one P and one D engine.", allow_abbrev=False
    )
    add = made.add_argument
    add("--preset", default="", help=f"{', '.join(presets.names())}, or a TOML file; options beside it win")
    add("--shape", choices=sorted(SHAPES), help="model shape; smollm2 is the demo's real model")
    add("--connectors", help="comma-separated: vllm-pull, vllm-push, kvpush-push, kvpush-pull")
    add("--pools", default="fresh", help="comma-separated: fresh, aged (in this order, on one engine pair)")
    add("--cells", help="ISL:QPS:N, comma-separated")
    add("--out", type=Path, help="directory for the raw files; logs go to its folder logs")
    add("--osl", type=int, default=128, help="tokens asked of each request (default 128)")
    add("--repeats", type=int, default=1, help="how often each cell is measured, each time with other requests")
    add("--interleave", choices=INTERLEAVES, default="runs", help="what connectors take turns in (default runs)")
    add("--resume", action="store_true", help="go on with the newest unfinished files of the same set-up in --out")
    add("--slo-ttft-ms", type=float, help="for goodput: a good answer begins within this time")
    add("--slo-tpot-ms", type=float, help="for goodput: a good answer takes at most this for each further token")
    add("--seed", type=int, default=1, help="fixes arrival times and prompts (default 1)")
    add("--time-limit-s", type=float, help="begin nothing that would end later; engines are stopped within it")
    add("--model", type=Path, help="model directory; synthetic shapes make their own. With --attach: its served name")
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
    add("--attach", default="", help="PREFILL_URL,DECODE_URL of engines that run already, with the one connector named")
    add("--side-channels", default="", help="HOST:PORT,HOST:PORT of theirs, for kvpush")
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line with its preset below it. Raises ValueError naming what is wrong with the preset."""
    made = parser()
    first, _ = made.parse_known_args(argv)
    if first.preset:
        types = {
            action.dest: bool if action.nargs == 0 else action.type if isinstance(action.type, type) else str
            for action in made._actions
            if action.dest not in ("help", "preset", "out", "resume")
        }
        made.set_defaults(**presets.read(first.preset, types))
    return made.parse_args(argv)


def plan(args: argparse.Namespace, scratch: Path, began_s: float) -> Plan:
    """Checks the arguments. scratch: where a synthetic model may be written. Raises ValueError naming what is wrong."""
    for name in REQUIRED:
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing, or a --preset that gives it")
    shape = shape_named(args.shape)
    config = _kvpush_config(args.kvpush_config)
    if (config or args.engine_args) and not args.variant:
        raise ValueError("--kvpush-config and --engine-args need --variant, a name that keeps their figures apart")
    if args.variant and not all(part.isascii() and part.isalnum() for part in args.variant.split("-")):
        raise ValueError(f"--variant {args.variant!r} must be letters, digits and single dashes")
    cells, osl = parse_cells(args.cells), args.osl
    longest = args.max_model_len or shape.max_model_len
    for cell in cells:
        if osl < 1 or cell.isl + osl > longest:
            raise ValueError(f"{cell.isl} prompt and {osl} output tokens do not fit into {longest}")
    _check_positive(args)
    connectors, pools, gpus = connectors_named(args.connectors), _pools(args.pools), _gpus(args.gpus)
    attached = _attached(args, connectors, longest)
    model, vocabulary = _model(args, shape, scratch, elsewhere=attached is not None)
    together = len(connectors) if args.interleave == "cells" else 1
    options = EngineOptions(
        model=model,
        device=args.device or shape.device,
        dummy_weights=args.model is None and shape.decoder is not None,
        max_model_len=longest,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpus=gpus,
        extra_args=tuple(shlex.split(args.engine_args)),
        kvpush_config=config,
        memory_share=1 / together,
    )
    limit_s = float("inf") if args.time_limit_s is None else args.time_limit_s - STOP_RESERVE_S
    return Plan(
        shape=shape,
        connectors=connectors,
        pools=pools,
        cells=cells,
        out=args.out,
        options=options,
        vocabulary=vocabulary,
        variant=args.variant,
        preset=args.preset,
        interleave=args.interleave,
        repeats=args.repeats,
        resume=args.resume,
        slo=_slo(args),
        osl=osl,
        seed=args.seed,
        age_requests=args.age_requests,
        age_concurrency=args.age_concurrency,
        timeout_s=args.request_timeout_s,
        start_timeout_s=args.start_timeout_s,
        deadline_s=began_s + limit_s,
        attached=attached,
    )


def _check_positive(args: argparse.Namespace) -> None:
    names = ["age_requests", "age_concurrency", "request_timeout_s", "start_timeout_s", "max_num_batched_tokens"]
    names += [name for name in ("repeats", "slo_ttft_ms", "slo_tpot_ms") if getattr(args, name) is not None]
    for name in names:
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above zero, not {getattr(args, name)}")


def _model(args: argparse.Namespace, shape: Shape, scratch: Path, *, elsewhere: bool) -> tuple[Path, int]:
    """(its directory, or its name if the engines run elsewhere; the number of token ids)."""
    if elsewhere:
        if args.model is None:
            raise ValueError("--attach needs --model, the name under which the engines serve it")
        if shape.decoder is not None:
            return args.model, shape.decoder.vocabulary
        return args.model, vocabulary_of(args.model)
    if args.model is not None:
        model = args.model
    elif shape.decoder is not None:
        model = write_synthetic_model(shape.decoder, scratch / shape.name)
    else:
        try:
            model = demo_model(print)
        except LaunchError as error:
            raise ValueError(f"shape {shape.name}: {error}") from None
    return model.resolve(), vocabulary_of(model)


def _slo(args: argparse.Namespace) -> Slo | None:
    if args.slo_ttft_ms is None and args.slo_tpot_ms is None:
        return None
    return Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms)


def _attached(args: argparse.Namespace, connectors: Sequence[Connector], longest: int) -> AttachedPair | None:
    if not args.attach:
        if args.side_channels:
            raise ValueError("--side-channels goes with --attach only")
        return None
    urls = [url.strip().rstrip("/") for url in args.attach.split(",")]
    if len(urls) != 2 or not all(url.startswith(("http://", "https://")) for url in urls):
        raise ValueError(f"--attach {args.attach!r} is not PREFILL_URL,DECODE_URL")
    if len(connectors) != 1:
        raise ValueError("--attach measures engines with one connector: give that one in --connectors")
    channels = [_address(each) for each in args.side_channels.split(",") if each.strip()]
    if connectors[0].ours and len(channels) != 2:
        raise ValueError("--attach with kvpush needs --side-channels HOST:PORT,HOST:PORT, of P and of D")
    return AttachedPair(connectors[0], urls[0], urls[1], str(args.model), longest, channels)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"--side-channels: {text.strip()!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


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
