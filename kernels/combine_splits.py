"""The parts of split requests, joined by a second kernel that overlaps with the first.

For decodes of few requests: the kernel of fused_decode.py and this one follow each other by
programmatic dependent launch, which costs less than the wait for the last program to arrive
(join_shares.py, for batches that fill the device, where a launch for a few long requests would cost
all the others).
"""

from __future__ import annotations

import torch

from nanorunner.kernels.decode_attention import DecodePlan
from nanorunner.kernels.join_shares import share_of_split
from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl


def combine_splits(
    partial: torch.Tensor,
    log_sum: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    *,
    use_pdl: bool = False,
) -> None:
    """Fill out [requests, num_heads, head_dim] from the splits' partial [.., splits, head_dim].

    log_sum [requests, num_heads, splits]. use_pdl only after a kernel that kept the rule of
    kernels/pdl.py.
    """
    num_reqs, num_heads, head_dim = out.shape
    columns = next_power_of_two(head_dim)
    _combine_kernel[(num_reqs, num_heads)](
        partial,
        log_sum,
        seq_lens,
        out,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        SPLITS=plan.num_splits,
        MIN_SHARE=plan.min_share,
        TILE=plan.tile_tokens,
        num_warps=min(max(plan.num_splits * columns // 1024, 1), 8),
        **launch_options(use_pdl),
    )


@jit(tables=("seq_lens",))
def _combine_kernel(
    partial: tl.tensor,
    log_sum: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One (request, query head): the splits' results, weighted by their softmax sums."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    row = request * NUM_HEADS + tl.program_id(1)
    length = tl.load(seq_lens + request)
    share = share_of_split(length, SPLITS, MIN_SHARE, TILE)
    if (length > 0) & (length <= share):
        return  # its only split has written the result
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, COLUMNS)
    # The splits that were left without tokens wrote nothing: their memory may hold NaN.
    wrote = split * share < length
    sums = tl.load(log_sum + row * SPLITS + split, mask=wrote, other=-1.0e30)
    weight = tl.where(wrote, tl.exp2(sums - tl.max(sums, axis=0)), 0.0)
    weight = weight / tl.maximum(tl.sum(weight, axis=0), 1.0e-30)
    place = partial + (row * SPLITS + split[:, None]) * HEAD_DIM + column[None, :]
    parts = tl.load(place, mask=wrote[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weight[:, None], axis=0)
    tl.store(out + row * HEAD_DIM + column, result, mask=column < HEAD_DIM)
