"""A decode's attention with the step before it folded in: q/k norm, rotation, KV write, attention.

The result is that of kernels/rope_kv_write.py followed by kernels/decode_attention.py, which say
what is computed; here it is one launch less, and the new token's K and V never wait for the cache.

    program (request, kv head, split)
        norm and rotate the group's query heads               in registers, qkv stays as it was
        the split that holds the last position, it alone:     norm and rotate k, write k and v to
                                                              the slot, attend to them at once
        attend to the cached tokens of its share

Of the cache a program reads only what earlier steps wrote, so no program waits for another. Splits
meet in combine_splits.py.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.attention import paged_attention_reference
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.combine_splits import combine_splits
from nanorunner.kernels.decode_attention import (
    LOG2_E,
    DecodePlan,
    plan_decode,
    tile_shape,
)
from nanorunner.kernels.fused_decode_kernel import fused_decode_kernel
from nanorunner.kernels.pdl import can_overlap, launch_options
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write_reference
from nanorunner.kernels.triton_support import num_processors

# (Request, KV head) pairs a processor, up to which a request is cut; and up to which wide programs,
# two on a processor, take all requests at once, or nearly.
FEW_LOAD, ONE_ROUND_LOAD = 1.0, 2.5
LIGHT_LOAD = 3.0  # from so many on even requests are read by programs of two warps


def fused_decode(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scale: float,
    plan: DecodePlan | None = None,
    reads_early: bool = True,
) -> torch.Tensor:
    """Return attention's output [requests, num_heads, head_dim], one token a request.

    qkv [requests, (num_heads + 2 * num_kv_heads) * head_dim] (the CPU's form overwrites its q and
    k), positions [requests] int64, cos_sin [max_len, head_dim] float32. The token's K and V go to
    batch.slot_mapping, which must be the slot of position seq_len - 1, or -1 to write nothing. A
    request of length 0 (padding) writes nothing and gets zeros; its position is not read.

    With reads_early the kernel reads batch, positions and the cached KV before it waits for the
    kernel before it. That kernel must be no PDL launch, or one that waits before it lets go of the
    next (add_norm_linear): then all before it have ended, and it writes none of these itself.
    """
    if not qkv.is_cuda:
        return fused_decode_reference(
            qkv, positions, cos_sin, k_cache, v_cache, batch, num_heads, num_kv_heads, head_dim,
            q_norm, k_norm, eps, scale,
        )  # fmt: skip
    return fused_decode_triton(
        qkv, positions, cos_sin, k_cache, v_cache, batch, num_heads, num_kv_heads, head_dim,
        q_norm, k_norm, eps, scale, plan, reads_early,
    )  # fmt: skip


def plan_fused(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    item_bytes: int,
    processors: int,
    max_seq_len: int = 0,
    is_even: bool = False,
) -> DecodePlan:
    """Return decode_attention's plan, changed where folding the step before in changes what wins.

    Few requests: smaller tiles, all of them in flight, of which a program has read the first before
    its input is there. More: whole requests by wide programs, whose pace is that of a long request;
    where requests are even, narrow ones, of which more run at the same time. Measured on an H200.
    """
    plan = plan_decode(
        num_reqs, num_heads, num_kv_heads, head_dim, item_bytes, processors, max_seq_len
    )
    if plan.min_share:
        return plan
    rows, columns = tile_shape(num_heads // num_kv_heads, head_dim)
    if item_bytes != 2 or rows > 16 or columns > 128:
        if plan.num_splits == 1:
            return plan
        # 32 registers a thread for each of K, V
        warps = plan.tile_tokens * columns * item_bytes // 4096
        return plan._replace(num_warps=max(plan.num_warps, warps), num_stages=2)
    load = num_reqs * num_kv_heads / processors
    if load <= FEW_LOAD:
        return plan._replace(tile_tokens=32, num_warps=2, num_stages=2)
    if load <= ONE_ROUND_LOAD or not is_even:
        return DecodePlan(1, 128, 4, 2, in_order=True)
    return plan._replace(num_warps=2, num_stages=2) if load >= LIGHT_LOAD else plan


def fused_decode_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """fused_decode in plain PyTorch, on any device; overwrites q and k in qkv."""
    qk_norm_rope_kv_write_reference(
        qkv, positions, cos_sin, batch.slot_mapping, k_cache, v_cache,
        num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps,
    )  # fmt: skip
    q = qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    return paged_attention_reference(q, k_cache, v_cache, batch, scale)


def fused_decode_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scale: float,
    plan: DecodePlan | None = None,
    reads_early: bool = True,
) -> torch.Tensor:
    """fused_decode as one Triton launch, two when the plan splits; qkv stays as it was."""
    num_reqs, block_tokens = qkv.shape[0], k_cache.shape[1]
    assert qkv.stride(1) == 1, "qkv rows must lie side by side"
    assert k_cache.is_contiguous(), "the K cache must be contiguous"
    assert v_cache.is_contiguous(), "the V cache must be contiguous"
    out = torch.empty((num_reqs, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_reqs == 0:
        return out
    plan = plan or plan_fused(
        num_reqs, num_heads, num_kv_heads, head_dim, qkv.element_size(),
        num_processors(qkv.device), batch.max_seq_len, batch.is_even,
    )  # fmt: skip
    # A device that is full of programs hides their waits better.
    reads_early = reads_early and plan.num_splits > 1 and not plan.min_share
    partial = log_sum = out  # never touched when one program does a whole request
    if plan.num_splits > 1:
        shape = (num_reqs, num_heads, plan.num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=qkv.device)
        log_sum = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    rows, columns = tile_shape(num_heads // num_kv_heads, head_dim)
    has_norm = q_norm is not None
    use_pdl = can_overlap(qkv.device)
    pairs = (num_kv_heads, num_reqs) if plan.in_order else (num_reqs, num_kv_heads)
    grid = (*pairs, plan.num_splits)
    fused_decode_kernel[grid](
        qkv,
        positions,
        cos_sin,
        batch.slot_mapping,
        q_norm if has_norm else cos_sin,  # never read without a norm; a kernel needs some pointer
        k_norm if has_norm else cos_sin,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.seq_lens,
        out,
        partial,
        log_sum,
        scale * LOG2_E,
        eps,
        qkv.stride(0),
        batch.block_tables.stride(0),
        plan.num_splits,
        MIN_SHARE=plan.min_share,
        GROUP=num_heads // num_kv_heads,
        ROWS=rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BLOCK_TOKENS=block_tokens,
        TILE=plan.tile_tokens,
        IS_SPLIT=plan.num_splits > 1,
        HAS_NORM=has_norm,
        READ_EARLY=reads_early,
        IN_ORDER=plan.in_order,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(use_pdl),
    )
    if plan.num_splits > 1:
        combine_splits(partial, log_sum, batch.seq_lens, out, plan, use_pdl=use_pdl)
    return out
