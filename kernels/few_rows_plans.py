"""Which kernel and which tile serve a projection of few rows: a table, and a rule where it is mute.

scripts/tune.py measures and writes configs/kernels/NAME.yaml, NAME being the GPU's ("NVIDIA H200":
nvidia-h200.yaml). An entry is a projection's place in a layer, its weight's shape, its rows and the
plan that won. A row count between two entries takes the larger one's plan.

    - {op: norm, out: 4096, in: 1024, rows: 1, kind: rows, out_tile: 8, in_tile: 1024, ...}

A GPU without a table, and a shape that its table lacks, get default_plan. From 2 rows on the table
of kernels/medium_rows_plans.py is asked before this one (few_rows_triton.choose_plan).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import yaml

from nanorunner.kernels.triton_support import next_power_of_two, num_processors

MAX_ROWS = 16  # the rows of a matrix instruction's tile
FOLDER = Path(__file__).parent.parent / "configs" / "kernels"
# Every start reads the tables: libyaml's loader, where PyYAML has it, takes 22 ms instead of 180.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The places of a projection: after add + norm (qkv), so and before SiLU * up (gate_up), or alone.
NORM, GATED, PLAIN = "norm", "gated", "plain"
# The kernels: whole rows of the weight times a vector, matrix tiles, or the vendor's library.
ROWS, DOT, CUBLAS = "rows", "dot", "cublas"

Key = tuple[str, int, int, int]  # op, out, in, rows
Plan = TypeVar("Plan")


class Fields(Protocol):
    """A plan of any table: a named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


class FewRowsPlan(NamedTuple):
    """How one projection is launched; of a cublas plan only is_fused counts, and it is False."""

    kind: str
    out_tile: int = 16  # rows of the weight a program, of either half when gated
    in_tile: int = 256  # columns of the weight a load; of a dot a multiple of 32 * num_warps
    num_splits: int = 1  # dot alone: programs that share the columns; they meet in a second launch
    num_warps: int = 4
    is_fused: bool = True  # the norm inside; False: a kernel of its own before


def plan_few_rows(op: str, rows: int, weight: torch.Tensor, folder: Path = FOLDER) -> FewRowsPlan:
    """Return the plan for rows of x times weight [out, in]; op is NORM, GATED or PLAIN."""
    num_out, num_in = weight.shape
    device = weight.device
    if device.type == "cuda" and weight.element_size() == 2:
        table = load_table(folder / f"{gpu_name(device)}.yaml")
        for tuned_rows in _tuned_rows(table):
            plan = table.get((op, num_out, num_in, tuned_rows))
            if tuned_rows >= rows and plan is not None:
                return plan
    return default_plan(op, rows, num_out, num_in, weight.element_size(), num_processors(device))


def default_plan(
    op: str,
    rows: int,
    num_out: int,
    num_in: int,
    item_bytes: int,
    processors: int,
) -> FewRowsPlan:
    """Return the plan by rule: whole rows for one row, matrix tiles for a few, then the library.

    The rule must not lose to the library, and above 8 rows only a measured tile beats it.
    """
    halves = 2 if op == GATED else 1
    num_out //= halves
    if rows == 1:
        # One load a row up to 4096 columns: all of a program's weights are then on their way
        # before it waits for its input.
        in_tile = min(next_power_of_two(num_in), 4096)
        out_tile = max(8192 * 2 // item_bytes // halves // in_tile, 1)
        while out_tile > 1 and num_out // out_tile < 2 * processors:
            out_tile //= 2
        elements = out_tile * in_tile * halves
        return FewRowsPlan(ROWS, out_tile, in_tile, 1, min(max(elements // 2048, 1), 8))
    if rows > 8 or item_bytes == 4:  # matrix instructions have no full float32
        return FewRowsPlan(CUBLAS, is_fused=False)
    out_tile = 8 if num_out < 16 * processors // 2 else 16
    num_warps = min(max(next_power_of_two(num_in) // 32, 1), 8)
    # 64 registers a thread hold weights: all of them, or a step and the next one.
    elements = 128 * 32 * num_warps // (halves * out_tile)
    in_tile = min(next_power_of_two(num_in), elements)
    if in_tile < num_in:
        in_tile = elements // 2
    in_tile = max(in_tile, 32 * num_warps)
    # Each program norms all of x again; where x is large, a kernel of its own costs less.
    return FewRowsPlan(DOT, out_tile, in_tile, 1, num_warps, is_fused=rows * num_in <= 16384)


def gpu_name(device: torch.device) -> str:
    """Return a GPU's name as its table's file is called: nvidia-h200."""
    return torch.cuda.get_device_name(device).lower().replace(" ", "-").replace("/", "-")


@functools.cache
def load_table(path: Path) -> dict[Key, FewRowsPlan]:
    """Return the plans in a table, none when there is no such file; ValueError on a bad entry."""
    return read_table(path, FewRowsPlan)


def read_table(
    path: Path, make: Callable[..., Plan], script: str = "scripts/tune.py"
) -> dict[Key, Plan]:
    """Return what `make` makes of a table's entries, {} without such a file; ValueError as above.

    `make` gets the fields of an entry that are not its key. script: what writes the table.
    """
    if not path.is_file():
        return {}
    table: dict[Key, Plan] = {}
    for entry in yaml.load(path.read_text(encoding="utf-8"), LOADER) or []:
        try:
            fields = dict(entry)
            key = (fields.pop("op"), fields.pop("out"), fields.pop("in"), fields.pop("rows"))
            fields.pop("us", None)  # what it measured: for people
            table[key] = make(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {entry}: {error}; {script} writes it anew") from error
    return table


def table_entry(key: Key, plan: Fields, us: float) -> str:
    """Return one line of a table, which load_table reads back."""
    names = ("op", "out", "in", "rows")
    fields = dict(zip(names, key, strict=True)) | plan._asdict() | {"us": round(us, 2)}
    texts = (f"{name}: {str(value).lower()}" for name, value in fields.items())
    return "- {" + ", ".join(texts) + "}"


def _tuned_rows(table: dict[Key, FewRowsPlan]) -> list[int]:
    """Return the row counts that a table has, ascending."""
    return sorted({rows for _, _, _, rows in table})
