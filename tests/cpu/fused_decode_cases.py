"""Inputs of the fused decode's tests: a paged cache that lacks the step's own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_cases import BLOCK_TOKENS, DEVICE, attention_case, normal

from nanorunner.kernels.attention_batch import AttentionBatch

MAX_LEN = 5000


@dataclass
class FusedCase:
    """One call of fused_decode."""

    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    heads: tuple[int, int, int]
    norms: tuple[torch.Tensor | None, torch.Tensor | None]

    @property
    def arguments(self) -> dict[str, Any]:
        """Return fused_decode's arguments by name."""
        num_heads, num_kv_heads, head_dim = self.heads
        q_norm, k_norm = self.norms
        return {
            "qkv": self.qkv,
            "positions": self.positions,
            "cos_sin": self.cos_sin,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "batch": self.batch,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "eps": 1e-6,
            "scale": head_dim**-0.5,
        }

    def copy(self) -> FusedCase:
        """Return a case of equal contents, whose qkv and caches are others."""
        return replace(
            self,
            qkv=self.qkv.clone(),
            k_cache=self.k_cache.clone(),
            v_cache=self.v_cache.clone(),
        )


def fused_case(
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    has_norm: bool = True,
    padded_requests: int = 0,
) -> FusedCase:
    """Return a decode of requests of these lengths, the new token included.

    The slots of the new tokens, like all that nobody wrote, hold NaN; padded requests have junk
    tables, slot -1 and position 0.
    """
    num_heads, num_kv_heads, head_dim = heads
    requests = [(1, length) for length in lengths] or [(1, 1)]
    case = attention_case(requests, heads, dtype, padded_requests, padded_requests)
    num_reqs = len(requests) + padded_requests
    positions = torch.zeros(num_reqs, dtype=torch.int64)
    slots = torch.full((num_reqs,), -1)
    for i, (_, length) in enumerate(requests):
        block = int(case.batch.block_tables[i, (length - 1) // BLOCK_TOKENS])
        positions[i] = length - 1
        slots[i] = block * BLOCK_TOKENS + (length - 1) % BLOCK_TOKENS
    for cache in (case.k_cache, case.v_cache):
        cache.view(-1, num_kv_heads, head_dim)[slots[: len(requests)].to(DEVICE)] = torch.nan
    angle = torch.arange(float(MAX_LEN))[:, None] * 10000 ** -(
        torch.arange(0, head_dim, 2) / head_dim
    )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    gains = (normal(head_dim, dtype=dtype), normal(head_dim + 1, dtype=dtype)[:-1])
    return FusedCase(
        normal(num_reqs, width + 16, dtype=dtype)[:, :width],
        positions.to(DEVICE),
        torch.cat((angle.cos(), angle.sin()), dim=1).to(DEVICE),
        case.k_cache,
        case.v_cache,
        case.batch._replace(slot_mapping=slots.to(DEVICE)),
        heads,
        gains if has_norm else (None, None),
    )


def assert_cache(actual: FusedCase, expected: FusedCase, tolerance: float) -> None:
    """Fail unless both wrote the same tokens' K and V, and nothing else."""
    for name in ("k_cache", "v_cache"):
        pair = (getattr(actual, name), getattr(expected, name))
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance, equal_nan=True)
