"""Compiles the copy kernel for an H100 or H200, which needs no GPU. Prints how many global loads and stores of pages it
holds that are 16 bytes wide, and how many are not."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpush.transfer.packing.copy_kernel import LaunchShape, constants
from kvpush.transfer.packing.kernels import copy_pages
from kvpush.transfer.packing.pages import PageLayout


class _Paged:
    """Side without a table in memory."""

    def __init__(self, paged: bool, block_stride: int) -> None:
        self.table = object() if paged else None
        self.block_stride = block_stride


def compiled(source: bool, target: bool, layout: PageLayout) -> str:
    shape = LaunchShape()
    values = constants(_Paged(source, layout.block_stride), _Paged(target, layout.block_stride), layout, shape)
    names = list(copy_pages.arg_names)
    kinds = {"source": "*i64", "source_ids": "*i32", "target": "*i64", "target_ids": "*i32"}
    signature = {name: "constexpr" if name in values else kinds.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in kinds}
    ast = ASTSource(copy_pages, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    kernel = triton.compile(ast, target=GPUTarget("cuda", 90, 32), options={"num_warps": shape.num_warps})
    return str(kernel.asm["ptx"])


def main() -> None:
    page = 32 * 1024
    whole = PageLayout(page, 256, 8, 16, page, 4096, 256, contiguous=True, alignment=16)
    tokens_outside = PageLayout(page, 256, 8, 16, page, 256, 2048, contiguous=False, alignment=16)
    odd = PageLayout(18432, 1152, 1, 16, 18432, 18432, 1152, contiguous=True, alignment=16)
    wide = single = 0
    for source, target, layout in (
        (True, False, whole), (True, False, tokens_outside), (False, True, tokens_outside), (True, True, whole),
        (True, False, odd),
    ):  # fmt: skip
        for access in re.findall(r"(?:ld|st)\.global[.\w:]*", compiled(source, target, layout)):
            if ".v2.b64" in access or ".v4.b32" in access:
                wide += 1
            elif access.startswith("st"):
                single += 1  # single loads fetch ids and base addresses
    print(wide, single)


if __name__ == "__main__":
    main()
