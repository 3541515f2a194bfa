"""The block pool of one engine, as vLLM orders it: freed blocks go to the end, the tail of a table first."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Reference counts and the prefix cache. Block 0 is never handed out.

    fresh: blocks that were handed out since the owner of the pool last cleared the list; they hold what others left.
    """

    def __init__(self, num_blocks: int, *, prefix_caching: bool) -> None:
        self.fresh: list[int] = []
        self._free: dict[int, None] = dict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._prefix_caching = prefix_caching
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._num_usable = num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def all_free(self) -> bool:
        return len(self._free) == self._num_usable

    def references(self, block: int) -> int:
        return self._references[block]

    def hit(self, keys: Sequence[int]) -> list[int]:
        """The cached blocks that hold the longest prefix. keys: of the whole blocks that may be hit."""
        found: list[int] = []
        if self._prefix_caching:
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                found.append(block)
        return found

    def available(self, hits: Sequence[int]) -> int:
        """Blocks that could be handed out beside these hits."""
        return len(self._free) - sum(not self._references[block] for block in hits)

    def touch(self, blocks: Sequence[int]) -> None:
        """Somebody else uses these cached blocks too."""
        for block in blocks:
            self._free.pop(block, None)
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """New blocks from the front; what they held is forgotten."""
        taken = []
        for _ in range(count):
            block = next(iter(self._free))
            del self._free[block]
            self.evict(block)
            self._references[block] = 1
            taken.append(block)
        self.fresh += taken
        return taken

    def cache(self, key: int, block: int) -> None:
        """From now on this block can be hit."""
        if self._prefix_caching and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def evict(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """Lets go of a table; returns the blocks that nobody uses any more."""
        freed = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] < 0:
                raise AssertionError(f"block {block} was given back twice")
            if not self._references[block]:
                self._free[block] = None
                freed.append(block)
        return freed

    def forget_cache(self) -> None:
        """`/reset_prefix_cache`."""
        self._block_of.clear()
        self._key_of.clear()
