"""Measures packing and unpacking against a plain copy on the same device, and prints JSON.

    python scripts/bench_packing.py                      one GPU, a minute
    python scripts/bench_packing.py --device cpu --tokens 1024

Every kind of packer and every number of programs is compared with torch once before it is timed. GB/s counts payload
(10^9 bytes a second), so that reading and writing it are twice as much; times are medians. `host_us` is what the call
costs the thread that makes it, ids copied and event recorded, while the device is idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import Packer, PackingError, packed_block_bytes
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.torch_packer import TorchPacker
from kvpush.transfer.sources import Event

BLOCK_SIZE = 16
WARM_UP = 3
DEADLINE_S = 60.0
# regions x page: vLLM's layout of a model with 36 layers has K and V side by side, others keep them apart.
SHAPES = {"72x32KiB": (72, 32 * 1024), "36x64KiB": (36, 64 * 1024)}


class Bench:
    """One shape of cache, and memory to pack as many tokens as asked for."""

    def __init__(self, regions: int, page: int, tokens: int, device: int | None, repeat: int) -> None:
        self.device = device
        self.repeat = repeat
        self.target = torch.device("cpu") if device is None else torch.device("cuda", device)
        self.blocks = -(-tokens // BLOCK_SIZE)
        self.pool = self.blocks + max(64, self.blocks // 4)
        heads, content = 8, page // 8 // BLOCK_SIZE
        self.layers = [
            torch.empty(self.pool, heads, BLOCK_SIZE, content // 2, dtype=torch.bfloat16, device=self.target)
            for _ in range(regions)
        ]
        for layer in self.layers:
            layer.view(torch.int16).random_()
        first = self.layers[0]
        self.geometry = CacheGeometry.from_strides(
            [layer.data_ptr() for layer in self.layers], first.shape, first.stride(), first.element_size(), device
        )
        self.num_bytes = self.blocks * packed_block_bytes(self.geometry)
        self.buffer = StagingBuffer(self.num_bytes, device)
        self.rng = np.random.default_rng(0)
        self.wait()

    def wait(self) -> None:
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def table(self) -> Any:
        return self.rng.permutation(self.pool)[: self.blocks].astype(np.int64)

    def plain_copy(self) -> dict[str, float]:
        """A contiguous copy of the same number of bytes: what memory allows."""
        other = torch.empty_like(self.buffer.bytes)
        stream = None if self.device is None else torch.cuda.current_stream(self.device)
        return self.rates(lambda: other.copy_(self.buffer.bytes), stream)

    def packer(self, packer: Packer, stream: Any) -> dict[str, Any]:
        self.verify(packer)
        address = self.buffer.address
        return {
            "pack": self.rates(lambda: packer.pack(self.table(), address), stream)
            | {"host_us": self.host_us(lambda blocks: packer.pack(blocks, address))},
            "unpack": self.rates(lambda: packer.unpack(address, self.table()), stream)
            | {"host_us": self.host_us(lambda blocks: packer.unpack(address, blocks))},
        }

    def rates(self, call: Callable[[], object], stream: Any) -> dict[str, float]:
        samples = []
        for i in range(WARM_UP + self.repeat):
            if self.device is None:
                start_s = time.perf_counter()
                call()
                took_s = time.perf_counter() - start_s
            else:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                call()
                end.record(stream)
                end.synchronize()
                took_s = begin.elapsed_time(end) / 1000
            if i >= WARM_UP:
                samples.append(took_s)
        median_s = statistics.median(samples)
        return {"ms": round(median_s * 1000, 4), "gb_s": round(self.num_bytes / median_s / 1e9, 1)}

    def host_us(self, call: Callable[[Any], Event]) -> float:
        samples = []
        for i in range(WARM_UP + max(self.repeat, 30 if self.device is not None else 0)):
            blocks = self.table()
            start_s = time.perf_counter()
            event = call(blocks)
            took_s = time.perf_counter() - start_s
            passed(event)
            if i >= WARM_UP:
                samples.append(took_s)
        return round(statistics.median(samples) * 1e6, 1)

    def verify(self, packer: Packer) -> None:
        """Random blocks out, and into other blocks. Raises AssertionError if one byte is another."""
        left, arrived = self.table(), self.table()
        expected = [layer[torch.from_numpy(left).to(self.target)].clone() for layer in self.layers]
        self.buffer.bytes.zero_()
        self.wait()
        passed(packer.pack(left, self.buffer.address))
        passed(packer.unpack(self.buffer.address, arrived))
        for i, (layer, content) in enumerate(zip(self.layers, expected, strict=True)):
            found = layer[torch.from_numpy(arrived).to(self.target)]
            assert torch.equal(found.view(torch.int16), content.view(torch.int16)), f"region {i} differs"


def passed(event: Event) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not event.query():
        assert time.monotonic() < deadline_s, f"a copy has not ended within {DEADLINE_S} s"


def packers(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What to measure: its description, and a maker of (packer, stream)."""
    parts = (bench.geometry, bench.layers, [bench.buffer])

    def by_torch() -> Any:
        stream = None if bench.device is None else torch.cuda.Stream(bench.target)
        return TorchPacker(*parts, stream), stream

    if bench.device is None:
        from kvpush.transfer.packing.host_packer import HostPacker

        yield {"packer": "host"}, lambda: (HostPacker(*parts), None)
    yield {"packer": "torch"}, by_torch
    if bench.device is None:
        return
    from kvpush.transfer.packing.copy_kernel import CopyStream, LaunchShape
    from kvpush.transfer.packing.triton_packer import TritonPacker

    for warps in options.warps:
        for chunk_kib in options.chunk_kib:
            for programs in options.programs:

                def by_kernel(shape: LaunchShape = LaunchShape(programs, warps, chunk_kib * 1024)) -> Any:  # noqa: B008
                    stream = CopyStream(bench.device or 0)
                    return TritonPacker(*parts, shape, stream), stream.stream

                yield {"packer": "kernel", "programs": programs, "warps": warps, "chunk_kib": chunk_kib}, by_kernel


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="0", help="CUDA ordinal, or cpu")
    parser.add_argument("--tokens", type=numbers, default=[1024, 4096, 16000])
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--programs", type=numbers, default=[8, 16, 32, 64, 132])
    parser.add_argument("--warps", type=numbers, default=[8, 16])
    parser.add_argument("--chunk-kib", type=numbers, default=[32])
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    device = None if options.device == "cpu" else int(options.device)
    if device is not None and not torch.cuda.is_available():
        print("bench_packing: error: there is no CUDA device (--device cpu measures the CPU)", file=sys.stderr)
        return 1
    report: dict[str, Any] = {
        "device": "cpu" if device is None else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": [],
    }
    failed = 0
    for shape in options.shapes.split(","):
        for tokens in options.tokens:
            bench = Bench(*SHAPES[shape], tokens, device, options.repeat)
            about = {"shape": shape, "tokens": tokens, "bytes": bench.num_bytes, "plain_copy": bench.plain_copy()}
            for kind, make in packers(bench, options):
                row = about | kind
                try:
                    row |= bench.packer(*make())
                except (PackingError, AssertionError) as error:
                    failed += 1
                    row["error"] = str(error)
                report["rows"].append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
            del bench
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
