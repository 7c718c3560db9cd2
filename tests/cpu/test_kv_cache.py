"""The KV cache has the layout that the arithmetic of its blocks assumes."""

from __future__ import annotations

import torch

from nanorunner.workers import kv_cache


def test_a_block_of_qwen3_0_6b_takes_29360128_bytes() -> None:
    # 28 layers, 8 KV heads of 128, bf16; at tp 4 each rank holds 2 of the heads
    assert kv_cache.block_bytes(28, 8, 128, 2) == 29_360_128
    assert kv_cache.block_bytes(28, 2, 128, 2) == 7_340_032


def test_slot_2603_is_token_299_of_the_block_table_5_10() -> None:
    cache = kv_cache.allocate(2, 11, 3, 4, torch.float32, torch.device("cpu"))
    assert cache.shape == (2, 2, 11, 256, 3, 4)
    cache.zero_()
    cache[0, 1].view(-1, 3, 4)[2603] = 1.0
    block_table, position = [5, 10], 299
    assert bool((cache[0, 1, block_table[position // 256], position % 256] == 1.0).all())
    assert cache.sum() == 12  # one slot and nothing else
