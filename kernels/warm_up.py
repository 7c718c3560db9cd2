"""Compile every Triton variant that serving can meet, before the first request.

Triton compiles at first launch: seconds in which a rank looks hung. The launchers choose among a
handful of plans by batch shape, longest request and evenness, so one launch a plan, over no data,
compiles them all.
"""

from __future__ import annotations

from itertools import product

import torch

from nanorunner.kernels.attention import LEAST_DECODES
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import (
    MAX_SEQ_LENS,
    decode_attention,
    is_full,
    plan_decode,
)
from nanorunner.kernels.few_rows_plans import MAX_ROWS
from nanorunner.kernels.fused_decode import fused_decode_triton, plan_fused
from nanorunner.kernels.hopper_prefill import hopper_prefill_attention, serves_shape
from nanorunner.kernels.prefill_attention import prefill_attention
from nanorunner.kernels.triton_support import num_processors

LONG_QUERY = 1024  # any query this long gets the plan for prompts


def warm_up_attention(
    qkv_width: int,
    num_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    dtype: torch.dtype,
    max_num_reqs: int,
    *,
    beside_prompts: bool = False,
) -> None:
    """Launch the Triton attention kernels once a plan, for this rank's heads and real caches.

    Every length is 0, so nothing of the caches is read or written. beside_prompts: decodes of mixed
    batches will have launches of their own too (AttentionBatch.num_decodes).
    """
    device = k_cache.device
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = (num_heads, num_kv_heads, head_dim)

    def empty(
        num_reqs: int, max_query_len: int, max_seq_len: int = 0
    ) -> tuple[torch.Tensor, AttentionBatch]:
        qkv, batch = _empty_batch(num_reqs, qkv_width, dtype, device, max_query_len, max_seq_len)
        return qkv[:, : num_heads * head_dim].view(num_reqs, num_heads, head_dim), batch

    plans = set()
    for num_reqs, longest in product(range(1, max_num_reqs + 1), MAX_SEQ_LENS):
        plan = plan_decode(num_reqs, *heads, dtype.itemsize, num_processors(device), longest)
        # as self_attention.py launches it, behind the rotation; then behind a step's prompts
        is_beside = beside_prompts and num_reqs >= LEAST_DECODES
        for waits_last in (False, True) if is_beside else (False,):
            if (plan, waits_last) not in plans:
                plans.add((plan, waits_last))
                q, batch = empty(num_reqs, 1, longest)
                decode_attention(
                    q, k_cache, v_cache, batch, 1.0, reads_early=True, waits_last=waits_last
                )
    for max_query_len in (1, LONG_QUERY):
        q, batch = empty(2, max_query_len)
        prefill_attention(q, k_cache, v_cache, batch, 1.0)
    if serves_shape(q, k_cache):
        hopper_prefill_attention(q, k_cache, v_cache, batch, 1.0)


def warm_up_fused_decode(
    qkv_width: int,
    num_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    dtype: torch.dtype,
    max_num_reqs: int,
) -> None:
    """Launch fused_decode once a plan, over requests of length 0; norms: a layer's q and k norm."""
    device = k_cache.device
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = (num_heads, num_kv_heads, head_dim)
    plans = set()
    processors = num_processors(device)
    for num_reqs, is_even in product(range(1, max_num_reqs + 1), (False, True)):
        if is_full(num_reqs, num_kv_heads, processors):
            break  # from here on decode_attention serves (self_attention.py)
        plan = plan_fused(num_reqs, *heads, dtype.itemsize, processors, is_even=is_even)
        is_few = num_reqs <= MAX_ROWS  # the few-row kernels let it read early (decoder.py)
        if (plan, is_few) in plans:
            continue
        plans.add((plan, is_few))
        qkv, batch = _empty_batch(num_reqs, qkv_width, dtype, device, 1, 0)
        batch = batch._replace(is_even=is_even)
        fused_decode_triton(
            qkv, batch.slot_mapping, cos_sin, k_cache, v_cache, batch, *heads, *norms, 1e-6, 1.0,
            reads_early=is_few,
        )  # fmt: skip


def _empty_batch(
    num_reqs: int,
    qkv_width: int,
    dtype: torch.dtype,
    device: torch.device,
    max_query_len: int,
    max_seq_len: int,
) -> tuple[torch.Tensor, AttentionBatch]:
    """Return qkv rows and a batch of requests of length 0, whose slots are -1.

    The rows are whole, as the model has them: their stride is part of what is compiled.
    """
    qkv = torch.zeros((num_reqs, qkv_width), dtype=dtype, device=device)
    zeros = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
    tables = torch.zeros((num_reqs, 2), dtype=torch.int32, device=device)
    slots = torch.full((num_reqs,), -1, device=device)
    return qkv, AttentionBatch(zeros, zeros[:-1], tables, slots, max_query_len, max_seq_len)
