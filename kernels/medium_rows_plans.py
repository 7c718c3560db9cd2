"""Which tiles serve a projection of 17 to 128 rows: a table, and the library where it is mute.

scripts/tune.py --only medium measures and writes configs/kernels/NAME-medium.yaml, NAME being the
GPU's. An entry is what a projection does, its weight's shape, its rows and the plan that won:

    - {op: added, out: 1024, in: 2048, rows: 64, kind: tiles, row_tile: 64, out_tile: 64, ...}

    plain    x @ weight.T
    gated    SiLU(gate) * up of x @ gate_up.T
    added    x @ weight.T, added to the residual, and the RMSNorm of that

A row count between two entries takes the larger one's plan. A shape without an entry is multiplied
by the vendor's library, as in every other step: no rule guesses here.
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
    PLAIN,
    Key,
    gpu_name,
    read_table,
)

MAX_MEDIUM_ROWS = 128
ADDED = "added"
TILES = "tiles"  # the kernel of kernels/medium_rows_kernels.py; the other kind is CUBLAS
OPS = (PLAIN, GATED, ADDED)

Place = tuple[str, torch.Tensor]  # op, weight [out, in]


class MediumRowsPlan(NamedTuple):
    """How one projection is launched; of a cublas plan nothing else counts."""

    kind: str
    row_tile: int = 64  # rows of x a program
    out_tile: int = 64  # rows of the weight a program, both halves together when gated
    in_tile: int = 64  # columns a step; a share of one step is loaded before the wait
    num_splits: int = 1  # programs that share the columns; a second launch adds them up
    num_warps: int = 4
    num_stages: int = 4  # steps in flight
    is_swapped: bool = False  # the weight is the product's first operand
    is_early: bool = True  # of more steps, the weights go to L2 before the wait


LIBRARY = MediumRowsPlan(CUBLAS)


def plan_medium_rows(
    op: str, rows: int, weight: torch.Tensor, folder: Path = FOLDER
) -> MediumRowsPlan:
    """Return the plan for rows of x times weight [out, in]; op is PLAIN, GATED or ADDED."""
    if not MAX_ROWS < rows <= MAX_MEDIUM_ROWS or not can_tile(weight):
        return LIBRARY
    num_out, num_in = weight.shape
    return choose(load_table(folder / table_name(weight.device)), (op, num_out, num_in, rows))


def choose(table: dict[Key, MediumRowsPlan], key: Key) -> MediumRowsPlan:
    """Return the plan of the key's shape at as many rows as it has, or the next more."""
    *shape, rows = key
    entries = {entry[3]: plan for entry, plan in table.items() if list(entry[:3]) == shape}
    tuned_rows = min((count for count in entries if count >= rows), default=None)
    return LIBRARY if tuned_rows is None else entries[tuned_rows]


def most_medium_rows(places: Iterable[Place], folder: Path = FOLDER) -> int:
    """Return up to how many rows the table has tiles for one of a layer's places, 0 for none."""
    most = 0
    for op, weight in places:
        if can_tile(weight):
            table = load_table(folder / table_name(weight.device))
            most = max(most, most_rows(table, op, *weight.shape))
    return most


def most_rows(table: dict[Key, MediumRowsPlan], op: str, num_out: int, num_in: int) -> int:
    """Return the most rows at which the table has tiles for a shape, 0 for none."""
    shape = (op, num_out, num_in)
    counts = [key[3] for key, plan in table.items() if key[:3] == shape and plan.kind == TILES]
    return max(counts, default=0)


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
    for (op, *_), plan in table.items():
        if op not in OPS or plan.kind not in (TILES, CUBLAS):
            raise ValueError(f"{path}: {op}, {plan.kind}; scripts/tune.py writes it anew")
    return table
