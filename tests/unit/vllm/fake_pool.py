"""Blocks as vLLM's pool hands them out: reference counts, and a prefix cache over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BLOCK = 4


class Pool:
    """Blocks with reference counts, and the prefix cache over them. Block 0 is never handed out."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool) -> None:
        self.free = list(range(1, num_blocks))
        self._references = dict.fromkeys(self.free, 0)
        self._prefix_caching = prefix_caching
        self._cached: dict[tuple[int, ...], int] = {}
        self._prefix_of: dict[int, tuple[int, ...]] = {}

    def hit(self, tokens: Sequence[int]) -> list[int]:
        """The cached blocks that hold a prefix, at most all but the last token."""
        found = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self._cached.get(tuple(tokens[:end])) if self._prefix_caching else None
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, count: int, hits: Iterable[int] = ()) -> bool:
        return len(self.free) - sum(self._references[block] == 0 for block in hits) >= count

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int]:
        for block in hits:
            if self._references[block] == 0:
                self.free.remove(block)
            self._references[block] += 1
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        for block in taken:
            self._cached.pop(self._prefix_of.pop(block, ()), None)
            self._references[block] = 1
        return [*hits, *taken]

    def cache(self, tokens: Sequence[int], blocks: Sequence[int], num_computed: int) -> None:
        """The blocks that are full after num_computed tokens can be hit from now on."""
        for i in range(min(num_computed, len(tokens)) // BLOCK if self._prefix_caching else 0):
            prefix = tuple(tokens[: (i + 1) * BLOCK])
            if prefix not in self._cached and blocks[i] not in self._prefix_of:
                self._cached[prefix] = blocks[i]
                self._prefix_of[blocks[i]] = prefix

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was given back twice"
            if self._references[block] == 0:
                self.free.append(block)

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cached.pop(self._prefix_of.pop(block, ()), None)

    def reset(self) -> None:
        self._cached.clear()
        self._prefix_of.clear()

    def held(self, block: int) -> bool:
        return self._references.get(block, 0) > 0
