"""Bare writes between two processes over the real transport: what moving KV costs without any engine.

    python -m kvpush.bench.transfer --device cpu --out bench/results/raw
    python -m kvpush.bench.transfer --device cuda --tokens 1024,4096,16000 --out bench/results/raw

Each run writes fresh random bytes and is verified at the target, byte by byte, blocks outside the table included.
Exit status: 0, 1 if a transfer failed or bytes were wrong, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvpush.bench.environment import command_line, environment, now_iso
from kvpush.bench.raw import TransferRaw, TransferRow, write_raw
from kvpush.bench.tables import TABLES, tables
from kvpush.bench.transfer_side import CacheShape, Introduction, Timing, serve

# regions x KiB of a page -> shape; the first is vLLM's own layout, the second has K and V apart.
GEOMETRIES = {"36x64": (36, 65_536), "72x32": (72, 32_768)}
BLOCK_SIZE = 16
PATHS = ("direct", "staged", "peer", "auto")
DEFAULT_PATHS = {"cpu": "direct,staged,auto", "cuda": "direct,staged,peer,auto"}
DEFAULT_TOKENS = {"cpu": "128,1024,4096", "cuda": "1024,4096,16000"}
# Blocks of a 0.8 share of an H200 with 2.25 MiB a block; a smaller pool ages faster than a real one.
CUDA_POOL_BLOCKS = 43_000
ANSWER_TIMEOUT_S = 120.0


class TransferFailed(Exception):
    """A side failed, or the target holds wrong bytes."""


class Remote:
    """A side in its own process. Owns the process; `stop` ends it in any case."""

    def __init__(self, role: str, shape: CacheShape, gpu: int | None, threads: int, staging_bytes: int) -> None:
        self.role = role
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, role, shape, gpu is not None, threads, staging_bytes)
        self.process: BaseProcess = context.Process(target=serve, args=arguments, daemon=True)
        with _visible_gpu(gpu):
            self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """The side's next answer. Raises TransferFailed."""
        if not self.pipe.poll(ANSWER_TIMEOUT_S):
            raise TransferFailed(f"{self.role}: no answer within {ANSWER_TIMEOUT_S:g} s")
        try:
            status, result = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            raise TransferFailed(f"{self.role} ended with {self.process.exitcode}") from None
        if status != "ok":
            raise TransferFailed(result)
        return result

    def ask(self, name: str, *arguments: Any) -> None:
        """Sends a request whose `answer` is fetched later."""
        try:
            self.pipe.send((name, arguments))
        except ConnectionError:
            raise TransferFailed(f"{self.role} has ended") from None

    def call(self, name: str, *arguments: Any) -> Any:
        self.ask(name, *arguments)
        return self.answer()

    def stop(self) -> None:
        try:
            self.pipe.send(None)
        except OSError:
            pass
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


@contextmanager
def _visible_gpu(gpu: int | None) -> Iterator[None]:
    """A child started inside sees only this GPU, as ordinal 0; it must be set before CUDA is touched."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class Pair:
    """Source and target, connected. A context manager."""

    def __init__(
        self,
        shape: CacheShape,
        gpus: tuple[int, int] | None,
        threads: int,
        seed: int,
        staging_bytes: int = 64 << 20,
    ) -> None:
        self.shape = shape
        self.seed = seed
        self.number = 0
        self.sides: list[Remote] = []
        try:
            for role, place in (("source", 0), ("target", 1)):
                gpu = None if gpus is None else gpus[place]
                self.sides.append(Remote(role, shape, gpu, threads, staging_bytes))
            introductions: list[Introduction] = [side.answer() for side in self.sides]
            self.source, self.target = self.sides
            self.source.call("connect", introductions[1])
            self.target.call("connect", introductions[0])
            self.source.call("take", self.target.call("grant"))
        except BaseException:
            self.stop()
            raise

    def run(self, blocks: Any, tokens: int, path: str = "direct") -> tuple[Timing, float]:
        """One verified transfer; blocks as from `tables`, or None for the single buffer in one write.

        Returns its timing, and the seconds from its start until the target had everything in place and knew it.
        """
        self.number += 1
        number = self.seed * 1_000_000 + self.number
        message = f"run {number}".encode()
        self.target.call("wipe", number)
        self.source.call("fill", None if blocks is None else blocks[0], number)
        self.target.ask("await_arrival", None if blocks is None else blocks[1], message)
        timing: Timing = self.source.call("write", blocks, tokens, path, message)
        seen_s: float = self.target.answer()
        wrong = self.target.call("verify", None if blocks is None else blocks[1], number)
        if wrong is not None:
            raise TransferFailed(f"run {number}: {wrong}")
        return timing, seen_s - timing.started_s

    def stop(self) -> None:
        for side in self.sides:
            side.stop()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def measure(pair: Pair, device: str, tokens: int, table: str, path: str, runs: int) -> TransferRow:
    """Median of `runs` verified transfers, each with tables of its own, after two that are not counted.

    Every path gets the same tables. Raises TransferFailed.
    """
    shape = pair.shape
    n = tokens // shape.block_size
    measured, singles = [], []
    for number in range(runs + 2):
        blocks = tables(table, n, shape.num_blocks, pair.seed * 1000 + number)
        measured.append(pair.run(blocks, tokens, path))
        singles.append(pair.run(None, tokens)[0])
    # The first ones set up connections and mappings, and compile kernels.
    measured, singles = measured[2:], singles[2:]
    # Until the target can go on: a staged transfer is not over when its bytes have landed.
    samples_ms = [max(seen_s, timing.done_s) * 1e3 for timing, seen_s in measured]
    num_bytes = measured[0][0].bytes
    ms = statistics.median(samples_ms)
    return TransferRow(
        device=device,
        tokens=tokens,
        table=table,
        path=path,
        regions=shape.regions,
        page_bytes=shape.page_bytes,
        block_size=shape.block_size,
        bytes=num_bytes,
        descriptors=shape.regions * n,
        runs=round(statistics.median(timing.runs for timing, _ in measured)),
        ms=round(ms, 4),
        gb_s=round(num_bytes / ms / 1e6, 3),
        single_ms=round(statistics.median(timing.done_s * 1e3 for timing in singles), 4),
        samples_ms=[round(sample, 4) for sample in samples_ms],
        verified=True,
        detail_ms={
            "plan": round(statistics.median(timing.plan_s * 1e3 for timing, _ in measured), 4),
            "post": round(statistics.median(timing.post_s * 1e3 for timing, _ in measured), 4),
            "seen_at_target": round(statistics.median(seen_s * 1e3 for _, seen_s in measured), 4),
            "staged_share": round(sum(timing.path == "staged" for timing, _ in measured) / len(measured), 2),
        },
    )


def parser() -> argparse.ArgumentParser:
    """The command line; its help is the reference."""
    made = argparse.ArgumentParser(prog="python -m kvpush.bench.transfer", description="Raw transfers, two processes.")
    add = made.add_argument
    add("--device", required=True, choices=("cpu", "cuda"))
    add("--tokens", help="comma-separated, whole blocks of 16 (default: 128,1024,4096 or, on cuda, 1024,4096,16000)")
    add("--tables", default="contiguous,aged,random", help="comma-separated block tables")
    add("--paths", help="comma-separated: direct, staged, peer (cuda), auto (default: all of them)")
    add("--staging-mib", type=int, default=0, help="staging memory of each side (default 512 on cuda, else 64)")
    add("--geometry", default="36x64", choices=sorted(GEOMETRIES), help="regions x page size in KiB (default 36x64)")
    add("--runs", type=int, default=5, help="verified writes per row (default 5)")
    add("--pool-blocks", type=int, help="blocks of each cache (default 43000 on cuda, else twice the longest request)")
    add("--threads", type=int, default=0, help="NIXL's posting threads (default 0)")
    add("--gpus", default="0,1", help="CUDA ordinals of source and target (default 0,1)")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="directory for the raw file; without it only the table is printed")
    return made


def device_name(device: str, gpus: Sequence[str]) -> str:
    """`h200` for an NVIDIA H200, `cpu` for host memory, else the card's own name in lower case."""
    if device == "cpu":
        return "cpu"
    name = gpus[0].lower() if gpus else "cuda"
    return "h200" if "h200" in name else name.replace(" ", "-")


def _checked(args: argparse.Namespace) -> tuple[list[int], list[str], list[str], tuple[int, int] | None]:
    """(token counts, tables, paths, GPUs). Raises ValueError naming the option."""
    try:
        lengths = [int(part) for part in (args.tokens or DEFAULT_TOKENS[args.device]).split(",")]
        gpus = [int(part) for part in args.gpus.split(",")]
    except ValueError as error:
        raise ValueError(f"--tokens and --gpus take whole numbers: {error}") from None
    if len(gpus) != 2:
        raise ValueError(f"--gpus {args.gpus!r} is not two ordinals, such as 0,1")
    kinds = args.tables.split(",")
    for kind in kinds:
        if kind not in TABLES:
            raise ValueError(f"--tables: unknown {kind!r}; known: {', '.join(TABLES)}")
    paths = (args.paths or DEFAULT_PATHS[args.device]).split(",")
    for path in paths:
        if path not in PATHS:
            raise ValueError(f"--paths: unknown {path!r}; known: {', '.join(PATHS)}")
        if path == "peer" and args.device == "cpu":
            raise ValueError("--paths: peer needs --device cuda")
    for tokens in lengths:
        if tokens < BLOCK_SIZE or tokens % BLOCK_SIZE:
            raise ValueError(f"--tokens: {tokens} is not a multiple of {BLOCK_SIZE}")
    if args.pool_blocks is not None and args.pool_blocks < max(lengths) // BLOCK_SIZE:
        raise ValueError(f"--pool-blocks: {max(lengths)} tokens do not fit into {args.pool_blocks} blocks")
    if args.runs < 1:
        raise ValueError(f"--runs must be at least 1, not {args.runs}")
    return lengths, kinds, paths, (gpus[0], gpus[1]) if args.device == "cuda" else None


def print_row(row: TransferRow) -> None:
    detail = "  ".join(f"{name} {value:.2f}" for name, value in row.detail_ms.items())
    print(
        f"{row.device} {row.tokens:6d} tokens {row.bytes / 1e6:7.0f} MB  {row.table:10s} {row.path:6s}"
        f"  {row.descriptors} pages in {row.runs} runs  {row.ms:.2f} ms  {row.gb_s:.2f} GB/s"
        f"  (one write {row.single_ms:.2f} ms; {detail})",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = parser().parse_args(argv)
    try:
        lengths, kinds, paths, gpus = _checked(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    facts = environment()
    device = device_name(args.device, facts.gpus)
    regions, page_bytes = GEOMETRIES[args.geometry]
    staging_bytes = (args.staging_mib or (512 if args.device == "cuda" else 64)) << 20
    default_pool = CUDA_POOL_BLOCKS if args.device == "cuda" else 2 * max(lengths) // BLOCK_SIZE
    raw = TransferRaw(date=now_iso(), command=command_line("kvpush.bench.transfer"), rows=[], environment=facts)
    try:
        for tokens in lengths:
            single = tokens // BLOCK_SIZE * regions * page_bytes
            shape = CacheShape(regions, page_bytes, BLOCK_SIZE, args.pool_blocks or default_pool, single)
            with Pair(shape, gpus, args.threads, args.seed, staging_bytes) as pair:
                for kind, path in product(kinds, paths):
                    raw.rows.append(measure(pair, device, tokens, kind, path, args.runs))
                    print_row(raw.rows[-1])
    except (TransferFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.out is not None:
        stamp = raw.date.translate({ord(c): None for c in "-:"})
        place = args.out / f"transfer-{device}-{args.geometry}-{stamp}.json"
        write_raw(place, raw)
        print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
