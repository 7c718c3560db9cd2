"""The paged KV cache: one tensor, and the arithmetic of its blocks.

    kv [2, layers, blocks, 256, local_kv_heads, head_dim]
        0: K, 1: V      slot = block * 256 + offset finds a token inside kv[k_or_v, layer]

Token 299 of a sequence with block table [5, 10]: logical block 299 // 256 = 1, physical block 10,
offset 299 % 256 = 43, slot 10 * 256 + 43 = 2,603.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.huge_pages import use_huge_pages
from nanorunner.workers.messages import BLOCK_SIZE


def block_bytes(num_layers: int, local_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes that one block of 256 token slots takes on one rank, all layers."""
    return 2 * num_layers * BLOCK_SIZE * local_kv_heads * head_dim * itemsize


def allocate(
    num_layers: int,
    num_blocks: int,
    local_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return an uninitialised cache [2, layers, blocks, 256, local_kv_heads, head_dim].

    Owner: the runner. Place: the device. Lifetime: the engine's. Last writer: the attention
    layers of the newest step. Slots that no token has reached hold junk, which no kernel may use.
    """
    shape = (2, num_layers, num_blocks, BLOCK_SIZE, local_kv_heads, head_dim)
    cache = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        use_huge_pages([cache], is_filled=False)
    return cache
