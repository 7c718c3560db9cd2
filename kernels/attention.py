"""Causal attention over a paged KV cache: the one call of a model, and its plain PyTorch form.

    q [tokens, num_heads, head_dim]    request after request, as query_start_loc says
    k_cache, v_cache [blocks, 256, num_kv_heads, head_dim]    by way of block_tables

Query token j of request i sits at position seq_len_i - query_len_i + j and sees every position up
to its own. The step's own K and V are in the cache before this is called. Slots past a request's
length may hold anything, NaN included, and table entries past it may be out of range: no backend
may let them reach a result.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.attention_batch_invariant import (
    BATCH_INVARIANT,
    batch_invariant_attention,
)
from nanorunner.kernels.decode_attention import decode_attention
from nanorunner.kernels.flash_attention import flash_attention
from nanorunner.kernels.hopper_prefill import hopper_prefill_attention, serves
from nanorunner.kernels.prefill_attention import prefill_attention

BACKENDS = ("torch", "triton", "flash_attn")
# So many decodes of a mixed batch are worth a launch of their own (on an H200 from 2 to 8 on, by
# shape); fewer are rows of tiles for prompts.
LEAST_DECODES = 4


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    backend: str,
    reads_early: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [tokens, num_heads, head_dim], contiguous, in q's dtype.

    q may be a strided view whose heads and elements lie side by side (a slice of the qkv rows).
    Rows that belong to no request are zero. reads_early: what decode_attention means by it. out:
    where to write, contiguous; a backend that has an output of its own copies it there. Raises
    ValueError for an unknown backend, ImportError when flash_attn or Triton is asked for and
    missing.
    """
    if backend == "triton":
        # Padded graphs included: there row i is request i. Other shapes need the general kernel.
        is_decode = batch.max_query_len == 1 and q.shape[0] == batch.seq_lens.shape[0]
        if is_decode:
            return decode_attention(
                q, k_cache, v_cache, batch, scale, reads_early=reads_early, out=out
            )
        return _mixed_attention(q, k_cache, v_cache, batch, scale, out)
    if backend == "torch":
        result = paged_attention_reference(q, k_cache, v_cache, batch, scale)
    elif backend == "flash_attn":
        result = flash_attention(q, k_cache, v_cache, batch, scale)
    elif backend == BATCH_INVARIANT:
        result = batch_invariant_attention(q, k_cache, v_cache, batch, scale)
    else:
        raise ValueError(f"attention backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    return result if out is None else out.copy_(result)


def _mixed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Prompts by one of their kernels, many decodes in front of them by theirs, at the same time.

    (After hopper_prefill_attention, which leaves no room beside it.)
    """
    num_decodes = batch.num_decodes if batch.num_decodes >= LEAST_DECODES else 0
    is_long = serves(q, k_cache, batch, num_decodes)
    attend = hopper_prefill_attention if is_long else prefill_attention
    out = attend(q, k_cache, v_cache, batch, scale, num_skipped=num_decodes, out=out)
    if num_decodes:  # nothing that the launch above reads is freed before this one (pdl.py)
        decode_attention(
            q[:num_decodes], k_cache, v_cache, batch, scale,
            waits_last=True, out=out[:num_decodes],
        )  # fmt: skip
    return out


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """paged_attention in plain PyTorch: what a CPU runs, and what the kernels are tested against.

    Reads the lengths on the host, so on a GPU it waits for the device.
    """
    starts: list[int] = batch.query_start_loc.tolist()
    seq_lens: list[int] = batch.seq_lens.tolist()
    num_reqs = len(seq_lens)
    if num_reqs > 1 and batch.max_query_len == 1 and q.shape[0] == num_reqs:
        return _decode_reference(q, k_cache, v_cache, batch, max(seq_lens), scale)

    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for i in range(num_reqs):
        start, end, seq_len = starts[i], starts[i + 1], seq_lens[i]
        if end > start and seq_len > 0:
            k = _request_rows(k_cache, batch.block_tables[i], seq_len)
            v = _request_rows(v_cache, batch.block_tables[i], seq_len)
            out[start:end] = _attend(q[start:end], k, v, scale)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One request, causal: q [query_len, Hq, D] over k, v [seq_len, Hk, D] -> q's shape."""
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads = k.shape[:2]
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if query_len == 1:
        # One token sees everything: its group of query heads can stand where query tokens stand.
        grouped = q.reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = _sdpa(grouped, k, v, None, scale)
        return out.reshape(1, num_heads, head_dim)
    group = num_heads // num_kv_heads
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    if query_len == seq_len:
        return _sdpa(q.transpose(0, 1), k, v, None, scale, is_causal=True).transpose(0, 1)
    key = torch.arange(seq_len, device=q.device)
    position = torch.arange(seq_len - query_len, seq_len, device=q.device)
    visible = key <= position[:, None]
    return _sdpa(q.transpose(0, 1), k, v, visible, scale).transpose(0, 1)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """Call scaled_dot_product_attention on [heads, tokens, head_dim] tensors.

    The batch dim matters: without it PyTorch skips its fast CPU kernel.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=is_causal, scale=scale
    )[0]


def _request_rows(cache: torch.Tensor, table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return one request's K or V [seq_len, Hk, D]: a view if one block holds it, else a copy."""
    block_tokens = cache.shape[1]
    if seq_len <= block_tokens:
        return cache[int(table[0]), :seq_len]
    blocks = table[: -(-seq_len // block_tokens)]
    return cache[blocks].flatten(0, 1)[:seq_len]


def _decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """One query token a request, all requests in one gather and one attention call."""
    num_reqs = q.shape[0]
    _, block_tokens, num_kv_heads, head_dim = k_cache.shape
    if longest == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lengths = batch.seq_lens[:, None]
    position = torch.arange(longest, dtype=torch.int32, device=q.device)
    visible = position < lengths
    # Past its length a request reads its first token again, never a slot that nobody wrote: masking
    # scores alone would not do, because 0 * NaN is NaN.
    position = position * visible
    block = batch.block_tables.gather(1, (position // block_tokens).long())
    # A padded row has no first token, so it reads slot 0 and is cleared at the end.
    slots = (block * (lengths > 0)).long() * block_tokens + position % block_tokens
    shape = (num_reqs, longest, num_kv_heads, head_dim)
    k = k_cache.view(-1, num_kv_heads * head_dim).index_select(0, slots.flatten()).view(shape)
    v = v_cache.view(-1, num_kv_heads * head_dim).index_select(0, slots.flatten()).view(shape)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(num_reqs, num_kv_heads, -1, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible[:, None, None, :],
        scale=scale,
    ).reshape(q.shape)
    return torch.where(lengths[:, :, None] > 0, out, 0.0).to(q.dtype)
