"""Find the fastest kernel and tile of each projection of few rows on this GPU, and keep a table.

    python scripts/tune.py [--models 0.6b,8b] [--tp 1,2] [--rows 1,8,16,4,2] [--seconds 190]

Every candidate of kernels/few_rows.py is checked (scripts/tune_check.py), then timed beside the
vendor's library in a CUDA graph of many launches, each over another weight, together larger than
the L2 cache; so launches follow one another as they do in a decode, programmatic dependent launch
included. The best of each shape goes to configs/kernels/ (or --table), where kernels/few_rows_plans
finds it; entries of other shapes stay. --only decode,head times the fused kernels of decode
attention and of the sampled lm_head beside the launches that they replace.

Kernels are compiled ahead in --jobs processes. When --seconds are over, what was found is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import datetime, timezone
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from nanorunner.flags import Parser
from nanorunner.kernels.few_rows_plans import (
    CUBLAS,
    FOLDER,
    GATED,
    NORM,
    PLAIN,
    ROWS,
    FewRowsPlan,
    Key,
    gpu_name,
    load_table,
    table_entry,
)
from nanorunner.kernels.few_rows_triton import Norm, project_triton

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from scripts.tune_check import excess, projection_truth
    from scripts.tune_fused import FAILURES, decode_lines, head_lines, warm, warm_tasks
    from scripts.tune_plans import LIBRARY, candidates
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from tune_check import excess, projection_truth
    from tune_fused import FAILURES, decode_lines, head_lines, warm, warm_tasks
    from tune_plans import LIBRARY, candidates

EPS = 1e-6
KINDS = ("rows", "decode", "head")
COMPILE_TIMEOUT_S = 30.0
FORMAT = "{:<5} {:>5} {:>5} {:>4} {:>5} {:>7}  {}"

Shape = tuple[str, int, int]  # op, out, in
Work = tuple[Shape, int, dict[FewRowsPlan, "Future[None]"]]  # shape, rows, its plans


class Model(NamedTuple):
    """The sizes of a decoder that decide its projections' shapes."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int


MODELS = {
    "0.6b": Model(1024, 16, 8, 128, 3072),
    "1.7b": Model(2048, 16, 8, 128, 6144),
    "8b": Model(4096, 32, 8, 128, 12288),
}


def projections(model: Model, tp: int) -> list[tuple[str, int, int]]:
    """Return (op, out, in) of a layer's projections on one rank; heads and columns divide by tp."""
    q_size = model.num_heads * model.head_dim // tp
    kv_size = model.num_kv_heads * model.head_dim // tp
    return [
        (NORM, q_size + 2 * kv_size, model.hidden),
        (PLAIN, model.hidden, q_size),
        (GATED, 2 * model.intermediate // tp, model.hidden),
        (PLAIN, model.hidden, model.intermediate // tp),
    ]


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

    def truth(self) -> torch.Tensor:
        """Return what launch() of the first weight should, in float64."""
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


def compile_only() -> None:
    """In a compiling process: make every Triton launch compile, and launch nothing."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = run
    torch.empty(0, device="cuda")  # starts CUDA here, not in the first task


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


def best_of(
    shape: Shape, rows: int, plans: list[FewRowsPlan]
) -> tuple[FewRowsPlan, float, dict[str, Any]] | None:
    """Measure a shape's plans, print a line, return the best; None when too few of them run.

    A plan that is wrong is named and left out.
    """
    op, num_out, num_in = shape
    num_bytes = num_out * num_in * 2
    case = problem(op, rows, num_out, num_in, num_sets(num_bytes))
    truth = case.truth()
    times: dict[FewRowsPlan, float] = {}
    for plan in plans:
        try:
            share = excess(case.launch(case.weights[0], plan), truth)
            if share > 1.0:
                print(f"WRONG by {share:.3g} bounds: {shape} rows {rows} {tuple(plan)}", flush=True)
                continue
            times[plan] = graph_us([partial(case.launch, weight, plan) for weight in case.weights])
        except FAILURES as failure:
            print(f"left out: {shape} {rows} {tuple(plan)}: {str(failure)[:90]}", flush=True)
            torch.cuda.synchronize()
    if LIBRARY not in times or len(times) < 2:
        return None
    order = sorted(times, key=lambda plan: times[plan])
    floor_us = num_bytes / READ_BYTES_PER_S * 1e6
    cells = (op, num_out, num_in, rows, f"{floor_us:.1f}", f"{times[LIBRARY]:.1f}")
    texts = [f"{times[plan]:.2f} {plan_text(plan)}" for plan in order[:2]]
    print(FORMAT.format(*cells, "  ".join(texts)), flush=True)
    line = {
        "op": op,
        "out": num_out,
        "in": num_in,
        "rows": rows,
        "floor_us": round(floor_us, 2),
        "library_us": round(times[LIBRARY], 2),
        "plans": [[*plan, round(times[plan], 2)] for plan in order],
    }
    return order[0], times[order[0]], line


def plan_text(plan: FewRowsPlan) -> str:
    """Return a plan in a few letters: dot:16x1024/2w8+norm."""
    if plan.kind == CUBLAS:
        return plan.kind
    splits = f"/{plan.num_splits}" if plan.num_splits > 1 else ""
    apart = "" if plan.is_fused else "-apart"
    return f"{plan.kind}:{plan.out_tile}x{plan.in_tile}{splits}w{plan.num_warps}{apart}"


def all_shapes(args: argparse.Namespace) -> Iterator[tuple[tuple[str, int, int], int]]:
    """Yield ((op, out, in), rows), each once, the most wanted first."""
    seen = set()
    for rows in args.rows:
        for tp in args.tp:
            for name in args.models:
                for shape in projections(MODELS[name], tp):
                    if (shape, rows) not in seen:
                        seen.add((shape, rows))
                        yield shape, rows


def tune_rows(
    args: argparse.Namespace, pool: ProcessPoolExecutor, end_s: float, result: dict[str, Any]
) -> None:
    """Measure the projections and write the table after each, so that nothing found is lost."""
    path = args.table or FOLDER / f"{gpu_name(torch.device('cuda'))}.yaml"
    table = {key: (plan, 0.0) for key, plan in load_table(path).items()}
    futures: dict[object, Future[None]] = {}
    work: list[Work] = []
    for shape, rows in all_shapes(args):
        op, num_out, num_in = shape
        compiled = {}
        for plan in candidates(op, rows, num_out, num_in):
            same = compiled_for(op, plan, num_out, num_in, rows)
            if same not in futures:
                futures[same] = pool.submit(compile_plan, op, rows, num_out, num_in, plan)
            compiled[plan] = futures[same]
        work.append((shape, rows, compiled))
    print(f"{len(work)} shapes, {len(futures)} kernels to compile", flush=True)
    print(FORMAT.format("op", "out", "in", "rows", "floor", "library", "best two (us)"))
    for shape, rows, plans in as_compiled(work, end_s):
        found = best_of(shape, rows, plans)
        if found is not None:
            plan, us, line = found
            key: Key = (*shape, rows)
            table[key] = (plan, us)
            result["rows"].append(line)
            write_table(path, table)
            write(result, args.out)


def as_compiled(work: list[Work], end_s: float) -> Iterator[tuple[Shape, int, list[FewRowsPlan]]]:
    """Yield each shape once its plans are compiled, with those that compiled, until end_s.

    When none becomes ready for COMPILE_TIMEOUT_S, the most wanted one goes with what it has.
    """
    waiting = list(work)
    ready_by_s = time.monotonic() + COMPILE_TIMEOUT_S
    while waiting:
        now_s = time.monotonic()
        if now_s > end_s:
            print(f"out of time; {len(waiting)} shapes were not measured", flush=True)
            return
        ready = [item for item in waiting if all(future.done() for future in item[2].values())]
        if not ready and now_s < ready_by_s:
            missing = [f for _, _, compiled in waiting for f in compiled.values() if not f.done()]
            wait(missing, timeout=min(end_s, ready_by_s) - now_s, return_when=FIRST_COMPLETED)
            continue
        item = (ready or waiting)[0]
        waiting.remove(item)
        shape, rows, compiled = item
        yield shape, rows, [plan for plan, future in compiled.items() if is_good(plan, future)]
        ready_by_s = time.monotonic() + COMPILE_TIMEOUT_S


def is_good(plan: FewRowsPlan, future: Future[None]) -> bool:
    """Return whether a plan is compiled; one that is not is named."""
    if not future.done():
        print(f"not compiled in time: {tuple(plan)}", flush=True)
        return False
    failure = future.exception()
    if failure is not None:
        print(f"left out: {tuple(plan)}: {str(failure)[:90]}", flush=True)
    return failure is None


def write_table(path: Path, table: dict[Key, tuple[FewRowsPlan, float]]) -> None:
    """Write every entry, sorted, with the microseconds that it measured (0: in an earlier run)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [table_entry(key, *found) for key, found in sorted(table.items())]
    head = "# Written by scripts/tune.py; see kernels/few_rows_plans.py.\n"
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Tune and time what --only names; raises ValueError for wrong values."""
    end_s = time.monotonic() + args.seconds
    kinds = args.only.split(",")
    if not set(kinds) <= set(KINDS):
        raise ValueError(f"only {args.only}: choose from {', '.join(KINDS)}")
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
    }
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), initializer=compile_only)
    try:
        warmed = {
            kind: [pool.submit(warm, *task) for task in warm_tasks(kind)]
            for kind in kinds
            if kind != "rows"
        }
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
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 4, 2], help="rows of a step")
    parser.add_argument("--only", default=",".join(KINDS), help="what to measure")
    parser.add_argument("--seconds", type=float, default=190.0, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--table", type=Path, help="the table (default: configs/kernels/GPU.yaml)")
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
