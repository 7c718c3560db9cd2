"""One token id for each row of logits: the Gumbel-max trick over a vocabulary or a shard of it.

    score[v] = logits[v] / temperature + noise(seed, position, v)        temperature 0: no noise
    id       = argmax over v of score[v], the lowest id on ties

The id is a draw from softmax(logits / temperature). Since a token's noise depends on (seed,
position, id) alone, the largest score of each vocabulary shard, compared over the shards, gives
the same id as the whole row does: ranks exchange (score, id) pairs, not logits.

workers/sampler.py calls gumbel_argmax, after kernels/top_k_top_p.py for the rows that ask for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.philox import (
    MAX_NOISE,
    MIN_NOISE,
    USE_SAMPLE,
    gumbel_noise_reference,
    noisy_scores,
    random_word_reference,
)
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

# Below this temperature the noise is lost in float32, and a division could overflow: greedy.
GREEDY_BELOW = 1e-10
NO_ID = 2**31 - 1  # larger than every id
TILE = 1024  # vocabulary ids a program
CHUNK = 16384  # random words at a time on a CPU: their 128 KiB temporaries stay in cache
ROWS = 8  # logits rows made float32 at a time: all 64 of a large vocabulary take 7 times as long

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores [n] float32, ids [n] int64) of the best token in each row.

    logits [n, V] float32, bfloat16 or float16, any row stride, ids next to each other: the tokens
    vocab_offset to vocab_offset + V - 1. temperature [n] float32, seed [n] int64 (64 bits),
    position [n] int64: where the row's input token stands in its sequence.

    A row's result depends on that row's arguments alone. A NaN counts as -inf, and a token at -inf
    is returned only when every token of the row is: then it is the first one.
    """
    if logits.is_cuda:
        return gumbel_argmax_triton(logits, temperature, seed, position, vocab_offset)
    return gumbel_argmax_reference(logits, temperature, seed, position, vocab_offset)


def gumbel_argmax_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute gumbel_argmax on the CPU, with numpy."""
    values, best = _best(logits)
    if np.isnan(values).any():  # to argmax() a NaN is the largest
        logits = logits.masked_fill(logits.isnan(), -torch.inf)
        values, best = _best(logits)
    heat = temperature.numpy()
    rows = np.flatnonzero(heat >= GREEDY_BELOW)
    if len(rows):
        scaled: Float32 = logits[torch.from_numpy(rows)].float().numpy() / heat[rows, None]
        values[rows], best[rows] = _best_with_noise(
            scaled, seed.numpy()[rows, None], position.numpy()[rows, None], vocab_offset
        )
    return torch.from_numpy(values), torch.from_numpy(best + vocab_offset)


def _best(logits: torch.Tensor) -> tuple[Float32, Int64]:
    """Return each row's best value and its column, the first of equals; logits [n, V].

    numpy's argmax, with the conversion, takes a third of the time of torch's max().
    """
    values, best = np.empty(len(logits), np.float32), np.empty(len(logits), np.int64)
    for start in range(0, len(logits), ROWS):
        some = slice(start, start + ROWS)
        wide: Float32 = logits[some].float().numpy()
        best[some] = wide.argmax(axis=-1)
        values[some] = np.take_along_axis(wide, best[some, None], axis=-1)[:, 0]
    return values, best


def _best_with_noise(
    scaled: Float32, seed: Int64, position: Int64, vocab_offset: int
) -> tuple[Float32, Int64]:
    """Return each row's best noisy score and its column; scaled [n, V], seed, position [n, 1]."""
    num_rows = len(scaled)
    best_value = np.full(num_rows, -np.inf, np.float32)
    best_column = np.zeros(num_rows, np.int64)
    # Noise is bounded: a token this far below the best one cannot win, whatever it draws.
    reach = scaled.max(axis=-1, keepdims=True) - np.float32(MAX_NOISE - MIN_NOISE)
    columns = np.flatnonzero((scaled >= reach).any(axis=0))
    width = max(1, CHUNK // num_rows)
    for start in range(0, len(columns), width):
        some = columns[start : start + width]
        words = random_word_reference(seed, some + vocab_offset, position, USE_SAMPLE)
        noisy = scaled[:, some] + gumbel_noise_reference(words)
        place = noisy.argmax(axis=-1)
        value = np.take_along_axis(noisy, place[:, None], axis=-1)[:, 0]
        is_better = value > best_value  # not >=: the lowest id wins a tie
        best_value = np.where(is_better, value, best_value)
        best_column = np.where(is_better, some[place], best_column)
    return best_value, best_column


def gumbel_argmax_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute gumbel_argmax in two launches: the best of each tile, then the best tile."""
    num_rows, num_ids = logits.shape
    num_tiles = -(-num_ids // TILE)
    device = logits.device
    values = torch.empty(num_rows, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return values, ids
    assert logits.stride(1) == 1, "the ids of a row lie next to each other"
    tile_values = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tile_ids = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device)
    _best_of_tile[(num_rows, num_tiles)](
        logits,
        temperature,
        seed,
        position,
        tile_values,
        tile_ids,
        logits.stride(0),
        num_ids,
        vocab_offset,
        GREEDY_BELOW=GREEDY_BELOW,
        NO_ID=NO_ID,
        USE=USE_SAMPLE,
        TILE=TILE,
    )
    _best_of_row[(num_rows,)](
        tile_values,
        tile_ids,
        values,
        ids,
        num_tiles,
        NO_ID=NO_ID,
        TILES=next_power_of_two(num_tiles),
    )
    return values, ids


@jit(counts=("vocab_offset",), tables=("temperature", "seed", "position"))
def _best_of_tile(
    logits: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    tile_values: tl.tensor,
    tile_ids: tl.tensor,
    row_stride: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    GREEDY_BELOW: tl.constexpr,
    NO_ID: tl.constexpr,
    USE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile): the best noisy score of TILE ids, and the lowest id that has it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < num_ids
    place = logits + row * row_stride + columns
    scores = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))  # a NaN does not equal itself
    ids = columns + vocab_offset
    heat = tl.load(temperature + row)
    if heat >= GREEDY_BELOW:
        scores = noisy_scores(scores, heat, tl.load(seed + row), ids, tl.load(position + row), USE)
    best = tl.max(scores, axis=0)
    best_id = tl.min(tl.where((scores == best) & inside, ids, NO_ID), axis=0)
    out = row * tl.num_programs(1) + tile
    tl.store(tile_values + out, best)
    tl.store(tile_ids + out, best_id)


@jit()
def _best_of_row(
    tile_values: tl.tensor,
    tile_ids: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    num_tiles: tl.tensor,
    NO_ID: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Program (row): the best of its tiles, the lowest id on ties."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    scores = tl.load(tile_values + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    best_ids = tl.load(tile_ids + row * num_tiles + tiles, mask=inside, other=NO_ID)
    best = tl.max(scores, axis=0)
    tl.store(values + row, best)
    tl.store(ids + row, tl.min(tl.where(scores == best, best_ids, NO_ID), axis=0))
