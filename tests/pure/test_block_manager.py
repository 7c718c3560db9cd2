"""Blocks are conserved, never shared by accident, and reused in the order that keeps prefixes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nanorunner.block_manager import BlockManager


def test_every_block_leaves_once_and_comes_back() -> None:
    blocks = BlockManager(4)
    table = blocks.take(4)
    assert sorted(table) == [0, 1, 2, 3]
    assert blocks.num_free == 0
    blocks.release(table)
    assert blocks.num_free == 4
    blocks.check_integrity([])


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks 0"):
        BlockManager(0)


def test_releasing_twice_is_found() -> None:
    blocks = BlockManager(2)
    table = blocks.take(1)
    blocks.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(table)


def test_a_shared_block_stays_until_its_last_user_leaves() -> None:
    blocks = BlockManager(2)
    table = blocks.take(1)
    blocks.prefix_cache.publish(table[0], b"a")
    blocks.share(table)
    blocks.release(table)
    assert blocks.num_free == 1
    blocks.check_integrity([table])
    blocks.release(table)
    assert blocks.num_free == 2


def test_a_published_block_is_reused_only_when_no_blank_one_is_left() -> None:
    blocks = BlockManager(3)
    first = blocks.take(1)
    blocks.prefix_cache.publish(first[0], b"a")
    blocks.release(first)
    assert not set(blocks.take(2)) & set(first)
    assert blocks.prefix_cache.match([b"a"], 1) == first
    assert blocks.take(1) == first
    assert blocks.prefix_cache.match([b"a"], 1) == []


def test_the_end_of_a_prefix_is_reused_before_its_beginning() -> None:
    blocks = BlockManager(3)
    table = blocks.take(3)
    for block, digest in zip(table, [b"a", b"b", b"c"], strict=True):
        blocks.prefix_cache.publish(block, digest)
    blocks.release(table)
    assert blocks.take(1) == table[2:]
    assert blocks.prefix_cache.match([b"a", b"b", b"c"], 3) == table[:2]


def test_a_hit_on_a_free_block_is_charged() -> None:
    blocks = BlockManager(2)
    table = blocks.take(1)
    blocks.prefix_cache.publish(table[0], b"a")
    blocks.release(table)
    assert blocks.num_free_among(table) == 1
    blocks.share(table)
    assert blocks.num_free_among(table) == 0
    assert blocks.num_free == 1


def test_a_withdrawn_block_cannot_be_hit_used_or_free() -> None:
    blocks = BlockManager(2)
    used, free = blocks.take(1), blocks.take(1)
    blocks.prefix_cache.publish(used[0], b"a")
    blocks.prefix_cache.publish(free[0], b"b")
    blocks.release(free)
    blocks.withdraw(used[0])
    blocks.withdraw(free[0])
    assert blocks.prefix_cache.match([b"a"], 1) == blocks.prefix_cache.match([b"b"], 1) == []
    blocks.check_integrity([used])
    blocks.release(used)
    assert blocks.num_free == 2


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 7))),
)
@settings(max_examples=150, derandomize=True)
def test_free_and_used_always_add_up(num_blocks: int, script: list[tuple[str, int]]) -> None:
    blocks, tables = BlockManager(num_blocks), []
    for number, (action, value) in enumerate(script):
        if action == "take" and value <= blocks.num_free:
            table = blocks.take(value)
            for index, block in enumerate(table):
                blocks.prefix_cache.publish(block, bytes([number % 256, index, number // 256]))
            tables.append(table)
        elif action == "share" and tables:
            table = tables[value % len(tables)][:2]
            blocks.share(table)
            tables.append(table)
        elif action == "release" and tables:
            blocks.release(tables.pop(value % len(tables)))
        blocks.check_integrity(tables)
