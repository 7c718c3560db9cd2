"""Attention by the flash-attn package (FlashAttention 2), or by FlashAttention 3's own package.

Both read our cache as it is: [blocks, 256, num_kv_heads, head_dim] and block tables; 256 is the
page size that FlashAttention 2 demands.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from nanorunner.kernels.attention_batch import AttentionBatch


def flash_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """Return the attention output [tokens, num_heads, head_dim]; see kernels/attention.py.

    Raises ImportError when neither package is installed, ValueError on CPU tensors.
    """
    if not q.is_cuda:
        raise ValueError("attention backend flash_attn: needs an NVIDIA GPU; use torch")
    module = load_flash_attention()
    if module.__name__ == "flash_attn_interface":
        return _flash_attention_3(module, q, k_cache, v_cache, batch, scale)
    return _flash_attention_2(module, q, k_cache, v_cache, batch, scale)


@functools.cache
def load_flash_attention() -> ModuleType:
    """Import and return flash_attn (the PyPI package), or flash_attn_interface (version 3).

    Raises ImportError with the way out when neither is there.
    """
    reasons = []
    for name in ("flash_attn", "flash_attn_interface"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError(
        "attention backend flash_attn: no package found "
        f"({'; '.join(reasons)}); pip install flash-attn, or use the backend triton"
    )


def _flash_attention_2(
    module: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """The two calls of the PyPI package: one for pure decodes, one for everything else."""
    if batch.max_query_len == 1 and q.shape[0] == batch.seq_lens.shape[0]:
        decoded: torch.Tensor = module.flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=batch.seq_lens,
            block_table=batch.block_tables,
            softmax_scale=scale,
            causal=True,
        )
        return decoded.squeeze(1)
    # The varlen call wants running sums of the key lengths, starting at 0.
    key_start_loc = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    out: torch.Tensor = module.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=batch.query_start_loc,
        cu_seqlens_k=key_start_loc,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=scale,
        causal=True,
        block_table=batch.block_tables,
    )
    return out


def _flash_attention_3(
    module: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """FlashAttention 3 serves ragged queries and decodes through one call."""
    result = module.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=batch.seq_lens,
        page_table=batch.block_tables,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=batch.max_query_len,
        softmax_scale=scale,
        causal=True,
    )
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out
