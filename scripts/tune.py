"""Find the fastest kernel and tile of each projection of few rows on this GPU, and keep a table.

    python scripts/tune.py [--models 0.6b,8b] [--tp 1,2] [--rows 1,8,16,4,2] [--seconds 190]
    python scripts/tune.py --only medium --models 0.6b --tp 1 [--rows 64,128] --seconds 120

Every candidate of kernels/few_rows.py is checked (scripts/tune_check.py), then timed beside the
vendor's library in a CUDA graph of many launches, each over another weight, together larger than
the L2 cache; so launches follow one another as they do in a decode, programmatic dependent launch
included. The best of each shape goes to configs/kernels/ (or --table), where kernels/few_rows_plans
finds it; entries of other shapes stay. --only medium does the same for tiles at 17 to 256 rows, and
at 2, 4, 8 and 16 if --rows names them (scripts/tune_medium.py), into a table of its own, and keeps
what makes a whole layer quicker. --only decode,head times the fused kernels of
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
from typing import TYPE_CHECKING, Any

import torch

from nanorunner.bench.measuring_flags import counts_above_0
from nanorunner.flags import Parser
from nanorunner.kernels.few_rows_plans import MAX_ROWS, load_table
from nanorunner.kernels.medium_rows_plans import FEW_ROWS, MAX_MEDIUM_ROWS, ops_at

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.tune_few import tune_rows
    from scripts.tune_fused import FAILURES, decode_lines, head_lines, warm, warm_tasks
    from scripts.tune_medium import tune_medium
    from scripts.tune_models import MODELS
    from scripts.tune_race import COMPILE_TIMEOUT_S, compile_only
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from tune_few import tune_rows
    from tune_fused import FAILURES, decode_lines, head_lines, warm, warm_tasks
    from tune_medium import tune_medium
    from tune_models import MODELS
    from tune_race import COMPILE_TIMEOUT_S, compile_only

KINDS = ("rows", "decode", "head")
MEDIUM = "medium"  # only when named


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
    check_rows(args.rows or [], is_medium=MEDIUM in kinds)
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


def check_rows(row_counts: list[int], *, is_medium: bool) -> None:
    """Raise ValueError where a table has no entries of a row count."""
    few = ", ".join(map(str, FEW_ROWS))
    legal = f"{few}, {MAX_ROWS + 1} to {MAX_MEDIUM_ROWS}" if is_medium else f"1 to {MAX_ROWS}"
    for rows in row_counts:
        if not (ops_at(rows) if is_medium else 1 <= rows <= MAX_ROWS):
            only = MEDIUM if is_medium else ",".join(KINDS)
            raise ValueError(f"rows {rows}: choose from {legal} with --only {only}")


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="tune.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["0.6b", "8b"])
    parser.add_argument(
        "--tp", type=counts_above_0, default=[1, 2], help="split over so many ranks"
    )
    parser.add_argument("--rows", type=counts_above_0, help="rows of a step, the most wanted first")
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
