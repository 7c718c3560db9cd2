"""The draw of kernels/sample.py, by rows of the state table and as keys that ranks can compare.

    score[v] = logits[v] / temperature + noise(seed, position, v)   of the tokens that a cut keeps
    key      = max over v of token_key(score[v], v)                 kernels/token_keys.py

A rank does this for its shard of the vocabulary; the maximum of the keys over the ranks holds the
sampled id. Temperature and seed are read from the state table by row, so a CUDA graph of a decode
needs nothing else. A row of the batch that has a cut (top-k, top-p, min-p) draws only among the
tokens whose key, made of their logit, reaches the cut; noise is not computed where none does.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.philox import USE_SAMPLE, noisy_scores
from nanorunner.kernels.sample import GREEDY_BELOW, gumbel_argmax_reference
from nanorunner.kernels.token_keys import NO_KEY, SKIP_ROW, best_key, token_key, token_keys
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

TILE = 2048  # vocabulary ids a program: what it does once is then 5 instructions an id of 78


def sample_keys(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    vocab_offset: int = 0,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [n] int64: the key of each row's best token, NO_KEY where a row keeps none.

    logits [n, V] float32, bfloat16 or float16, any row stride: the tokens vocab_offset to
    vocab_offset + V - 1. idx_mapping [n] int32 or int64: rows of the state table, -1 for nobody
    (its key is NO_KEY). positions [n] int64: of each row's input token. temperature [R] float32,
    seed [R] int64: the state table. cut [n] int64: keep the tokens whose key is at least this;
    SKIP_ROW spends no time on the row.
    """
    function = sample_keys_triton if logits.is_cuda else sample_keys_reference
    return function(logits, idx_mapping, positions, temperature, seed, vocab_offset, cut)


def sample_keys_reference(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    vocab_offset: int = 0,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute sample_keys by gumbel_argmax, on the CPU."""
    keys = torch.full((len(logits),), NO_KEY, dtype=torch.int64)
    is_drawn = idx_mapping >= 0
    if cut is not None:
        is_drawn &= cut != SKIP_ROW
    chosen = is_drawn.nonzero()[:, 0]
    if len(chosen) == 0:
        return keys
    rows = idx_mapping[chosen].long()
    logits = logits[chosen]
    has_any = torch.ones(len(chosen), dtype=torch.bool)
    if cut is not None:
        ids = torch.arange(logits.shape[1]) + vocab_offset
        kept = token_keys(logits, ids) >= cut[chosen][:, None]
        logits = torch.where(kept, logits, float("-inf"))
        has_any = kept.any(dim=-1)
    values, ids = gumbel_argmax_reference(
        logits, temperature[rows], seed[rows], positions[chosen], vocab_offset
    )
    keys[chosen] = torch.where(has_any, token_keys(values, ids), NO_KEY)
    return keys


def sample_keys_triton(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    vocab_offset: int = 0,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute sample_keys in two launches: the best of each tile, then the best tile."""
    num_rows, num_ids = logits.shape
    num_tiles = -(-num_ids // TILE)
    keys = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return keys
    assert logits.stride(1) == 1, "the ids of a row lie next to each other"
    tile_keys = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    _best_of_tile[(num_rows, num_tiles)](
        logits,
        idx_mapping,
        positions,
        temperature,
        seed,
        positions if cut is None else cut,  # not read when None
        tile_keys,
        logits.stride(0),
        num_ids,
        vocab_offset,
        HAS_CUT=cut is not None,
        GREEDY_BELOW=GREEDY_BELOW,
        NO_KEY=NO_KEY,
        SKIP_ROW=SKIP_ROW,
        USE=USE_SAMPLE,
        TILE=TILE,
    )
    _best_of_row[(num_rows,)](
        tile_keys, keys, num_tiles, NO_KEY=NO_KEY, TILES=next_power_of_two(num_tiles)
    )
    return keys


@jit(counts=("vocab_offset",), tables=("idx_mapping", "positions", "cut"))
def _best_of_tile(
    logits: tl.tensor,
    idx_mapping: tl.tensor,
    positions: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    cut: tl.tensor,
    tile_keys: tl.tensor,
    row_stride: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    HAS_CUT: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    NO_KEY: tl.constexpr,
    SKIP_ROW: tl.constexpr,
    USE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (place in the batch, tile): the key of the best of TILE ids."""
    place = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    best = tl.full((), NO_KEY, tl.int64)
    row = tl.load(idx_mapping + place).to(tl.int64)
    is_drawn = row >= 0
    lowest = tl.full((), NO_KEY, tl.int64)
    if HAS_CUT:
        lowest = tl.load(cut + place)
        is_drawn = is_drawn & (lowest != SKIP_ROW)
    if is_drawn:
        columns = tile * TILE + tl.arange(0, TILE)
        kept = columns < num_ids
        values = tl.load(logits + place * row_stride + columns, mask=kept, other=float("-inf"))
        scores = values.to(tl.float32)
        ids = columns + vocab_offset
        num_kept = 1
        if HAS_CUT:
            kept = kept & (token_key(scores, ids.to(tl.int64)) >= lowest)
            num_kept = tl.max(kept.to(tl.int32), axis=0)
        if num_kept > 0:
            heat = tl.load(temperature + row)
            if heat >= GREEDY_BELOW:
                position = tl.load(positions + place)
                scores = noisy_scores(scores, heat, tl.load(seed + row), ids, position, USE)
            best = best_key(scores, ids, kept, AXIS=0)
    tl.store(tile_keys + place * tl.num_programs(1) + tile, best)


@jit()
def _best_of_row(
    tile_keys: tl.tensor,
    keys: tl.tensor,
    num_tiles: tl.tensor,
    NO_KEY: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Program (place in the batch): the best of its tiles."""
    place = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    best = tl.load(tile_keys + place * num_tiles + tiles, mask=tiles < num_tiles, other=NO_KEY)
    tl.store(keys + place, tl.max(best, axis=0))
