"""How the pages of one base lie in memory, as numbers that a copy can be built from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import page_bytes

VECTOR_BYTES = 16
"""The widest load and store of a GPU thread; kernels need everything to be a multiple of it."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One base's pages. Everything in bytes; a page is [head, token, content] in the packed form.

    block_stride, head_stride, token_stride: between neighbours in the cache. contiguous: inside a block the cache has
    the order of the packed form, without gaps. alignment: the largest power of two, up to VECTOR_BYTES, that divides
    all of these and all bases.
    """

    page_bytes: int
    content_bytes: int
    num_heads: int
    block_size: int
    block_stride: int
    head_stride: int
    token_stride: int
    contiguous: bool
    alignment: int

    @classmethod
    def of(cls, geometry: CacheGeometry) -> PageLayout:
        """What a kernel needs to know of a cache. An axis with one entry takes the stride that closes the gap."""
        content, tokens, heads = geometry.content_bytes, geometry.block_size, geometry.num_heads
        token_stride = geometry.token_stride if tokens > 1 else content
        head_stride = geometry.head_stride if heads > 1 else tokens * token_stride
        block_stride = geometry.block_stride if geometry.num_blocks > 1 else page_bytes(geometry)
        steps = (content, token_stride, head_stride, block_stride, *geometry.bases)
        return cls(
            page_bytes=page_bytes(geometry),
            content_bytes=content,
            num_heads=heads,
            block_size=tokens,
            block_stride=block_stride,
            head_stride=head_stride,
            token_stride=token_stride,
            contiguous=token_stride == content and head_stride == tokens * content,
            alignment=math.gcd(VECTOR_BYTES, *steps),
        )
