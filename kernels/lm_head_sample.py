"""The head and the draw in one: hidden states to the key of each row's best token, no logits.

    logits[v] = hidden @ lm_head[v]         a float32 sum, rounded to the model dtype
    key       = that of kernels/sample_keys.py for these logits, without a cut

For rows that want temperature and seed alone. 16 rows of Qwen3's logits would be 5 MB written and
read again; here a tile of them lives in registers and leaves one key a row behind:

    program (tile of the vocabulary)   -> tile_keys [rows, tiles] -> program (row): keys [rows]
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.linear import linear
from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.philox import USE_SAMPLE, noisy_scores
from nanorunner.kernels.sample import GREEDY_BELOW
from nanorunner.kernels.sample_keys import sample_keys_reference
from nanorunner.kernels.token_keys import NO_KEY, best_key
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

MAX_ROWS = 16  # for more the library's product and a draw from its logits are quicker


class HeadPlan(NamedTuple):
    """How the head is cut up."""

    out_tile: int  # vocabulary ids a program
    in_tile: int  # columns of the head a load
    num_warps: int
    num_stages: int  # loads in flight, of the matrix form


def serves(rows: int, lm_head: torch.Tensor) -> bool:
    """Return whether lm_head_sample's kernel takes this many rows of this head on a GPU."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return 1 <= rows <= MAX_ROWS and lm_head.is_cuda and lm_head.dtype in dtypes


def plan_head(rows: int, num_in: int, item_bytes: int) -> HeadPlan:
    """Return the plan: one row multiplies whole rows of the head, more are a matrix product.

    Measured on an H200 with bfloat16 heads of 1,024 and 4,096 columns.
    """
    whole = next_power_of_two(num_in)
    if rows == 1:
        in_tile, num_warps = (256, 4) if num_in <= 2048 else (512, 8)
        return HeadPlan(32, min(whole, in_tile * 2 // item_bytes), num_warps, 1)
    if item_bytes == 4:
        # Full float32 products run without tensor cores: small tiles, or registers spill.
        return HeadPlan(16, min(max(whole, 16), 32), 4, 2)
    if num_in <= 2048:
        return HeadPlan(32, min(max(whole, 16), 256), 4, 3)
    return HeadPlan(64, 128, 4, 4)


def lm_head_sample(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    vocab_offset: int = 0,
    num_ids: int | None = None,
    plan: HeadPlan | None = None,
) -> torch.Tensor:
    """Return [rows] int64: the key of each row's best token, NO_KEY for the row of nobody.

    hidden [1 to 16 rows, in], its rows may be strided; lm_head [local_vocab, in] contiguous, whose
    first num_ids rows (default: all) are the tokens vocab_offset and on. idx_mapping, positions
    [rows], temperature and seed as for sample_keys.
    """
    num_ids = lm_head.shape[0] if num_ids is None else num_ids
    state = (idx_mapping, positions, temperature, seed, vocab_offset, num_ids)
    if hidden.is_cuda:
        return lm_head_sample_triton(hidden, lm_head, *state, plan)
    return lm_head_sample_reference(hidden, lm_head, *state)


def lm_head_sample_reference(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    vocab_offset: int,
    num_ids: int,
) -> torch.Tensor:
    """lm_head_sample by way of logits, on the CPU."""
    logits = linear(hidden, lm_head)[:, :num_ids]
    return sample_keys_reference(logits, idx_mapping, positions, temperature, seed, vocab_offset)


def lm_head_sample_triton(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    vocab_offset: int,
    num_ids: int,
    plan: HeadPlan | None = None,
) -> torch.Tensor:
    """lm_head_sample in two launches: the best of each tile, then the best tile."""
    rows, num_in = hidden.shape
    assert 1 <= rows <= MAX_ROWS, f"lm_head_sample takes 1 to {MAX_ROWS} rows"
    assert hidden.stride(1) == 1, "lm_head_sample needs rows whose elements lie side by side"
    assert lm_head.is_contiguous(), "lm_head_sample needs a contiguous head"
    plan = plan or plan_head(rows, num_in, hidden.element_size())
    num_tiles = -(-num_ids // plan.out_tile)
    keys = torch.empty(rows, dtype=torch.int64, device=hidden.device)
    tile_keys = torch.empty((rows, num_tiles), dtype=torch.int64, device=hidden.device)
    options = launch_options(can_overlap(hidden.device))
    _head_kernel[(num_tiles,)](
        hidden,
        lm_head,
        idx_mapping,
        positions,
        temperature,
        seed,
        tile_keys,
        hidden.stride(0),
        rows,
        num_ids,
        vocab_offset,
        NUM_IN=num_in,
        IS_DOT=rows > 1,
        IS_EVEN=num_ids % plan.out_tile == 0 and num_in % plan.in_tile == 0,
        GREEDY_BELOW=GREEDY_BELOW,
        USE=USE_SAMPLE,
        ROW_TILE=16 if rows > 1 else 1,
        OUT_TILE=plan.out_tile,
        IN_TILE=plan.in_tile,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **options,
    )
    _best_tile_kernel[(rows,)](
        tile_keys, keys, num_tiles, NO_KEY=NO_KEY, TILE=2048, num_warps=8, **options
    )
    return keys


@jit(counts=("num_rows", "vocab_offset"), tables=("idx_mapping", "positions"))
def _head_kernel(
    hidden: tl.tensor,
    lm_head: tl.tensor,
    idx_mapping: tl.tensor,
    positions: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    tile_keys: tl.tensor,
    hidden_stride: tl.tensor,
    num_rows: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    NUM_IN: tl.constexpr,
    IS_DOT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    USE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (tile): the key of the best of OUT_TILE ids, for every row."""
    if USE_PDL:
        gdc_launch_dependents()
    local_id = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    column = tl.arange(0, IN_TILE)
    row = tl.arange(0, ROW_TILE)
    is_id = local_id < num_ids
    is_row = row < num_rows
    # int64 before the product: a head may pass 2^31 elements.
    place = lm_head + local_id[:, None].to(tl.int64) * NUM_IN + column[None, :]
    if IS_DOT:
        if USE_PDL:
            gdc_wait()
        x_place = hidden + row[:, None] * hidden_stride + column[None, :]
        logits = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
        for start in range(0, NUM_IN, IN_TILE):
            inside = start + column < NUM_IN
            mask = is_id[:, None] & inside[None, :]
            tile = _head_tile(place + start, mask, IS_EVEN)
            x = tl.load(x_place + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            logits = tl.dot(x, tl.trans(tile), logits, input_precision="ieee")
    else:
        first = _head_tile(place, is_id[:, None] & (column < NUM_IN)[None, :], IS_EVEN)
        if USE_PDL:
            gdc_wait()
        mixed = tl.zeros((OUT_TILE, IN_TILE), tl.float32)
        for start in tl.static_range(0, NUM_IN, IN_TILE):
            inside = start + column < NUM_IN
            tile = first
            if start > 0:
                tile = _head_tile(place + start, is_id[:, None] & inside[None, :], IS_EVEN)
            x = tl.load(hidden + start + column, mask=inside, other=0.0).to(tl.float32)
            mixed += tile.to(tl.float32) * x[None, :]
        logits = tl.sum(mixed, axis=1)[None, :]

    # Logits are defined in the model dtype: every way to them must draw the same token.
    scores = logits.to(lm_head.dtype.element_ty).to(tl.float32)
    ids = (local_id + vocab_offset)[None, :]
    state = tl.load(idx_mapping + row, mask=is_row, other=-1).to(tl.int64)
    is_drawn = state >= 0
    heat = tl.load(temperature + state, mask=is_drawn, other=0.0)
    is_hot = heat >= GREEDY_BELOW
    if tl.max(is_hot.to(tl.int32), axis=0) > 0:
        seeds = tl.load(seed + state, mask=is_drawn, other=0)[:, None]
        position = tl.load(positions + row, mask=is_drawn, other=0)[:, None]
        # a name of its own: inside a branch a variable keeps its type
        divisor = tl.where(is_hot, heat, 1.0)[:, None]
        noisy = noisy_scores(scores, divisor, seeds, ids, position, USE)
        scores = tl.where(is_hot[:, None], noisy, scores)
    kept = is_drawn[:, None] & is_id[None, :]
    best = best_key(scores, ids, kept, AXIS=1)
    tl.store(tile_keys + row * tl.num_programs(0) + tl.program_id(0), best, mask=is_row)


@jit()
def _head_tile(place: tl.tensor, mask: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """Load a tile of the head, which no one needs again in this step."""
    if IS_EVEN:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")


@jit()
def _best_tile_kernel(
    tile_keys: tl.tensor,
    keys: tl.tensor,
    num_tiles: tl.tensor,
    NO_KEY: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (row): the best of its tiles."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((TILE,), NO_KEY, tl.int64)
    for start in range(0, num_tiles, TILE):
        tile = start + tl.arange(0, TILE)
        place = tile_keys + row * num_tiles + tile
        best = tl.maximum(best, tl.load(place, mask=tile < num_tiles, other=NO_KEY))
    tl.store(keys + row, tl.max(best, axis=0))
