"""Compile every Triton variant that serving can meet, before the first request.

Triton compiles at first launch: seconds in which a rank looks hung. The launchers choose among a
handful of plans by batch shape alone, so one launch a plan, over no data, compiles them all.
"""

from __future__ import annotations

from itertools import product

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import MAX_SEQ_LENS, decode_attention, plan_decode
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
) -> None:
    """Launch the Triton attention kernels once a plan, for this rank's heads and real caches.

    Every length is 0, so nothing of the caches is read or written.
    """
    device = k_cache.device
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = (num_heads, num_kv_heads, head_dim)

    def empty(
        num_reqs: int, max_query_len: int, max_seq_len: int = 0
    ) -> tuple[torch.Tensor, AttentionBatch]:
        # A slice of qkv rows, as the model passes it: its stride is part of what is compiled.
        qkv = torch.zeros((num_reqs, qkv_width), dtype=dtype, device=device)
        q = qkv[:, : num_heads * head_dim].view(num_reqs, num_heads, head_dim)
        zeros = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        tables = torch.zeros((num_reqs, 2), dtype=torch.int32, device=device)
        slots = torch.full((num_reqs,), -1, device=device)
        return q, AttentionBatch(zeros, zeros[:-1], tables, slots, max_query_len, max_seq_len)

    plans = set()
    for num_reqs, longest in product(range(1, max_num_reqs + 1), MAX_SEQ_LENS):
        plan = plan_decode(num_reqs, *heads, dtype.itemsize, num_processors(device), longest)
        if plan not in plans:
            plans.add(plan)
            q, batch = empty(num_reqs, 1, longest)
            decode_attention(q, k_cache, v_cache, batch, 1.0)
    for max_query_len in (1, LONG_QUERY):
        q, batch = empty(2, max_query_len)
        prefill_attention(q, k_cache, v_cache, batch, 1.0)
