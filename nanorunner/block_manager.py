"""Who holds which KV block. Rank 0 alone decides; the ranks only read and write where told.

    blank free    never published, or withdrawn: handed out first
    cached free   published and unused, least recently freed first: a later prompt may hit it,
                  else it is unmapped and handed out when no blank one is left
    used          references >= 1, one for each request whose table holds it

free + used = num_blocks after every call. Every move is O(1) for each block.
"""

from __future__ import annotations

from collections import OrderedDict

from nanorunner.prefix_cache import PrefixCache


class BlockManager:
    """Reference counts and the free lists of `num_blocks` KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks {num_blocks}: the KV cache needs at least 1 block")
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache()
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 leaves first
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that take() can hand out, cached ones included."""
        return len(self._blank) + len(self._cached)

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of these blocks would leave the free list if they were shared."""
        return sum(self._references[block] == 0 for block in blocks)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each, their old content unmapped."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                # Before anyone writes here: a stale mapping would serve one prompt another's KV.
                self.prefix_cache.forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add a reference to each of these published blocks, free or used."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each; `blocks` is one request's table, first position first.

        The last block is freed first, so that it is also reused first: a prefix without its
        beginning can never be hit.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if self._references[block] == 0:
                if block in self.prefix_cache:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def withdraw(self, block: int) -> None:
        """Unmap a block whose content never came to be; its users keep it."""
        self.prefix_cache.forget(block)
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise AssertionError unless the counts agree with these requests' block tables."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected == self._references, "references differ from the tables"
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert all(self._references[block] == 0 for block in free), "a free block is in use"
        used = sum(count > 0 for count in self._references)
        assert len(free) + used == self.num_blocks, f"{len(free)} free + {used} used"
        assert all(block in self.prefix_cache for block in self._cached), "cached, not mapped"
        assert not any(block in self.prefix_cache for block in self._blank), "blank, but mapped"
