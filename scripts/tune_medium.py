"""Projections of 17 to 128 rows: their plans, then whole layers; scripts/tune.py --only medium.

First each shape's plans beside the library (scripts/tune_race.py). Then the projections of whole
layers, one behind the other as in a decode but without attention: with the library everywhere, as
long as the table is mute, and with the plans that won. At more than one rank an add + norm stands
where the all-reduce would.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.kernels.few_rows_plans import CUBLAS, FOLDER, GATED, PLAIN
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import (
    ADDED,
    LIBRARY,
    TILES,
    MediumRowsPlan,
    load_table,
    table_name,
)
from nanorunner.kernels.rms_norm import add_rms_norm

if TYPE_CHECKING:
    from scripts.bench_engine import write
    from scripts.bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from scripts.tune_check import projection_truth
    from scripts.tune_medium_plans import candidates, predicted_us
    from scripts.tune_models import MODELS, all_shapes, layer_shapes
    from scripts.tune_race import Race, write_table
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import write
    from bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from tune_check import projection_truth
    from tune_medium_plans import candidates, predicted_us
    from tune_models import MODELS, all_shapes, layer_shapes
    from tune_race import Race, write_table

EPS = 1e-6
ROWS = [64, 128, 32, 96, 48, 24]  # the most wanted first
RACE_SHARE = 0.8  # of the time; the rest is for layers
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
FORMAT = "{:<6} {:>3} {:>5} {:>7} {:>9} {:>8}"


def ops_of(tp: int) -> tuple[str, str, str, str]:
    """Return what qkv, o, gate_up and down are on one of so many ranks (decoder.py)."""
    after = ADDED if tp == 1 else PLAIN
    return PLAIN, after, GATED, after


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


def problem(op: str, rows: int, num_out: int, num_in: int, sets: int) -> Problem:
    """Return random inputs of about unit scale, and `sets` weights."""
    x, begin = torch.randn((rows, num_in), **OPTIONS), torch.randn((rows, num_out), **OPTIONS)
    gain = torch.rand(num_out, **OPTIONS) + 0.5
    shape = (num_out, num_in)
    weights = [torch.randn(shape, **OPTIONS).mul_(num_in**-0.5) for _ in range(sets)]
    return Problem(op, x, begin, begin.clone(), gain, weights)


def compile_plan(op: str, rows: int, num_out: int, num_in: int, plan: MediumRowsPlan) -> None:
    """Compile what a candidate launches, into the cache on disk; on empty buffers."""
    x, residual = (torch.empty((rows, size), **OPTIONS) for size in (num_in, num_out))
    weight = torch.empty((num_out, num_in), **OPTIONS)
    Problem(op, x, residual, residual, residual[0], [weight]).launch(weight, plan)


def compiled_for(op: str, plan: MediumRowsPlan, num_out: int, num_in: int, rows: int) -> object:
    """Return what enters a plan's compiled kernels; shapes that agree in it share them."""
    if plan.kind == CUBLAS:
        return (op, plan.kind, num_out)  # what comes after it
    share = -(-num_in // (plan.num_splits * plan.in_tile)) * plan.in_tile
    is_even = num_out % plan.out_tile == 0 and num_in % share == 0
    return (op, plan, is_even, share == plan.in_tile, num_out if op == ADDED else 0)


def plan_text(plan: MediumRowsPlan) -> str:
    """Return a plan in a few letters: 64x32x128/2w4s4, t when swapped, e when early."""
    if plan.kind == CUBLAS:
        return plan.kind
    splits = f"/{plan.num_splits}" if plan.num_splits > 1 else ""
    letters = "t" * plan.is_swapped + "e" * plan.is_early
    tile = f"{plan.row_tile}x{plan.out_tile}x{plan.in_tile}"
    return f"{tile}{splits}w{plan.num_warps}s{plan.num_stages}{letters}"


class Layers:
    """The projections of some layers, together larger than the L2 cache."""

    def __init__(self, name: str, tp: int, rows: int) -> None:
        model = MODELS[name]
        self.tp = tp
        self.shapes = layer_shapes(model, tp)
        self.num_bytes = sum(2 * num_out * num_in for num_out, num_in in self.shapes)
        self.weights = [
            [torch.randn(shape, **OPTIONS).mul_(shape[1] ** -0.5) for shape in self.shapes]
            for _ in range(num_sets(self.num_bytes))
        ]
        self.x, self.residual = (torch.randn((rows, model.hidden), **OPTIONS) for _ in range(2))
        self.gain = torch.ones(model.hidden, **OPTIONS)

    def run(self, weights: list[torch.Tensor], plans: list[MediumRowsPlan]) -> torch.Tensor:
        """Run one layer; what the o projection reads is the front of qkv."""
        qkv, o, gate_up, down = weights
        h = linear_medium(self.x, qkv, None, plans[0])
        x = self.add(h[:, : o.shape[1]], o, plans[1])
        return self.add(gate_up_silu(x, gate_up, None, plans[2]), down, plans[3])

    def add(self, x: torch.Tensor, weight: torch.Tensor, plan: MediumRowsPlan) -> torch.Tensor:
        """Run o or down, and the add + norm behind it."""
        if self.tp == 1:
            return linear_add_norm(x, weight, None, self.residual, self.gain, EPS, plan)
        x = linear_medium(x, weight, None, plan)
        return add_rms_norm(x, self.residual, self.gain, EPS)

    def us(self, plans: list[MediumRowsPlan]) -> float:
        """Return microseconds a layer."""
        return graph_us([partial(self.run, weights, plans) for weights in self.weights])


def tune_medium(
    args: argparse.Namespace, pool: ProcessPoolExecutor, end_s: float, result: dict[str, Any]
) -> None:
    """Measure the projections and write the table after each, then measure layers with it."""
    path: Path = args.table or FOLDER / table_name(torch.device("cuda"))
    table: dict[Any, Any] = {key: (plan, 0.0) for key, plan in load_table(path).items()}
    rows_to_try = args.rows or ROWS
    race = Race(LIBRARY, candidates, compile_plan, compiled_for, problem, plan_text)
    shapes = all_shapes(args.models, args.tp, rows_to_try, ops_of)
    race_end_s = end_s - (1 - RACE_SHARE) * (end_s - time.monotonic())
    for found in race.run(shapes, pool, race_end_s):
        table[found.key] = (found.plan, found.us)
        op, num_out, num_in, rows = found.key
        tiles = next(row for row in found.line["plans"] if row[0] == TILES)
        best = MediumRowsPlan(*tiles[:-1])
        found.line["predicted_us"] = round(predicted_us(op, rows, num_out, num_in, best), 2)
        result["medium"].append(found.line)
        write_table(path, table, "kernels/medium_rows_plans.py")
        write(result, args.out)
    measured = {key: plan for key, (plan, _) in table.items()}
    print("us of a layer's projections, norms and gate")
    print(FORMAT.format("model", "tp", "rows", "floor", "library", "table"))
    for rows in rows_to_try:
        for tp in args.tp:
            for name in args.models:
                if time.monotonic() > end_s:
                    print("out of time; the rest was not measured", flush=True)
                    return
                result["layers"].append(layer_line(name, tp, rows, measured))
                write(result, args.out)


def layer_line(name: str, tp: int, rows: int, table: dict[Any, MediumRowsPlan]) -> dict[str, Any]:
    """Measure a layer with the library and with the table; print a line and return it."""
    layers = Layers(name, tp, rows)
    plans = [
        table.get((op, *shape, rows), LIBRARY)
        for op, shape in zip(ops_of(tp), layers.shapes, strict=True)
    ]
    line = {
        "model": name,
        "tp": tp,
        "rows": rows,
        "floor_us": round(layers.num_bytes / READ_BYTES_PER_S * 1e6, 2),
        "library_us": round(layers.us([LIBRARY] * len(plans)), 2),
        "table_us": round(layers.us(plans), 2),
    }
    print(FORMAT.format(*line.values()), *map(plan_text, plans), flush=True)
    return line
