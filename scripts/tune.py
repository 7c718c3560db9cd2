"""Find the fastest kernel and tile of each projection of few rows on this GPU, and keep a table.

    python scripts/tune.py [--models 0.6b,8b] [--tp 1,2] [--rows 1,8,16,4,2] [--seconds 190]
    python scripts/tune.py --only medium --models 0.6b --tp 1 --seconds 120

Every candidate of kernels/few_rows.py is checked (scripts/tune_check.py), then timed beside the
vendor's library in a CUDA graph of many launches, each over another weight, together larger than
the L2 cache; so launches follow one another as they do in a decode, programmatic dependent launch
included. The best of each shape goes to configs/kernels/ (or --table), where kernels/few_rows_plans
finds it; entries of other shapes stay. --only medium does the same for 17 to 128 rows
(scripts/tune_medium.py), into a table of its own. --only decode,head times the fused kernels of
decode attention and of the sampled lm_head beside the launches that they replace.

Kernels are compiled ahead in --jobs processes. When --seconds are over, what was found is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.flags import Parser
from nanorunner.kernels.few_rows_plans import (
    CUBLAS,
    FOLDER,
    GATED,
    MAX_ROWS,
    NORM,
    PLAIN,
    ROWS,
    FewRowsPlan,
    gpu_name,
    load_table,
)
from nanorunner.kernels.few_rows_triton import Norm, project_triton
from nanorunner.kernels.medium_rows_plans import MAX_MEDIUM_ROWS

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.tune_check import projection_truth
    from scripts.tune_fused import FAILURES, decode_lines, head_lines, warm, warm_tasks
    from scripts.tune_medium import tune_medium
    from scripts.tune_models import MODELS, all_shapes
    from scripts.tune_plans import LIBRARY, candidates
    from scripts.tune_race import COMPILE_TIMEOUT_S, Race, compile_only, write_table
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from tune_check import projection_truth
    from tune_fused import FAILURES, decode_lines, head_lines, warm, warm_tasks
    from tune_medium import tune_medium
    from tune_models import MODELS, all_shapes
    from tune_plans import LIBRARY, candidates
    from tune_race import COMPILE_TIMEOUT_S, Race, compile_only, write_table

EPS = 1e-6
KINDS = ("rows", "decode", "head")
MEDIUM = "medium"  # only when named
FEW_ROWS = [1, 8, 16, 4, 2]


def ops_of(tp: int) -> tuple[str, str, str, str]:
    """Return what qkv, o, gate_up and down are at few rows (kernels/few_rows.py)."""
    return NORM, PLAIN, GATED, PLAIN


class Problem(NamedTuple):
    """One projection of few rows, with inputs on the GPU."""

    op: str
    x: torch.Tensor
    norm: Norm | None
    weights: list[torch.Tensor]

    def launch(self, weight: torch.Tensor, plan: FewRowsPlan) -> torch.Tensor:
        """Run the projection once."""
        is_gated = self.op == GATED
        return project_triton(self.x, weight, None, plan, norm=self.norm, is_gated=is_gated)[0]

    def first(self, plan: FewRowsPlan) -> torch.Tensor:
        """Return what the first weight gives."""
        return self.launch(self.weights[0], plan)

    def truth(self) -> torch.Tensor:
        """Return what first() should, in float64."""
        norm = (None, None, 0.0) if self.norm is None else self.norm
        return projection_truth(self.x, self.weights[0], *norm, is_gated=self.op == GATED)


def problem(op: str, rows: int, num_out: int, num_in: int, sets: int) -> Problem:
    """Return random inputs of about unit scale, and `sets` weights."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn((rows, num_in), **options)
    norm = None
    if op != PLAIN:
        norm = Norm(
            torch.randn((rows, num_in), **options), torch.rand(num_in, **options) + 0.5, EPS
        )
    shape = (num_out, num_in)
    weights = [torch.randn(shape, **options).mul_(num_in**-0.5) for _ in range(sets)]
    return Problem(op, x, norm, weights)


def compile_plan(op: str, rows: int, num_out: int, num_in: int, plan: FewRowsPlan) -> None:
    """Compile what a candidate launches, into the cache on disk; on empty buffers."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    x, gain = torch.empty((rows, num_in), **options), torch.empty(num_in, **options)
    norm = None if op == PLAIN else Norm(torch.empty_like(x), gain, EPS)
    weight = torch.empty((num_out, num_in), **options)
    project_triton(x, weight, None, plan, norm=norm, is_gated=op == GATED)


def compiled_for(op: str, plan: FewRowsPlan, num_out: int, num_in: int, rows: int) -> object:
    """Return what enters a plan's compiled kernels; shapes that agree in it share them."""
    if plan.kind == CUBLAS:
        return (plan.kind, num_in)  # the norm before it
    share = rows if plan.kind == ROWS else rows <= 8
    even = num_out % (plan.out_tile * (2 if op == GATED else 1)) == 0
    return (op, plan, num_in, share, even)


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
    table: dict[Any, Any] = {key: (plan, 0.0) for key, plan in load_table(path).items()}
    shapes = all_shapes(args.models, args.tp, args.rows or FEW_ROWS, ops_of)
    race = Race(LIBRARY, candidates, compile_plan, compiled_for, problem, plan_text)
    for found in race.run(shapes, pool, end_s):
        table[found.key] = (found.plan, found.us)
        result["rows"].append(found.line)
        write_table(path, table, "kernels/few_rows_plans.py")
        write(result, args.out)


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Tune and time what --only names; raises ValueError for wrong values."""
    end_s = time.monotonic() + args.seconds
    kinds = args.only.split(",")
    if not set(kinds) <= {*KINDS, MEDIUM}:
        raise ValueError(f"only {args.only}: choose from {', '.join((*KINDS, MEDIUM))}")
    if MEDIUM in kinds and kinds != [MEDIUM]:
        raise ValueError(
            f"only {args.only}: {MEDIUM} has a table and a time of its own; run it alone"
        )
    least, most = (MAX_ROWS + 1, MAX_MEDIUM_ROWS) if MEDIUM in kinds else (1, MAX_ROWS)
    if args.rows and not all(least <= rows <= most for rows in args.rows):
        raise ValueError(f"rows {args.rows}: choose from {least} to {most} with only {args.only}")
    unknown = set(args.models) - set(MODELS)
    if unknown:
        raise ValueError(f"models {', '.join(unknown)}: choose from {', '.join(MODELS)}")
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; these are measurements of one")
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/tune.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "rows": [],
        "decode": [],
        "head": [],
        "medium": [],
        "layers": [],
    }
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), initializer=compile_only)
    try:
        warmed = {
            kind: [pool.submit(warm, *task) for task in warm_tasks(kind)]
            for kind in kinds
            if kind in ("decode", "head")
        }
        if MEDIUM in kinds:
            tune_medium(args, pool, end_s, result)
        if "rows" in kinds:
            # The layers below are timed with the table that this writes.
            share = 1.0 if kinds == ["rows"] else 0.6
            tune_rows(args, pool, time.monotonic() + share * args.seconds, result)
            load_table.cache_clear()
        for kind, measure in (("decode", decode_lines), ("head", head_lines)):
            if kind in kinds:
                for future in warmed[kind]:
                    try:
                        future.result(timeout=COMPILE_TIMEOUT_S)
                    except FAILURES as failure:
                        print(f"not compiled ahead: {failure}", flush=True)
                for line in measure(end_s):
                    result[kind].append(line)
                    write(result, args.out)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return result


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="tune.py", description=(__doc__ or "").split("\n")[0])

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--models", type=lambda text: text.split(","), default=["0.6b", "8b"])
    parser.add_argument("--tp", type=numbers, default=[1, 2], help="split over so many ranks")
    parser.add_argument("--rows", type=numbers, help="rows of a step, the most wanted first")
    parser.add_argument(
        "--only", default=",".join(KINDS), help=f"what to measure: {', '.join(KINDS)}; or {MEDIUM}"
    )
    parser.add_argument("--seconds", type=float, default=190.0, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument(
        "--table", type=Path, help="the table (default: in configs/kernels/, named by the GPU)"
    )
    parser.add_argument("--out", type=Path, help="write every measurement to this file, as JSON")
    args = parser.parse_args(argv)
    try:
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    write(result, args.out)
    print(json.dumps({name: result[name] for name in ("command", "time", "machine")}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
