"""The Triton kernel behind packing, unpacking and the copy into a peer's cache: it moves pages, 16 bytes a thread.

Pages of a paged cache are found through a table of base addresses and a list of block ids; packed pages lie one after
the other. Each side may be either, so one kernel does all three.
"""

import triton
import triton.language as tl


@triton.jit
def _word_in_page(
    word,
    CONTIGUOUS: tl.constexpr,
    TOKENS: tl.constexpr,
    CONTENT_WORDS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Where the word-th word of a packed page stands in a page of the cache, in words."""
    if CONTIGUOUS:
        place = word
    else:
        row = word // CONTENT_WORDS
        head = (row // TOKENS).to(tl.int64)
        token = (row % TOKENS).to(tl.int64)
        place = head * HEAD_STRIDE + token * TOKEN_STRIDE + word % CONTENT_WORDS
    return place


@triton.jit
def _page_address(table, ids, base, place, PAGED: tl.constexpr, STRIDE: tl.constexpr, first, PAGE_BYTES: tl.constexpr):
    """The byte address of one page: of block ids[place] of the base, or of the packed page `first`."""
    if PAGED:
        address = tl.load(table + base) + tl.load(ids + place).to(tl.int64) * STRIDE
    else:
        address = table.to(tl.int64) + first.to(tl.int64) * PAGE_BYTES
    return address


@triton.jit(do_not_specialize=["num_blocks", "num_bases"])
def copy_pages(
    source,
    source_ids,
    target,
    target_ids,
    num_blocks,
    num_bases,
    SOURCE_PAGED: tl.constexpr,
    TARGET_PAGED: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    TARGET_STRIDE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    TOKENS: tl.constexpr,
    CONTENT_WORDS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Copies num_bases * num_blocks pages of PAGE_WORDS words (8 bytes).

    source, target: for a paged side the int64 base addresses (bytes), for a packed side its first word. ids: int32
    block ids of a paged side, ignored for a packed one. Block strides in bytes, strides inside a block in words. CHUNK:
    words that a program moves at once, a power of two. The grid has NUM_PROGRAMS programs, each walks over the pages.
    """
    CHUNKS: tl.constexpr = (PAGE_WORDS + CHUNK - 1) // CHUNK
    PAGE_BYTES: tl.constexpr = PAGE_WORDS * 8
    units = num_bases * num_blocks * CHUNKS
    lanes = tl.arange(0, CHUNK)
    start = tl.program_id(0)
    count = tl.maximum(num_blocks, 1)
    last = tl.maximum(units - 1, 0)

    page = tl.minimum(start, last) // CHUNKS
    source_page = _page_address(
        source, source_ids, page // count, page % count, SOURCE_PAGED, SOURCE_STRIDE, page, PAGE_BYTES
    )
    target_page = _page_address(
        target, target_ids, page // count, page % count, TARGET_PAGED, TARGET_STRIDE, page, PAGE_BYTES
    )
    for unit in range(start, units, NUM_PROGRAMS):
        # The next page's address is fetched while this page's bytes are on their way: with few programs the wait for
        # it would show.
        page = tl.minimum(unit + NUM_PROGRAMS, last) // CHUNKS
        next_source = _page_address(
            source, source_ids, page // count, page % count, SOURCE_PAGED, SOURCE_STRIDE, page, PAGE_BYTES
        )
        next_target = _page_address(
            target, target_ids, page // count, page % count, TARGET_PAGED, TARGET_STRIDE, page, PAGE_BYTES
        )
        word = (unit % CHUNKS) * CHUNK + lanes
        inside = _word_in_page(word, CONTIGUOUS, TOKENS, CONTENT_WORDS, HEAD_STRIDE, TOKEN_STRIDE)
        # Without these hints nothing is known of an address that was read from memory, and single words are moved.
        source_words = tl.multiple_of(source_page.to(tl.pointer_type(tl.int64)), 16)
        target_words = tl.multiple_of(target_page.to(tl.pointer_type(tl.int64)), 16)
        source_at = source_words + (inside if SOURCE_PAGED else word)
        target_at = target_words + (inside if TARGET_PAGED else word)
        if PAGE_WORDS % CHUNK == 0:
            tl.store(target_at, tl.load(source_at))
        else:
            tl.store(target_at, tl.load(source_at, mask=word < PAGE_WORDS), mask=word < PAGE_WORDS)
        source_page = next_source
        target_page = next_target
