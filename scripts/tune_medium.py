"""Tiles for projections of 2 to 256 rows, and the layers that gain by them.

scripts/tune.py --only medium runs this. First each shape's plans beside what serves it without
them (scripts/tune_race.py): few rows' own table up to 16 rows, the vendor's library above. Then
whole layers, attention included, in which each projection may take another of its fastest plans
(scripts/tune_layers.py): the table gets the entries of layers that gain.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.kernels.few_rows_plans import CUBLAS, FOLDER, GATED, MAX_ROWS, PLAIN, Key
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import (
    ADDED,
    LIBRARY,
    TILES,
    MediumRowsPlan,
    load_table,
    table_name,
)

if TYPE_CHECKING:
    from scripts import tune_few
    from scripts.bench_engine import write
    from scripts.tune_check import projection_truth
    from scripts.tune_layers import (
        FORMAT,
        HEADS,
        Table,
        gains,
        layer_keys,
        layer_line,
        ops_of,
        settle,
    )
    from scripts.tune_medium_plans import candidates, predicted_us
    from scripts.tune_models import EPS, OPTIONS, all_shapes
    from scripts.tune_race import Race, Result, measured, write_table
else:  # a script's own folder is where Python looks first; it is no package
    import tune_few
    from bench_engine import write
    from tune_check import projection_truth
    from tune_layers import (
        FORMAT,
        HEADS,
        Table,
        gains,
        layer_keys,
        layer_line,
        ops_of,
        settle,
    )
    from tune_medium_plans import candidates, predicted_us
    from tune_models import EPS, OPTIONS, all_shapes
    from tune_race import Race, Result, measured, write_table

ROWS = [64, 128, 32, 96, 48, 24]  # the most wanted first
RACE_SHARE = 0.7  # of the time; the rest is for layers
MAX_ALTERNATIVES = 3  # tiles of a projection that a layer tries


class Problem(NamedTuple):
    """One projection of medium rows, with inputs on the GPU."""

    op: str
    x: torch.Tensor
    begin: torch.Tensor  # the residual [rows, out] of an ADDED one, and what it has grown to
    residual: torch.Tensor
    gain: torch.Tensor
    weights: list[torch.Tensor]

    def launch(self, weight: torch.Tensor, plan: MediumRowsPlan) -> torch.Tensor:
        """Run the projection once; the residual grows."""
        if self.op == GATED:
            return gate_up_silu(self.x, weight, None, plan)
        if self.op == ADDED:
            return linear_add_norm(self.x, weight, None, self.residual, self.gain, EPS, plan)
        return linear_medium(self.x, weight, None, plan)

    def first(self, plan: MediumRowsPlan) -> torch.Tensor:
        """Return what the first weight gives."""
        self.residual.copy_(self.begin)
        return self.launch(self.weights[0], plan)

    def truth(self) -> torch.Tensor:
        """Return what first() should, in float64."""
        product = projection_truth(self.x, self.weights[0], is_gated=self.op == GATED)
        if self.op != ADDED:
            return product
        total = product + self.begin.double()
        return total * (total.square().mean(dim=1, keepdim=True) + EPS).rsqrt() * self.gain.double()


def problem(op: str, rows: int, num_out: int, num_in: int, sets: int) -> Problem | tune_few.Problem:
    """Return random inputs of about unit scale, and `sets` weights."""
    if rows <= MAX_ROWS:
        return tune_few.problem(op, rows, num_out, num_in, sets)
    x, begin = torch.randn((rows, num_in), **OPTIONS), torch.randn((rows, num_out), **OPTIONS)
    gain = torch.rand(num_out, **OPTIONS) + 0.5
    shape = (num_out, num_in)
    weights = [torch.randn(shape, **OPTIONS).mul_(num_in**-0.5) for _ in range(sets)]
    return Problem(op, x, begin, begin.clone(), gain, weights)


def compile_plan(op: str, rows: int, num_out: int, num_in: int, plan: MediumRowsPlan) -> None:
    """Compile what a candidate launches, into the cache on disk; on empty buffers."""
    if rows <= MAX_ROWS:
        return tune_few.compile_plan(op, rows, num_out, num_in, plan)
    x, residual = (torch.empty((rows, size), **OPTIONS) for size in (num_in, num_out))
    weight = torch.empty((num_out, num_in), **OPTIONS)
    Problem(op, x, residual, residual, residual[0], [weight]).launch(weight, plan)


def compiled_for(op: str, plan: MediumRowsPlan, num_out: int, num_in: int, rows: int) -> object:
    """Return what enters a plan's compiled kernels; shapes that agree in it share them."""
    if plan.kind == CUBLAS:
        # what comes after it; at few rows the plan of another table
        return (op, plan.kind, num_out, (num_in, rows) if rows <= MAX_ROWS else 0)
    share = -(-num_in // (plan.num_splits * plan.in_tile)) * plan.in_tile
    is_even = num_out % plan.out_tile == 0 and num_in % share == 0
    # The width of the norm, which is behind it, or in front of it at few rows.
    width = num_out if op == ADDED else num_in if rows <= MAX_ROWS and op != PLAIN else 0
    return (op, plan, is_even, share == plan.in_tile, width)


def plan_text(plan: MediumRowsPlan) -> str:
    """Return a plan in a few letters: 64x32x128/2w4s4, t when swapped, e when early."""
    if plan.kind == CUBLAS:
        return plan.kind
    splits = f"/{plan.num_splits}" if plan.num_splits > 1 else ""
    letters = "t" * plan.is_swapped + "e" * plan.is_early
    tile = f"{plan.row_tile}x{plan.out_tile}x{plan.in_tile}"
    return f"{tile}{splits}w{plan.num_warps}s{plan.num_stages}{letters}"


def tune_medium(
    args: argparse.Namespace, pool: ProcessPoolExecutor, end_s: float, result: dict[str, Any]
) -> None:
    """Measure the projections, then layers; write the table after each layer.

    What no layer was measured with is in `result` alone.
    """
    path: Path = args.table or FOLDER / table_name(torch.device("cuda"))
    before = measured(path, load_table(path))
    row_counts = args.rows or ROWS
    race = Race(LIBRARY, candidates, compile_plan, compiled_for, problem, plan_text)
    shapes = all_shapes(args.models, args.tp, row_counts, ops_of)
    race_end_s = end_s - (1 - RACE_SHARE) * (end_s - time.monotonic())
    found: dict[Key, Result] = {}
    for winner in race.run(shapes, pool, race_end_s):
        found[winner.key] = winner
        op, num_out, num_in, rows = winner.key
        tiles = next(row for row in winner.line["plans"] if row[0] == TILES)
        best = MediumRowsPlan(*tiles[:-1])
        winner.line["predicted_us"] = round(predicted_us(op, rows, num_out, num_in, best), 2)
        result["medium"].append(winner.line)
        write(result, args.out)
    print("us of a layer")
    print(FORMAT.format(*HEADS))
    cases = [(name, tp, rows) for rows in row_counts for tp in args.tp for name in args.models]
    for name, tp, rows in cases:
        if time.monotonic() > end_s:
            print("out of time; the rest was not measured, and its entries stay as they were")
            return
        keys = layer_keys(name, tp, rows)
        line, chosen = layer_line(
            name, tp, rows, [alternatives(key, found, before) for key in keys]
        )
        for key, plan in zip(keys, chosen, strict=True):
            if key in found:
                found[key] = as_chosen(found[key], plan)
        verdict = "kept" if gains(line) else "left out"
        print(FORMAT.format(*line.values()), verdict, *map(plan_text, chosen), flush=True)
        result["layers"].append(line)
        table = settle(before, found, result["layers"])
        write_table(path, table, "kernels/medium_rows_plans.py")
        write(result, args.out)


def alternatives(key: Key, found: Mapping[Key, Result], before: Table) -> list[MediumRowsPlan]:
    """Return what a layer tries for a projection: the best alone, the library, the next best.

    Where nothing was found: what the table has, and the library.
    """
    if key in found:
        plans = [MediumRowsPlan(*fields[:-1]) for fields in found[key].line["plans"]]
    else:
        plans = [before[key][0]] if key in before else []
    tiles = [plan for plan in plans if plan.kind == TILES][:MAX_ALTERNATIVES]
    return list(dict.fromkeys([*plans[:1], LIBRARY, *tiles]))


def as_chosen(winner: Result, plan: MediumRowsPlan) -> Result:
    """Return what a race has found with the plan that a layer has chosen, and its own time."""
    times = {MediumRowsPlan(*fields[:-1]): fields[-1] for fields in winner.line["plans"]}
    return winner._replace(plan=plan, us=times[plan])
