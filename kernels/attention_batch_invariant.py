"""Paged attention whose every token is the same, bit for bit, alone, in a batch or in a chunk.

What it sums, and in which order, follows from the token's own position: on a GPU tiles of a fixed
number of KV tokens, from the first to the last, in one program; a decode is a prompt of one token
in the same kernel, so that a preempted request, whose output is computed again as a prompt, gets
its old KV back. No split over the length: their number would follow from the batch.

On a CPU each token is an attention of its own. The backend's name is internal: --batch-invariant
puts it where "triton" or "torch" would be.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.prefill_attention import plan_prefill, prefill_attention
from nanorunner.kernels.triton_support import shared_bytes

BATCH_INVARIANT = "batch_invariant"


def batch_invariant_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """Return the attention output [tokens, num_heads, head_dim]; see kernels/attention.py."""
    is_cuda = q.is_cuda
    function = batch_invariant_attention_triton if is_cuda else batch_invariant_attention_reference
    return function(q, k_cache, v_cache, batch, scale)


def batch_invariant_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """batch_invariant_attention in the prompts' kernel, with a decode's plan for every batch."""
    group = q.shape[1] // k_cache.shape[2]
    plan = plan_prefill(1, group, q.shape[2], q.element_size(), shared_bytes(q.device))
    return prefill_attention(q, k_cache, v_cache, batch, scale, plan, masks_all=True)


def batch_invariant_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """batch_invariant_attention as a loop over the tokens, on the CPU."""
    starts: list[int] = batch.query_start_loc.tolist()
    seq_lens: list[int] = batch.seq_lens.tolist()
    block_tokens = k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for i, seq_len in enumerate(seq_lens):
        num_computed = seq_len - (starts[i + 1] - starts[i])
        if seq_len == 0:
            continue
        # Copies, like each query below: the same shapes at aligned addresses, whatever the batch.
        blocks = batch.block_tables[i, : -(-seq_len // block_tokens)].long()
        k = k_cache[blocks].flatten(0, 1)
        v = v_cache[blocks].flatten(0, 1)
        for token in range(starts[i], starts[i + 1]):
            num_visible = num_computed + token - starts[i] + 1
            out[token] = _attend(q[token], k[:num_visible], v[:num_visible], scale)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One token: q [num_heads, head_dim] over k, v [num_visible, num_kv_heads, head_dim]."""
    num_kv_heads = k.shape[1]
    grouped = q.reshape(1, num_kv_heads, -1, q.shape[1]).clone()
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale
    )
    return out.reshape(q.shape)
