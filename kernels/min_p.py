"""min-p: drop the tokens whose probability is below min_p times that of the likeliest token.

In logits, with the temperature, that is a floor: maximum + temperature * ln(min_p). The maximum is
that of the whole vocabulary: sampler_v2.py reduces it over the ranks first. The floor is given as a
key (kernels/token_keys.py), the form in which top-k and top-p cut a row too.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.token_keys import KEEP_ALL, key_value, key_values, token_key, token_keys
from nanorunner.kernels.triton_support import jit, tl

TILE = 256  # rows a program


def min_p_floor(best: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return [n] int64: the key that a row's tokens must reach; KEEP_ALL where min_p is 0.

    best [n] int64: each row's largest token key over all ranks. temperature [n] float32; 0 (greedy)
    leaves the best value only. min_p [n] float32 from 0 (off) to 1.
    """
    function = min_p_floor_triton if best.is_cuda else min_p_floor_reference
    return function(best, temperature, min_p)


def min_p_floor_reference(
    best: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Compute min_p_floor in plain PyTorch, on any device."""
    maximum = key_values(best)
    # -inf + -inf and inf - inf cannot be compared; then only the best value itself stays
    depth = torch.where(temperature > 0, temperature * min_p.log(), 0.0)
    floor = torch.where(maximum.isfinite(), maximum + depth, maximum)
    keys = token_keys(floor, torch.full_like(best, 2**32 - 1))
    return torch.where(min_p > 0, keys, KEEP_ALL)


def min_p_floor_triton(
    best: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Compute min_p_floor in one launch."""
    num_rows = len(best)
    floor = torch.empty_like(best)
    if num_rows > 0:
        grid = (-(-num_rows // TILE),)
        _floors[grid](best, temperature, min_p, floor, num_rows, KEEP_ALL=KEEP_ALL, TILE=TILE)
    return floor


@jit(counts=("num_rows",))
def _floors(
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    floor: tl.tensor,
    num_rows: tl.tensor,
    KEEP_ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (tile): a lane a row."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    maximum = key_value(tl.load(best + row, mask=inside, other=0))
    heat = tl.load(temperature + row, mask=inside, other=0.0)
    p = tl.load(min_p + row, mask=inside, other=0.0)
    is_on = p > 0
    depth = tl.where(heat > 0, heat * tl.log(tl.where(is_on, p, 1.0)), 0.0)
    is_finite = tl.abs(maximum) < float("inf")
    value = tl.where(is_finite, maximum + depth, maximum)
    last_id = tl.full((TILE,), 0xFFFFFFFF, tl.int64)
    tl.store(floor + row, tl.where(is_on, token_key(value, last_id), KEEP_ALL), mask=inside)
