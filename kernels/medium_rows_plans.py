"""Which tiles serve a projection of 2 to 256 rows: a table, and nothing else where it is mute.

scripts/tune.py --only medium measures and writes configs/kernels/NAME-medium.yaml, NAME being the
GPU's. An entry is what a projection does, its weight's shape, its rows and the plan that won:

    - {op: added, out: 1024, in: 2048, rows: 64, kind: tiles, row_tile: 64, out_tile: 64, ...}

    rows         ops
    2 to 16      norm     add + RMSNorm, @ weight.T     the places of kernels/few_rows.py, which
                 plain    x @ weight.T                  asks here first and then its own table;
                 gated    add + RMSNorm, @ gate_up.T,   entries are at 2, 4, 8 and 16 rows: a count
                          SiLU(gate) * up               takes its next power of two's, or none
    17 to 256    plain    x @ weight.T                  those of kernels/medium_rows.py; a count
                 gated    @ gate_up.T, SiLU(gate) * up  between two entries takes the larger one's,
                 added    x @ weight.T, added to the    however large that is
                          residual, RMSNorm

A shape without an entry, and one whose entry is of kind cublas, is served as if there were no table
(few rows' own plan; from 17 rows on the vendor's library): no rule guesses here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from nanorunner.kernels.few_rows_plans import (
    CUBLAS,
    FOLDER,
    GATED,
    MAX_ROWS,
    NORM,
    PLAIN,
    Key,
    gpu_name,
    read_table,
)
from nanorunner.kernels.triton_support import next_power_of_two

MAX_MEDIUM_ROWS = 256
ADDED = "added"
TILES = "tiles"  # the kernel of kernels/medium_rows_kernels.py; the other kind is CUBLAS
FEW_ROWS = (2, 4, 8, 16)  # the counts of entries up to MAX_ROWS

Place = tuple[str, torch.Tensor]  # op, weight [out, in]


class MediumRowsPlan(NamedTuple):
    """How one projection is launched; of a cublas plan nothing else counts."""

    kind: str
    row_tile: int = 64  # rows of x a program
    out_tile: int = 64  # rows of the weight a program, both halves when gated; see tiles_of()
    in_tile: int = 64  # columns a step; a share of one step is loaded before the wait
    num_splits: int = 1  # programs that share the columns; a second launch adds them up
    num_warps: int = 4
    num_stages: int = 4  # steps in flight
    is_swapped: bool = False  # the weight is the product's first operand
    is_early: bool = True  # of more steps, the weights go to L2 before the wait


LIBRARY = MediumRowsPlan(CUBLAS)
LEAST_TILE = 16  # what a product's operand has at least; eight rows of gate, eight of up


def plan_medium_rows(
    op: str, rows: int, weight: torch.Tensor, folder: Path = FOLDER
) -> MediumRowsPlan:
    """Return the plan for rows of x times weight [out, in]; op is one of ops_at(rows)."""
    if rows > MAX_MEDIUM_ROWS or not can_tile(weight):
        return LIBRARY
    num_out, num_in = weight.shape
    return choose(load_table(folder / table_name(weight.device)), (op, num_out, num_in, rows))


def choose(table: dict[Key, MediumRowsPlan], key: Key) -> MediumRowsPlan:
    """Return the plan of the key's shape at as many rows as it has, or the next more."""
    op, num_out, num_in, rows = key
    if rows <= MAX_ROWS:
        return table.get((op, num_out, num_in, next_power_of_two(rows)), LIBRARY)
    shape = (op, num_out, num_in)
    entries = {entry[3]: plan for entry, plan in table.items() if entry[:3] == shape}
    tuned_rows = min((count for count in entries if count >= rows), default=None)
    return LIBRARY if tuned_rows is None else entries[tuned_rows]


def most_medium_rows(places: Iterable[Place], folder: Path = FOLDER) -> int:
    """Return up to how many rows the table has tiles for one of a layer's places, 0 for none.

    The places are those of 17 rows and more; where the table has tiles below alone, it is 0 too.
    """
    most = 0
    for op, weight in places:
        if can_tile(weight):
            table = load_table(folder / table_name(weight.device))
            most = max(most, most_rows(table, op, *weight.shape))
    return most


def most_rows(table: dict[Key, MediumRowsPlan], op: str, num_out: int, num_in: int) -> int:
    """Return the most rows, 17 or more, at which the table has tiles for a shape, 0 for none."""
    shape = (op, num_out, num_in)
    counts = [key[3] for key, plan in table.items() if key[:3] == shape and plan.kind == TILES]
    return max((count for count in counts if count > MAX_ROWS), default=0)


def ops_at(rows: int) -> tuple[str, ...]:
    """Return the ops that the table has at so many rows, none where it has no entries."""
    if rows in FEW_ROWS:
        return (NORM, PLAIN, GATED)
    return (PLAIN, GATED, ADDED) if MAX_ROWS < rows <= MAX_MEDIUM_ROWS else ()


def tiles_of(out_tile: int) -> tuple[int, int]:
    """Return how many of a program's rows of the weight its tile has, and its side tile.

    Of a power of two, all and none; of one and a half, like 192, the power and its half: 128, 64.
    ValueError on any other number, and where a tile would have fewer than LEAST_TILE.
    """
    main_tile = 1 << (out_tile.bit_length() - 1) if out_tile > 0 else 0
    side_tile = out_tile - main_tile
    is_pair = 2 * side_tile == main_tile and side_tile >= LEAST_TILE
    if main_tile < LEAST_TILE or (side_tile and not is_pair):
        raise ValueError(
            f"out_tile {out_tile}: use a power of two, {LEAST_TILE} or more, or one and a half of "
            f"one, {3 * LEAST_TILE} or more"
        )
    return main_tile, side_tile


def can_tile(weight: torch.Tensor) -> bool:
    """Return whether the kernels take this weight at all: on a GPU, 16-bit, in plain rows."""
    is_plain = weight.dim() == 2 and weight.is_contiguous()
    return weight.is_cuda and weight.element_size() == 2 and is_plain


def table_name(device: torch.device) -> str:
    """Return the name of a GPU's table: nvidia-h200-medium.yaml."""
    return f"{gpu_name(device)}-medium.yaml"


@functools.cache
def load_table(path: Path) -> dict[Key, MediumRowsPlan]:
    """Return the plans in a table, none when there is no such file; ValueError on a bad entry."""
    table = read_table(path, MediumRowsPlan)
    for (op, _, _, rows), plan in table.items():
        if op not in ops_at(rows) or plan.kind not in (TILES, CUBLAS):
            raise ValueError(
                f"{path}: {op} at {rows} rows, {plan.kind}; scripts/tune.py writes it anew"
            )
        try:
            tiles_of(plan.out_tile)
        except ValueError as error:
            raise ValueError(f"{path}: {op} at {rows} rows, {error}") from error
    return table
