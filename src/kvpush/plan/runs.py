"""Which bytes go where: the runs between two paged KV caches.

A run is contiguous at both sides, and descriptors cost more than bytes, so runs are made as long as they can be. The
order of pieces is free: block tables are sorted by source block first, because vLLM frees blocks in reverse and hands
them out from the front, so that its tables often run downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpush.plan.geometry import CacheGeometry

Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]
BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Byte ranges to copy. src, dst: addresses; length: bytes; each uint64 of shape [n], else ValueError."""

    src: Addresses
    dst: Addresses
    length: Addresses

    def __post_init__(self) -> None:
        for name in ("src", "dst", "length"):
            array = getattr(self, name)
            if array.dtype != np.uint64 or array.shape != (len(self.src),):
                raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected uint64 [{len(self.src)}]")

    def __len__(self) -> int:
        return len(self.src)

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())

    @classmethod
    def of(cls, *runs: tuple[int, int, int]) -> Runs:
        """From (src, dst, length) triples; `Runs.of()` is empty."""
        columns = np.array(runs, dtype=np.uint64).reshape(-1, 3).T.copy()
        return cls(columns[0], columns[1], columns[2])


def plan_runs(
    src: CacheGeometry,
    src_blocks: BlockIds,
    dst: CacheGeometry,
    dst_blocks: BlockIds,
    first_token: int,
    end_token: int,
    heads: tuple[range, range] | None = None,
) -> Runs:
    """The runs that carry tokens [first_token, end_token) from one cache to another.

    Token t of the request sits at blocks[t // block_size], slot t % block_size, with each side's own block size.
    Entries of the tables that hold none of these tokens are not looked at. heads: (source heads, target heads), equally
    many; without it all heads, which must then be equally many at both sides.

    No byte is moved twice. Runs are maximal: no two continue each other at both sides (ranges of different `regions()`
    never continue each other, because they may be registered apart). Within a region they ascend by source address.
    Equal block sizes are the fast path; others are cut and sorted piece by piece.

    Raises ValueError if the geometries cannot be paired, or if a table is too short, names a block out of range or one
    block twice.
    """
    if src.content_bytes != dst.content_bytes:
        raise ValueError(f"content_bytes differ: source {src.content_bytes}, target {dst.content_bytes}")
    if len(src.bases) != len(dst.bases):
        raise ValueError(f"number of bases differs: source {len(src.bases)}, target {len(dst.bases)}")
    src_heads, dst_heads = _checked_heads(src, dst, heads)
    if not 0 <= first_token <= end_token:
        raise ValueError(f"tokens [{first_token}, {end_token}) are no range")
    s_blocks = _checked_blocks("src_blocks", src_blocks, src, first_token, end_token)
    d_blocks = _checked_blocks("dst_blocks", dst_blocks, dst, first_token, end_token)
    if first_token == end_token or not len(src_heads):
        return Runs.of()
    head = _Axis(_steps(src_heads, src.head_stride), _steps(dst_heads, dst.head_stride))

    groups: dict[tuple[int, int], list[int]] = {}
    for i, pair in enumerate(zip(src.region_of_bases(), dst.region_of_bases(), strict=True)):
        groups.setdefault(pair, []).append(i)
    sides = (src, s_blocks, dst, d_blocks, first_token, end_token, head)
    if len(groups) == len(src.bases):
        # Nothing to merge between bases: one of them planned, and the rest shifted.
        one = _plan_group(*sides, _Axis(np.zeros(1, np.int64), np.zeros(1, np.int64)))
        base = _base_axis(src, dst, range(len(src.bases)))
        pieces = _Pieces(
            (base.src[:, None] + one.src).ravel(),
            (base.dst[:, None] + one.dst).ravel(),
            np.tile(one.length, len(base.src)),
        )
    else:
        pieces = _concatenate([_plan_group(*sides, _base_axis(src, dst, members)) for members in groups.values()])
    return Runs(pieces.src.view(np.uint64), pieces.dst.view(np.uint64), pieces.length.view(np.uint64))


class _Axis(NamedTuple):
    """Byte offsets of the entries of one axis at both sides, ascending at the source."""

    src: Ints
    dst: Ints


class _Pieces(NamedTuple):
    src: Ints
    dst: Ints
    length: Ints


def _checked_heads(src: CacheGeometry, dst: CacheGeometry, heads: tuple[range, range] | None) -> tuple[range, range]:
    if heads is None:
        if src.num_heads != dst.num_heads:
            raise ValueError(f"num_heads differ: source {src.num_heads}, target {dst.num_heads}; name the heads")
        return range(src.num_heads), range(dst.num_heads)
    for chosen, there, side in ((heads[0], src.num_heads, "source"), (heads[1], dst.num_heads, "target")):
        if chosen.step != 1 or (len(chosen) and not 0 <= chosen.start < chosen.stop <= there):
            raise ValueError(f"{side} heads {chosen} are not a range within {there} heads")
    if len(heads[0]) != len(heads[1]):
        raise ValueError(f"heads {heads[0]} and {heads[1]} are not equally many")
    return heads


def _checked_blocks(name: str, blocks: BlockIds, cache: CacheGeometry, first_token: int, end_token: int) -> Ints:
    """The entries that hold the tokens, checked."""
    size = cache.block_size
    first, end = first_token // size, -(-end_token // size)
    if len(blocks) < end:
        raise ValueError(f"{name} has {len(blocks)} entries, {end_token} tokens in blocks of {size} need {end}")
    used = np.asarray(blocks[first:end])
    if first >= end:
        return np.zeros(0, np.int64)
    if used.ndim != 1 or used.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a list of ints, not {used.dtype} of {used.ndim} axes")
    outside = np.flatnonzero((used < 0) | (used >= cache.num_blocks))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"{name}[{first + at}] is {used[at]}, the cache has {cache.num_blocks} blocks")
    ids = used.astype(np.int64)
    ordered = np.sort(ids)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise ValueError(f"{name} names block {ordered[twice[0]]} twice")
    return ids


def _steps(indices: range, stride: int) -> Ints:
    return np.arange(indices.start, indices.stop, dtype=np.int64) * stride


def _base_axis(src: CacheGeometry, dst: CacheGeometry, members: Sequence[int]) -> _Axis:
    s = np.array([src.bases[i] for i in members], dtype=np.int64)
    d = np.array([dst.bases[i] for i in members], dtype=np.int64)
    order = np.argsort(s)
    return _Axis(s[order], d[order])


def _plan_group(
    src: CacheGeometry,
    src_blocks: Ints,
    dst: CacheGeometry,
    dst_blocks: Ints,
    first_token: int,
    end_token: int,
    head: _Axis,
    base: _Axis,
) -> _Pieces:
    """Plans bases that may merge with each other."""
    if src.block_size == dst.block_size:
        nesting = _nesting(src, base)
        if nesting is not None and "token" in nesting[: nesting.index("block")]:
            return _plan_nested(src, src_blocks, dst, dst_blocks, first_token, end_token, head, base, nesting)
    return _plan_sorted(src, src_blocks, dst, dst_blocks, first_token, end_token, head, base)


def _nesting(src: CacheGeometry, base: _Axis) -> list[str] | None:
    """Names of the source's axes from the innermost outwards, each stepping over all of the one before.

    None if the bases do not fit between the other axes; the others always nest, by the geometry's own check.
    """
    gaps = np.diff(base.src)
    axes = [
        # Axes of one entry never step; the stride 0 sorts them to the inside.
        (src.token_stride if src.block_size > 1 else 0, 0, "token", src.block_size - 1),
        (src.head_stride if src.num_heads > 1 else 0, 1, "head", src.num_heads - 1),
        (int(gaps.min()) if len(gaps) else 0, 2, "base", 0),
        (src.block_stride if src.num_blocks > 1 else 0, 3, "block", src.num_blocks - 1),
    ]
    extent = src.content_bytes
    names = []
    for stride, _, name, steps in sorted(axes):
        if stride and stride < extent:
            return None
        extent += int(base.src[-1] - base.src[0]) if name == "base" else stride * steps
        names.append(name)
    return names


def _plan_nested(
    src: CacheGeometry,
    src_blocks: Ints,
    dst: CacheGeometry,
    dst_blocks: Ints,
    first_token: int,
    end_token: int,
    head: _Axis,
    base: _Axis,
    nesting: list[str],
) -> _Pieces:
    """Equal block sizes: pieces come out sorted by source address because the axes are unrolled in that order."""
    place = nesting.index("block")
    others = {"head": head, "base": base}

    def inside_block(first_slot: int, end_slot: int) -> _Pieces:
        slots = range(first_slot, end_slot)
        token = _Axis(_steps(slots, src.token_stride), _steps(slots, dst.token_stride))
        zero = np.zeros(1, np.int64)
        pieces = _Pieces(zero, zero, np.full(1, src.content_bytes, np.int64))
        for name in nesting[:place]:
            pieces = _repeat(pieces, token if name == "token" else others[name])
        return pieces

    order = np.argsort(src_blocks)
    block = _Axis(src_blocks[order] * src.block_stride, dst_blocks[order] * dst.block_stride)
    parts = []
    for first, end, first_slot, end_slot in _even_stretches(order, first_token, end_token, src.block_size):
        stretch = _Axis(block.src[first:end], block.dst[first:end])
        parts.append(_repeat(inside_block(first_slot, end_slot), stretch))
    pieces = parts[0] if len(parts) == 1 else _merge(_concatenate(parts))
    for name in nesting[place + 1 :]:
        pieces = _repeat(pieces, others[name])
    return pieces


def _even_stretches(order: Ints, first_token: int, end_token: int, size: int) -> list[tuple[int, int, int, int]]:
    """(first, end, first slot, end slot) of stretches of the sorted table in which every block is used alike.

    Only the first and the last block of the table can be partly used, wherever sorting has put them.
    """
    last = len(order) - 1
    partial: dict[int, tuple[int, int]] = {}
    first_slot, end_slot = first_token % size, end_token - (end_token - 1) // size * size
    if first_slot:
        partial[0] = (first_slot, end_slot if last == 0 else size)
    if end_slot < size:
        partial[last] = (first_slot if last == 0 else 0, end_slot)
    stretches = []
    done = 0
    for at in sorted(int(np.flatnonzero(order == entry)[0]) for entry in partial):
        if at > done:
            stretches.append((done, at, 0, size))
        stretches.append((at, at + 1, *partial[int(order[at])]))
        done = at + 1
    if done < len(order):
        stretches.append((done, len(order), 0, size))
    return stretches


def _plan_sorted(
    src: CacheGeometry,
    src_blocks: Ints,
    dst: CacheGeometry,
    dst_blocks: Ints,
    first_token: int,
    end_token: int,
    head: _Axis,
    base: _Axis,
) -> _Pieces:
    """Any geometry: cut into pieces that are whole at both sides, sort them all, merge."""
    tokens = np.arange(first_token, end_token, dtype=np.int64)
    length = src.content_bytes
    if src.token_stride == dst.token_stride == length:
        # Tokens of a stretch that crosses no block border at either side lie together.
        unit = gcd(src.block_size, dst.block_size)
        tokens = tokens[(tokens % unit == 0) | (tokens == first_token)]
    counts = np.diff(tokens, append=end_token)
    s_first, d_first = first_token // src.block_size, first_token // dst.block_size
    s = src_blocks[tokens // src.block_size - s_first] * src.block_stride + tokens % src.block_size * src.token_stride
    d = dst_blocks[tokens // dst.block_size - d_first] * dst.block_stride + tokens % dst.block_size * dst.token_stride
    all_src = (base.src[:, None, None] + head.src[:, None] + s).ravel()
    all_dst = (base.dst[:, None, None] + head.dst[:, None] + d).ravel()
    lengths = np.tile(counts * length, len(base.src) * len(head.src))
    order = np.argsort(all_src)
    return _merge(_Pieces(all_src[order], all_dst[order], lengths[order]))


def _concatenate(parts: Sequence[_Pieces]) -> _Pieces:
    return _Pieces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _merge(pieces: _Pieces) -> _Pieces:
    """Joins neighbours that continue each other; pieces sorted by source address."""
    src, dst, length = pieces
    starts = np.ones(len(src), dtype=bool)
    starts[1:] = (src[1:] != src[:-1] + length[:-1]) | (dst[1:] != dst[:-1] + length[:-1])
    at = np.flatnonzero(starts)
    if len(at) == len(src):
        return pieces
    return _Pieces(src[at], dst[at], np.add.reduceat(length, at))


def _repeat(pieces: _Pieces, axis: _Axis) -> _Pieces:
    """The pieces at every entry of an axis outside them. They are merged already, so only seams can still merge."""
    k, n = len(pieces.src), len(axis.src)
    whole = _Pieces(
        (axis.src[:, None] + pieces.src).ravel(),
        (axis.dst[:, None] + pieces.dst).ravel(),
        np.tile(pieces.length, n),
    )
    seam = np.diff(axis.src) == pieces.src[-1] + pieces.length[-1] - pieces.src[0]
    seam &= np.diff(axis.dst) == pieces.dst[-1] + pieces.length[-1] - pieces.dst[0]
    if not seam.any():
        return whole
    starts = np.ones(n * k, dtype=bool)
    starts[k::k] = ~seam
    at = np.flatnonzero(starts)
    return _Pieces(whole.src[at], whole.dst[at], np.add.reduceat(whole.length, at))
