"""Wire form of a block table: the block ids of one request in one KV cache group, in token order.

One tag byte, then either every id (4 bytes, little endian) or runs of neighbouring ids (8 bytes each: first id, count;
the count is negative if the ids descend), whichever is smaller. vLLM's tables are mostly runs, so that thousands of
blocks fit into one message.
"""

from __future__ import annotations

import numpy as np

from kvpush.plan.geometry import MAX_BLOCKS
from kvpush.plan.runs import BlockIds, Ints

_PLAIN, _RUNS = b"\x00", b"\x01"
_RUN = np.dtype([("first", "<u4"), ("count", "<i4")])


def encode_blocks(ids: BlockIds) -> bytes:
    """Encodes block ids, in order, repeats allowed. At most 1 + 4 * len(ids) bytes.

    Raises ValueError naming the entry if one is no int from 0 to 2**31 - 2.
    """
    table = np.asarray(ids)
    if not len(table):
        return _PLAIN
    if table.ndim != 1 or table.dtype.kind not in "iu":
        raise ValueError(f"block ids must be a list of ints, not {table.dtype} of {table.ndim} axes")
    outside = np.flatnonzero((table < 0) | (table >= MAX_BLOCKS))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"block id [{at}] is {table[at]}, must be 0 to {MAX_BLOCKS - 1}")
    runs = _runs_of(table.astype(np.int64))
    if runs.nbytes < 4 * len(table):
        return _RUNS + runs.tobytes()
    return _PLAIN + table.astype("<u4").tobytes()


def decode_blocks(data: bytes, num_blocks: int) -> Ints:
    """Decodes a table for a cache of `num_blocks` blocks; returns the ids, shape [n], n <= num_blocks.

    Raises ValueError saying what is wrong with bytes that are no table of that cache. Nothing is expanded before its
    size is known to be allowed, so a short message cannot ask for much memory.
    """
    tag, body = data[:1], data[1:]
    if tag == _PLAIN:
        if len(body) % 4:
            raise ValueError(f"block table: {len(body)} bytes are no whole number of ids")
        ids = np.frombuffer(body, "<u4").astype(np.int64)
        if len(ids) > num_blocks:
            raise ValueError(f"block table: {len(ids)} blocks, the cache has {num_blocks}")
    elif tag == _RUNS:
        if len(body) % _RUN.itemsize:
            raise ValueError(f"block table: {len(body)} bytes are no whole number of runs")
        ids = _expand(np.frombuffer(body, _RUN), num_blocks)
    else:
        raise ValueError(f"block table: unknown tag {tag!r}" if tag else "block table: no bytes")
    outside = np.flatnonzero((ids < 0) | (ids >= num_blocks))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"block table: entry {at} is {ids[at]}, the cache has {num_blocks} blocks")
    return ids


def _runs_of(table: Ints) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    step = np.diff(table)
    neighbours = np.abs(step) == 1
    # An entry starts a run unless it goes on from the one before, in the direction that run has.
    starts = np.ones(len(table), dtype=bool)
    starts[1:] = ~neighbours
    starts[2:] |= neighbours[:-1] & (step[1:] != step[:-1])
    at = np.flatnonzero(starts)
    counts = np.diff(at, append=len(table))
    runs = np.empty(len(at), _RUN)
    runs["first"] = table[at]
    descending = np.zeros(len(at), dtype=bool)
    longer = counts > 1
    descending[longer] = step[at[longer]] < 0
    runs["count"] = np.where(descending, -counts, counts)
    return runs


def _expand(runs: np.ndarray[tuple[int], np.dtype[np.void]], num_blocks: int) -> Ints:
    counts = np.abs(runs["count"].astype(np.int64))
    if not counts.all():
        raise ValueError(f"block table: run {int(np.flatnonzero(counts == 0)[0])} is empty")
    total = int(counts.sum())
    if total > num_blocks:
        raise ValueError(f"block table: {total} blocks, the cache has {num_blocks}")
    first = runs["first"].astype(np.int64)
    direction = np.sign(runs["count"]).astype(np.int64)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    expanded: Ints = np.repeat(first, counts) + within * np.repeat(direction, counts)
    return expanded
