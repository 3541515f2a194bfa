"""The slow twin of `plan_runs`: one content after the other, nothing clever. For tests and for doubts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.runs import Runs


def naive_moves(
    src: CacheGeometry,
    src_blocks: Sequence[int],
    dst: CacheGeometry,
    dst_blocks: Sequence[int],
    first_token: int,
    end_token: int,
    heads: tuple[range, range] | None = None,
) -> Iterator[tuple[int, int, int]]:
    """Yields (index of the base, source address, target address) of every content; each is `content_bytes` long."""
    src_heads, dst_heads = heads if heads is not None else (range(src.num_heads), range(dst.num_heads))
    for base in range(len(src.bases)):
        for src_head, dst_head in zip(src_heads, dst_heads, strict=True):
            for token in range(first_token, end_token):
                yield (
                    base,
                    src.address(base, src_blocks[token // src.block_size], src_head, token % src.block_size),
                    dst.address(base, dst_blocks[token // dst.block_size], dst_head, token % dst.block_size),
                )


def naive_runs(
    src: CacheGeometry,
    src_blocks: Sequence[int],
    dst: CacheGeometry,
    dst_blocks: Sequence[int],
    first_token: int,
    end_token: int,
    heads: tuple[range, range] | None = None,
) -> Runs:
    """The moves, joined wherever two continue each other at both sides within one region at each side."""
    src_region, dst_region = src.region_of_bases(), dst.region_of_bases()
    moves = sorted(
        (src_region[base], dst_region[base], s, d)
        for base, s, d in naive_moves(src, src_blocks, dst, dst_blocks, first_token, end_token, heads)
    )
    runs: list[tuple[int, int, int]] = []
    previous: tuple[int, int] | None = None
    for s_region, d_region, s, d in moves:
        if runs and previous == (s_region, d_region):
            s0, d0, length = runs[-1]
            if s == s0 + length and d == d0 + length:
                runs[-1] = (s0, d0, length + src.content_bytes)
                continue
        runs.append((s, d, src.content_bytes))
        previous = (s_region, d_region)
    return Runs.of(*runs)


def byte_map(runs: Runs) -> dict[int, int]:
    """Target byte -> source byte. Raises ValueError if a target byte is written twice."""
    found: dict[int, int] = {}
    for s, d, length in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        for i in range(length):
            if d + i in found:
                raise ValueError(f"byte {d + i:#x} is written twice")
            found[d + i] = s + i
    return found
