"""Where a row's top-k and top-p cut its tokens: one key a row, found without sorting the row.

    kept = the tokens whose token_key(logit, id) is at least the cut     kernels/token_keys.py

Keys order the tokens of a row as the sort in top_k_top_p.py does, the lowest id first among equals.
Both filters keep a beginning of that order: while the weight in front of a token is below a target.
Top-k weighs each token 1 (target k); top-p weighs exp(logit - max) as a 40-bit integer (target: p
of the sum over what top-k kept). So one search serves
both, a program a row: kernels/key_search.py.

Top-k begins with a bound that is nearly tight: of LANES column classes each has a best token, and
the k-th best of those is no better than the k-th best token. So k <= LANES / 2 takes two passes
over the row, which then lies in the L2 cache. Integer sums do not depend on their order, so every
rank and every batch cuts a row in the same place.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.key_search import (
    bound_of_top_k,
    collect,
    finish,
    key_below,
    keys_at,
    middle_key,
    narrow,
)
from nanorunner.kernels.token_keys import KEEP_ALL, LOWEST_KEY, key_value, token_keys
from nanorunner.kernels.top_k_top_p import WEIGHT_BITS, mask_top_k_top_p
from nanorunner.kernels.triton_support import jit, tl

CAPACITY = 2048  # tokens that a program holds at once; 16 KiB of scratch a row
LANES = 1024
NUM_WARPS = 16
NUM_COUNTERS = 4  # int32 a row; each collection needs a fresh one


def top_k_top_p_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [n] int64: the least key that top-k, and then top-p, keeps in each row.

    logits [n, V] float32, bfloat16 or float16, any row stride: whole rows, id = column. temperature
    [n] float32 (0: counts as 1), top_k [n] integers (0 and -1: off; larger than V: off), top_p [n]
    float32 (1: off). floor [n] int64: tokens with smaller keys are gone already (min-p), the best
    token's key reaches it. At least one token is kept; NaN counts as -inf.
    """
    function = top_k_top_p_cut_triton if logits.is_cuda else top_k_top_p_cut_reference
    return function(logits, temperature, top_k, top_p, floor)


def top_k_top_p_cut_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute top_k_top_p_cut by the sort of mask_top_k_top_p, on any device."""
    keys = token_keys(logits, torch.arange(logits.shape[1], device=logits.device))
    if floor is not None:
        logits = torch.where(keys >= floor[:, None], logits.float(), float("-inf"))
    masked = mask_top_k_top_p(logits, temperature, top_k, top_p)
    kept = masked > float("-inf")  # what is left at -inf cannot be drawn anyway
    cut = torch.where(kept, keys, torch.iinfo(torch.int64).max).amin(dim=-1)
    return torch.where(kept.any(dim=-1), cut, KEEP_ALL)


def top_k_top_p_cut_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute top_k_top_p_cut in one launch, a program a row."""
    num_rows, num_ids = logits.shape
    device = logits.device
    cut = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return cut
    assert logits.stride(1) == 1, "the ids of a row lie next to each other"
    pools = torch.empty(num_rows, CAPACITY, dtype=torch.int64, device=device)
    counters = torch.zeros(num_rows, NUM_COUNTERS, dtype=torch.int32, device=device)
    _find_cut[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        cut if floor is None else floor,  # not read when None
        cut,
        pools,
        counters,
        logits.stride(0),
        num_ids,
        HAS_FLOOR=floor is not None,
        LOWEST=LOWEST_KEY,
        WEIGHT_ONE=1 << WEIGHT_BITS,
        NUM_COUNTERS=NUM_COUNTERS,
        CAPACITY=CAPACITY,
        LANES=LANES,
        WIDTH=16 // logits.element_size(),  # one 16-byte load
        num_warps=NUM_WARPS,
    )
    return cut


@jit(counts=("num_ids",))
def _find_cut(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    floor: tl.tensor,
    cut: tl.tensor,
    pools: tl.tensor,
    counters: tl.tensor,
    row_stride: tl.tensor,
    num_ids: tl.tensor,
    HAS_FLOOR: tl.constexpr,
    LOWEST: tl.constexpr,
    WEIGHT_ONE: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (row): top-k's cut, then top-p's over what it keeps."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    pool = pools + row * CAPACITY
    counter = counters + row * NUM_COUNTERS
    k = tl.load(top_k + row).to(tl.int32)
    p = tl.load(top_p + row)
    heat = tl.load(temperature + row)
    heat = tl.where(heat > 0, heat, 1.0)
    inverse_heat = tl.div_rn(1.0, heat)
    no_target = tl.full((), -1, tl.int64)
    zero = tl.full((), 0, tl.int64)
    kept_from = tl.full((), LOWEST, tl.int64)
    if HAS_FLOOR:
        kept_from = tl.maximum(tl.load(floor + row), LOWEST)

    lane_best = tl.full((LANES,), LOWEST, tl.int64)
    for start in range(0, num_ids, LANES * WIDTH):
        keys = keys_at(logits, start, num_ids, LOWEST, LANES, WIDTH)
        lane_best = tl.maximum(lane_best, tl.max(keys, axis=1))
    best = tl.max(lane_best, axis=0)

    count = tl.full((), CAPACITY + 1, tl.int32)  # of the tokens that the pool holds
    low = kept_from
    if (k > 0) & (k < num_ids):
        low = tl.full((), LOWEST, tl.int64)
        if k <= LANES // 2:
            low = bound_of_top_k(lane_best, k, LOWEST)
            count = collect(
                logits, num_ids, low, best, pool, counter, LOWEST, CAPACITY, LANES, WIDTH
            )
        high = best
        before = zero
        pooled = count
        if count > CAPACITY:
            t2 = middle_key(low, best)
            low, high, before, _ = narrow(
                logits,
                num_ids,
                best,
                inverse_heat,
                low,
                middle_key(low, t2),
                t2,
                middle_key(t2, best),
                k.to(tl.int64),
                p,
                LOWEST,
                WEIGHT_ONE,
                False,
                CAPACITY,
                LANES,
                WIDTH,
            )
            pooled = collect(
                logits, num_ids, low, high, pool, counter + 1, LOWEST, CAPACITY, LANES, WIDTH
            )
        found = finish(
            pool,
            pooled,
            best,
            inverse_heat,
            low,
            high,
            before,
            k.to(tl.int64),
            p,
            LOWEST,
            WEIGHT_ONE,
            False,
            CAPACITY,
        )
        kept_from = tl.maximum(kept_from, found)

    if p < 1:
        low = tl.maximum(kept_from - 1, LOWEST)
        high = best
        before = zero
        target = no_target
        # else the pool still holds all that top-k kept
        if count > CAPACITY:
            top = key_value(best)
            # below exp(-29) a weight rounds to 0; the other three are where nuclei often end
            low = tl.maximum(low, key_below(top - 29 * heat, LOWEST))
            low, high, before, target = narrow(
                logits,
                num_ids,
                best,
                inverse_heat,
                low,
                tl.maximum(low, key_below(top - 12 * heat, LOWEST)),
                tl.maximum(low, key_below(top - 8 * heat, LOWEST)),
                tl.maximum(low, key_below(top - 4 * heat, LOWEST)),
                no_target,
                p,
                LOWEST,
                WEIGHT_ONE,
                True,
                CAPACITY,
                LANES,
                WIDTH,
            )
            count = collect(
                logits, num_ids, low, high, pool, counter + 2, LOWEST, CAPACITY, LANES, WIDTH
            )
        kept_from = finish(
            pool,
            count,
            best,
            inverse_heat,
            low,
            high,
            before,
            target,
            p,
            LOWEST,
            WEIGHT_ONE,
            True,
            CAPACITY,
        )
    tl.store(cut + row, kept_from)
