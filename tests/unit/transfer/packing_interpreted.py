"""Runs the copy kernel in Triton's interpreter over host memory, against the naive twin. Prints how many cases agreed.

A program of its own, since Triton must be imported with TRITON_INTERPRET=1. Argument: the seed.
"""

import random
import sys

import numpy as np
import torch

from kvpush.transfer.packing.base import packed_block_bytes
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.copy_kernel import PACKED, LaunchShape, Side, constants, unsuitable
from kvpush.transfer.packing.kernels import copy_pages
from kvpush.transfer.packing.naive import naive_pack, naive_unpack
from kvpush.transfer.packing.pages import PageLayout
from packing_layouts import LAYOUTS, Layout, geometry_of, memory_of, randomise


def launch(source, source_ids, target, target_ids, layout, shape, num_bases) -> None:
    """As PageCopy does it. A side is a Side, or the words of a packed one."""
    sides = [side if isinstance(side, Side) else PACKED for side in (source, target)]
    first = source.table if isinstance(source, Side) else source
    second = target.table if isinstance(target, Side) else target
    ids = [torch.tensor(ids if ids else [0], dtype=torch.int32) for ids in (source_ids, target_ids)]
    count = max(len(source_ids), len(target_ids))
    copy_pages[(shape.num_programs, 1, 1)](
        first, ids[0], second, ids[1], count, num_bases, **constants(*sides, layout, shape), num_warps=shape.num_warps
    )


def cache(rng: random.Random, layout: Layout, heads: int, tokens: int, width: int, bases: int):
    layers = layout.layers(bases, rng.randint(1, 6), heads, tokens, width, torch.bfloat16, None)
    geometry = geometry_of(layers)
    table = torch.tensor(geometry.bases, dtype=torch.int64)
    pages = PageLayout.of(geometry)
    assert unsuitable(pages) is None, pages
    return layers, geometry, Side(table, pages.block_stride), pages


def case(rng: random.Random, layout: Layout) -> None:
    bases, tokens, width = rng.randint(1, 2), rng.randint(1, 4), 8 * rng.randint(1, 3)
    heads = 1 if "h" not in layout.order else rng.randint(1, 3)
    layers, geometry, side, pages = cache(rng, layout, heads, tokens, width, bases)
    shape = LaunchShape(rng.choice([1, 2, 7]), 1, rng.choice([32, 256, 4096]))
    blocks = rng.sample(range(geometry.num_blocks), rng.randint(0, geometry.num_blocks))
    length = len(blocks) * packed_block_bytes(geometry)
    buffer = StagingBuffer(length + 64)
    start = 16
    words = buffer.words[start // 8 :]

    randomise(buffer.bytes)
    expected = memory_of(layers, buffer)
    launch(side, blocks, words, [], pages, shape, bases)
    packed = naive_pack(geometry, expected, blocks)
    expected.at(buffer.address + start, length)[:] = np.frombuffer(packed, dtype=np.uint8)
    assert memory_of(layers, buffer) == expected, ("pack", layout, pages, shape)

    randomise(buffer.bytes)
    expected = memory_of(layers, buffer)
    launch(words, [], side, blocks, pages, shape, bases)
    naive_unpack(geometry, expected, blocks, expected.at(buffer.address + start, length).tobytes())
    assert memory_of(layers, buffer) == expected, ("unpack", layout, pages, shape)

    other_layers, other, other_side, other_pages = cache(rng, layout, heads, tokens, width, bases)
    if (other_pages.head_stride, other_pages.token_stride) != (pages.head_stride, pages.token_stride):
        return  # its strides depend on the number of blocks; open_peer refuses that
    count = min(len(blocks), other.num_blocks)
    targets = rng.sample(range(other.num_blocks), count)
    expected = memory_of([*layers, *other_layers])
    launch(side, blocks[:count], other_side, targets, pages, shape, bases)
    naive_unpack(other, expected, targets, naive_pack(geometry, expected, blocks[:count]))
    assert memory_of([*layers, *other_layers]) == expected, ("peer", layout, pages, shape)


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    torch.manual_seed(rng.randrange(1 << 30))
    num_cases = 0
    for layout in LAYOUTS.values():
        for _ in range(2):
            case(rng, layout)
            num_cases += 1
    print(num_cases)


if __name__ == "__main__":
    main()
