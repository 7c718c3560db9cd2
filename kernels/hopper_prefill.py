"""Long prompts on Hopper: prefill_attention with the warps of a program divided by their work.

FlashAttention 3's plan (Shah et al., 2024): one warp fetches K and V through the memory engine, two
groups of four multiply, and while the tensor cores mix the values of one tile, the group's other
units take the softmax of the next. kernels/hopper_prefill_kernel.py has the loops.

As in prefill_attention a row is a (query token, head of the KV head's group) pair and a tile's
keys are read once for all of its rows; here they are 128, twice as many as its twin's, which halves
what a processor reads from the L2 cache. A program stays on its processor and works through a list
of tiles, so it fetches the next one's keys while the last one's results are written.

It fills the device: the decodes of a mixed step run after it, not beside it as beside its twin.
Even so such a step's attention is quicker (docs/performance-log.md).
"""

from __future__ import annotations

import functools
import logging

import torch

from nanorunner.kernels.attention_batch import AttentionBatch, assert_layout
from nanorunner.kernels.gluon_support import TensorDescriptor, gl, has_gluon
from nanorunner.kernels.hopper_prefill_kernel import MATRIX_ROWS, hopper_prefill_kernel
from nanorunner.kernels.pdl import can_overlap, launch_options
from nanorunner.kernels.prefill_attention import LOG2_E
from nanorunner.kernels.triton_support import num_processors

logger = logging.getLogger("nanorunner")

HOPPER = (9, 0)  # its matrix instructions exist on no other kind
HEAD_DIM = 128
NUM_GROUPS = 2
TILE = 64  # KV tokens a turn
NUM_STAGES = 3  # tiles of K and of V in shared memory
# Fewer tokens take the kernel for every GPU: it is as fast there, and its launch costs the host
# 40 us less.
LEAST_TOKENS = 1024


def serves_shape(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Return whether this kernel exists for such queries, on their device."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    return (
        head_dim == HEAD_DIM
        and q.element_size() == 2
        and q.shape[1] // num_kv_heads <= MATRIX_ROWS
        and k_cache.shape[1] % TILE == 0
        and _has_instructions(q.device)
    )


def serves(q: torch.Tensor, k_cache: torch.Tensor, batch: AttentionBatch, num_skipped: int) -> bool:
    """Return whether the prompts of a batch take this kernel, behind num_skipped decodes.

    Many short queries (drafts to verify) would fill no tile of 128 rows.
    """
    num_tokens = q.shape[0] - num_skipped
    num_reqs = batch.seq_lens.shape[0] - num_skipped
    tile_tokens = NUM_GROUPS * MATRIX_ROWS * k_cache.shape[2] // q.shape[1]
    return num_tokens >= max(LEAST_TOKENS, num_reqs * tile_tokens) and serves_shape(q, k_cache)


@functools.cache
def _has_instructions(device: torch.device) -> bool:
    """Return whether the device has what the kernel needs, and this Triton can say it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    if not has_gluon():
        logger.warning(
            "this Triton's Gluon lacks what hopper_prefill.py needs: prompts take longer"
        )
    return has_gluon()


def hopper_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    num_skipped: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [tokens, num_heads, 128]; prefill_attention's result to rounding.

    Tokens past query_start_loc[-1] (padding) get zeros. num_skipped: so many requests in front, of
    one token each, whose rows of out stay unwritten. The launch after this may overlap with it.
    out: where to write; contiguous.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_tokens, num_kv_heads, _ = k_cache.shape
    num_reqs = batch.seq_lens.shape[0] - num_skipped
    group = num_heads // num_kv_heads
    assert head_dim == HEAD_DIM, "made for heads of 128"
    assert block_tokens % TILE == 0, "a tile lies in one block"
    assert group <= MATRIX_ROWS, "a token's heads fit a group of warps"
    assert_layout(q, k_cache, v_cache)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous(), "the output must be contiguous"
    group_tokens = MATRIX_ROWS // group
    tokens = NUM_GROUPS * group_tokens
    # As in prefill_attention: a bound known without the lengths, and one more for the padding.
    first_tile = num_skipped // tokens
    num_tiles = num_tokens // tokens + num_reqs + 1 - first_tile
    width = num_kv_heads * head_dim
    lines = [num_blocks * block_tokens, width]
    keys, values = (
        TensorDescriptor(cache, lines, [width, 1], [TILE, head_dim], _tile_layout(q.dtype))
        for cache in (k_cache, v_cache)
    )
    hopper_prefill_kernel[(min(num_processors(q.device), num_tiles * num_kv_heads),)](
        q,
        keys,
        values,
        batch.query_start_loc[num_skipped:],
        batch.seq_lens[num_skipped:],
        batch.block_tables[num_skipped:],
        out,
        scale * LOG2_E,
        num_tokens,
        num_reqs,
        first_tile,
        num_tiles,
        q.stride(0),
        batch.block_tables.stride(0),
        GROUP=group,
        GROUP_TOKENS=group_tokens,
        NUM_GROUPS=NUM_GROUPS,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        TILE=TILE,
        NUM_STAGES=NUM_STAGES,
        num_warps=4,  # the first group's; the others are added
        **launch_options(can_overlap(q.device)),
    )
    return out


@functools.cache
def _tile_layout(dtype: torch.dtype) -> object:
    """Return how a tile of K or V [64, 128] lies in shared memory, as the tensor cores read it."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], element)
