"""Attention of prompts that begin in this very step, by the FlashAttention 2 inside torch.

Where each request's tokens begin at position 0, all keys and values that anyone sees are this
step's own. They lie in the qkv rows, normed and rotated, so the paged cache, which has them too by
now, need not be read, and a kernel that knows no pages will do:

    qkv [tokens, ...] = [q heads | k heads | v heads]    strided views, no copy
    query_start_loc                                      whose tokens they are, for q and k alike

torch.nn.attention.varlen says the same in public, but not to every torch that we run on: 2.11 has
no enable_gqa, 2.13 refuses fewer KV heads without it, and each call of it fills a tensor that
nobody reads. The operator below it has had these arguments in all of them, 2.11 to 2.14.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.attention_batch import AttentionBatch

MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8  # 16 bytes, what one thread copies
# Its query tile has 128 tokens of one head, ours as many rows of a whole group of heads: of shorter
# prompts it fills no tile.
MIN_QUERY_LEN = 128
# Its grid has room for every request at the length of the longest, and a program without tokens
# costs about half a microsecond of a processor, a tile of a short prompt about two. Calculated: up
# to this many programs for one that works, what the others cost stays below what is won.
MAX_PROGRAMS_A_TILE = 4

Int64 = npt.NDArray[np.int64]


def are_whole_prompts(computed: Int64, counts: Int64) -> bool:
    """Return whether a step is best served here: nothing cached, and prompts that are long enough.

    computed [n]: tokens of each request with KV in the cache; counts [n]: tokens in this step.
    """
    if computed.any():
        return False
    longest = int(counts.max())
    is_dense = len(counts) * longest <= MAX_PROGRAMS_A_TILE * int(counts.sum())
    return longest >= MIN_QUERY_LEN and is_dense


def takes(head_dim: int) -> bool:
    """Return whether the operator takes heads of this width."""
    return head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_MULTIPLE == 0


def whole_prompt_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """Return the causal attention [tokens, num_heads, head_dim] of prompts over themselves.

    q [tokens, num_heads, head_dim]; k, v [tokens, num_kv_heads, head_dim], bfloat16 or float16;
    heads may lie anywhere, elements side by side. Every token belongs to a request of batch: there
    is no padding. Reads nothing on the host. Raises NotImplementedError on CPU tensors.
    """
    starts, longest = batch.query_start_loc, batch.max_query_len
    out: torch.Tensor = torch.ops.aten._flash_attention_forward.default(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )[0]  # 0.0: no dropout; True: causal; False: no mask to debug with
    return out
