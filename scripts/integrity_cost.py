"""What it costs to digest the KV of a prompt, and to identify a prompt: `python scripts/integrity_cost.py`.

Prints one JSON object. Processor time is that of the hashing thread; on CUDA the wall clock counts, launches included.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

import torch

from kvpush.protocol.prompt import prompt_identity
from kvpush.transfer.hashing import Words, hash_memory
from kvpush.vllm.hashing import TensorHasher

SHAPES = {"0.6b": (28, 8, 256), "8b": (36, 8, 256)}
"""Layers, KV heads, and the width of K and V of one token and head, in bfloat16."""
BLOCK_SIZE = 16


def best(run: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of some rounds."""
    found = []
    for _ in range(rounds):
        start_s = clock()
        run()
        found.append(clock() - start_s)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    num_layers, heads, width = SHAPES[asked.shape]
    num_blocks = -(-asked.tokens // BLOCK_SIZE)
    shape = (num_blocks + 8, heads, BLOCK_SIZE, width * 2)
    layers = [torch.randint(0, 256, shape, dtype=torch.uint8, device=asked.device) for _ in range(num_layers)]
    table = random.sample(range(shape[0]), num_blocks)
    num_bytes = num_layers * num_blocks * heads * BLOCK_SIZE * width * 2
    found: dict[str, object] = {
        "shape": asked.shape, "device": asked.device, "tokens": asked.tokens, "gib": round(num_bytes / 2**30, 3),
    }  # fmt: skip
    if asked.device == "cuda":
        hasher = TensorHasher(layers)
        clock: Callable[[], float] = time.perf_counter
        torch.cuda.synchronize()

        def run() -> Words:
            return hasher.hash_blocks(table, lambda: False)
    else:
        arrays = [layer.numpy() for layer in layers]
        clock = time.thread_time

        def run() -> Words:
            return hash_memory(arrays, table, lambda: False)

    digest_s = best(run, asked.rounds, clock)
    found |= {"digest_s": round(digest_s, 4), "gb_per_s": round(num_bytes / digest_s / 1e9, 2)}
    prompt = [random.randrange(150_000) for _ in range(asked.tokens)]
    found["identity_ms"] = round(best(lambda: prompt_identity(prompt), 200, time.thread_time) * 1e3, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
