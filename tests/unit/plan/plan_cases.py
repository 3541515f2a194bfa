"""Random but valid geometries, block tables and transfers for the tests of the plan layer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvpush.plan.geometry import CacheGeometry

SRC_ORIGIN = 0x7F00_0000_0000
DST_ORIGIN = 0x7E00_0000_1000


def lay_out(
    order: tuple[str, ...],
    sizes: dict[str, int],
    content: int,
    paddings: tuple[int, ...],
    origin: int,
) -> CacheGeometry:
    """Unrolls the axes from the innermost outwards; `order` holds block, head, token and base, innermost first."""
    strides: dict[str, int] = {}
    extent = content
    for axis, padding in zip(order, paddings, strict=True):
        strides[axis] = extent + padding
        extent += strides[axis] * (sizes[axis] - 1)
    return CacheGeometry(
        bases=tuple(origin + i * strides["base"] for i in range(sizes["base"])),
        block_stride=strides["block"],
        head_stride=strides["head"],
        token_stride=strides["token"],
        content_bytes=content,
        num_blocks=sizes["block"],
        num_heads=sizes["head"],
        block_size=sizes["token"],
    )


ORDERS = {
    "HND": ("token", "head", "block", "base"),
    "NHD": ("head", "token", "block", "base"),
    "HND, layers in the block": ("token", "head", "base", "block"),
    "NHD, layers in the block": ("head", "token", "base", "block"),
    "layers in the head": ("token", "base", "head", "block"),
    "heads outermost": ("token", "block", "base", "head"),
    "tokens outermost": ("head", "block", "base", "token"),
}


def geometry_of(
    name: str, *, layers: int = 2, blocks: int = 8, heads: int = 2, block_size: int = 4, content: int = 8, origin: int
) -> CacheGeometry:
    """An unpadded layout by its name in ORDERS."""
    sizes = {"base": layers, "block": blocks, "head": heads, "token": block_size}
    return lay_out(ORDERS[name], sizes, content, (0, 0, 0, 0), origin)


@st.composite
def geometries(draw: st.DrawFn, *, layers: int, heads: int, content: int, origin: int) -> CacheGeometry:
    sizes = {
        "base": layers,
        "head": heads,
        "block": draw(st.integers(1, 9), label="num_blocks"),
        "token": draw(st.sampled_from([1, 2, 3, 4, 6]), label="block_size"),
    }
    order = draw(
        st.one_of(st.sampled_from(sorted(ORDERS.values())), st.permutations(["token", "head", "block", "base"]))
    )
    paddings = draw(st.one_of(st.just((0, 0, 0, 0)), st.tuples(*[st.sampled_from([0, 0, 1, 5])] * 4)))
    laid = lay_out(tuple(order), sizes, content, paddings, origin)
    shape = draw(st.sampled_from(["as is", "shuffled", "apart", "pairs"]), label="bases")
    bases = list(laid.bases)
    if shape == "shuffled":
        bases = draw(st.permutations(bases))
    elif shape == "apart":
        gaps = draw(st.lists(st.sampled_from([0, 0, 3, 64]), min_size=layers, max_size=layers))
        at, bases = origin, []
        for gap in gaps:
            at += gap
            bases.append(at)
            at += laid.extent_bytes
    elif shape == "pairs":
        # Two allocations, each with half of the layers in it.
        far = laid.extent_bytes + max(laid.bases) - origin + 16
        half = (layers + 1) // 2
        bases = [*laid.bases[:half], *(base + far for base in laid.bases[: layers - half])]
    return CacheGeometry(
        bases=tuple(bases),
        block_stride=laid.block_stride,
        head_stride=laid.head_stride,
        token_stride=laid.token_stride,
        content_bytes=content,
        num_blocks=laid.num_blocks,
        num_heads=heads,
        block_size=laid.block_size,
    )


@st.composite
def tables(draw: st.DrawFn, num_blocks: int, entries: int) -> list[int]:
    """`entries` different block ids below num_blocks."""
    kind = draw(st.sampled_from(["ascending", "descending", "random"]), label="table")
    if kind == "random":
        return draw(st.permutations(range(num_blocks)))[:entries]
    start = draw(st.integers(0, num_blocks - entries))
    ids = list(range(start, start + entries))
    return ids if kind == "ascending" else ids[::-1]


@dataclass(frozen=True)
class Transfer:
    src: CacheGeometry
    src_blocks: list[int]
    dst: CacheGeometry
    dst_blocks: list[int]
    first_token: int
    end_token: int
    heads: tuple[range, range] | None

    @property
    def args(self) -> tuple:
        return (
            self.src,
            self.src_blocks,
            self.dst,
            self.dst_blocks,
            self.first_token,
            self.end_token,
            self.heads,
        )


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    layers = draw(st.integers(1, 4), label="layers")
    content = draw(st.sampled_from([1, 4, 7]), label="content")
    src_heads = draw(st.integers(1, 3), label="source heads")
    dst_heads = draw(st.one_of(st.just(src_heads), st.integers(1, 3)), label="target heads")
    src = draw(geometries(layers=layers, heads=src_heads, content=content, origin=SRC_ORIGIN))
    dst = draw(geometries(layers=layers, heads=dst_heads, content=content, origin=DST_ORIGIN))
    heads = None
    if src_heads != dst_heads or draw(st.booleans(), label="choose heads"):
        count = draw(st.integers(1, min(src_heads, dst_heads)))
        s = draw(st.integers(0, src_heads - count))
        d = draw(st.integers(0, dst_heads - count))
        heads = (range(s, s + count), range(d, d + count))
    end = draw(st.integers(0, min(src.num_tokens, dst.num_tokens)), label="end token")
    first = draw(st.integers(0, end), label="first token")
    src_blocks = draw(tables(src.num_blocks, -(-end // src.block_size)))
    dst_blocks = draw(tables(dst.num_blocks, -(-end // dst.block_size)))
    return Transfer(src, src_blocks, dst, dst_blocks, first, end, heads)
