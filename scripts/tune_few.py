"""Projections of few rows: their plans beside the library; scripts/tune.py --only rows.

scripts/tune_medium.py measures the tiles of 2 to 16 rows by the same problems, beside what the
table of few rows has for them: baseline().
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.kernels.few_rows_plans import (
    CUBLAS,
    FOLDER,
    GATED,
    NORM,
    PLAIN,
    FewRowsPlan,
    gpu_name,
    load_table,
    plan_few_rows,
)
from nanorunner.kernels.few_rows_triton import AnyPlan, Norm, compiled_rows, project_triton
from nanorunner.kernels.medium_rows_plans import LIBRARY as NO_TILES

if TYPE_CHECKING:
    from scripts.bench_engine import write
    from scripts.tune_check import projection_truth
    from scripts.tune_models import EPS, OPTIONS, all_shapes
    from scripts.tune_plans import LIBRARY, candidates
    from scripts.tune_race import Race, measured, write_table
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import write
    from tune_check import projection_truth
    from tune_models import EPS, OPTIONS, all_shapes
    from tune_plans import LIBRARY, candidates
    from tune_race import Race, measured, write_table

ROWS_TO_TRY = [1, 8, 16, 4, 2]  # the most wanted first


def ops_of(tp: int, rows: int) -> tuple[str, str, str, str]:
    """Return what qkv, o, gate_up and down are at few rows (kernels/few_rows.py)."""
    return NORM, PLAIN, GATED, PLAIN


def baseline(op: str, rows: int, weight: torch.Tensor, plan: AnyPlan) -> AnyPlan:
    """Return plan, but what few rows' own table has for the projection where plan is NO_TILES."""
    return plan_few_rows(op, rows, weight) if plan == NO_TILES else plan


class Problem(NamedTuple):
    """One projection of few rows, with inputs on the GPU."""

    op: str
    x: torch.Tensor
    norm: Norm | None
    weights: list[torch.Tensor]

    def launch(self, weight: torch.Tensor, plan: AnyPlan) -> torch.Tensor:
        """Run the projection once."""
        plan, is_gated = baseline(self.op, len(self.x), weight, plan), self.op == GATED
        return project_triton(self.x, weight, None, plan, norm=self.norm, is_gated=is_gated)[0]

    def first(self, plan: AnyPlan) -> torch.Tensor:
        """Return what the first weight gives."""
        return self.launch(self.weights[0], plan)

    def truth(self) -> torch.Tensor:
        """Return what first() should, in float64."""
        norm = (None, None, 0.0) if self.norm is None else self.norm
        return projection_truth(self.x, self.weights[0], *norm, is_gated=self.op == GATED)


def problem(op: str, rows: int, num_out: int, num_in: int, sets: int) -> Problem:
    """Return random inputs of about unit scale, and `sets` weights."""
    x = torch.randn((rows, num_in), **OPTIONS)
    norm = None
    if op != PLAIN:
        norm = Norm(
            torch.randn((rows, num_in), **OPTIONS), torch.rand(num_in, **OPTIONS) + 0.5, EPS
        )
    shape = (num_out, num_in)
    weights = [torch.randn(shape, **OPTIONS).mul_(num_in**-0.5) for _ in range(sets)]
    return Problem(op, x, norm, weights)


def compile_plan(op: str, rows: int, num_out: int, num_in: int, plan: AnyPlan) -> None:
    """Compile what a candidate launches, into the cache on disk; on empty buffers."""
    x, gain = torch.empty((rows, num_in), **OPTIONS), torch.empty(num_in, **OPTIONS)
    norm = None if op == PLAIN else Norm(torch.empty_like(x), gain, EPS)
    weight = torch.empty((num_out, num_in), **OPTIONS)
    Problem(op, x, norm, [weight]).launch(weight, plan)


def compiled_for(op: str, plan: FewRowsPlan, num_out: int, num_in: int, rows: int) -> object:
    """Return what enters a plan's compiled kernels; shapes that agree in it share them."""
    if plan.kind == CUBLAS:
        return (plan.kind, num_in)  # the norm before it
    even = num_out % (plan.out_tile * (2 if op == GATED else 1)) == 0
    return (op, plan, num_in, compiled_rows(plan, rows), even)


def plan_text(plan: FewRowsPlan) -> str:
    """Return a plan in a few letters: dot:16x1024/2w8+norm."""
    if plan.kind == CUBLAS:
        return plan.kind
    splits = f"/{plan.num_splits}" if plan.num_splits > 1 else ""
    apart = "" if plan.is_fused else "-apart"
    return f"{plan.kind}:{plan.out_tile}x{plan.in_tile}{splits}w{plan.num_warps}{apart}"


def tune_rows(
    args: argparse.Namespace, pool: ProcessPoolExecutor, end_s: float, result: dict[str, Any]
) -> None:
    """Measure the projections and write the table after each, so that nothing found is lost."""
    path = args.table or FOLDER / f"{gpu_name(torch.device('cuda'))}.yaml"
    table: dict[Any, Any] = measured(path, load_table(path))
    shapes = all_shapes(args.models, args.tp, args.rows or ROWS_TO_TRY, ops_of)
    race = Race(LIBRARY, candidates, compile_plan, compiled_for, problem, plan_text)
    for found in race.run(shapes, pool, end_s):
        table[found.key] = (found.plan, found.us)
        result["rows"].append(found.line)
        write_table(path, table, "kernels/few_rows_plans.py")
        write(result, args.out)
