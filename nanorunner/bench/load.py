"""`bench load`: requests arrive over time; what users see while the engine is busy with others."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nanorunner.bench.arrivals import KINDS
from nanorunner.bench.measuring_flags import (
    add_measuring_flags,
    add_workload_flags,
    count_above_0,
    number_above_0,
    number_from_0,
    one_of,
)

DEFAULT_MAX_IDLE_S = 10.0


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    workload = add_workload_flags(parser)
    workload.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="a trace: a JSONL of prompts whose lines have timestamp_s or timestamp_ms",
    )
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--arrivals",
        type=lambda text: one_of(text, KINDS),
        metavar="KIND",
        help=f"{', '.join(KINDS)}; what the flags below mean if it is left out",
    )
    group.add_argument(
        "--rate", type=number_above_0, metavar="X", help="requests per second (Poisson)"
    )
    group.add_argument(
        "--burstiness",
        type=number_above_0,
        metavar="X",
        help="shape of the gamma-distributed gaps: below 1 in bursts, 1 Poisson, above 1 even",
    )
    group.add_argument(
        "--concurrency",
        type=count_above_0,
        metavar="N",
        help="closed loop: always N requests in the engine",
    )
    group.add_argument(
        "--speed", type=number_above_0, metavar="X", help="replay a trace so many times as fast"
    )
    group.add_argument(
        "--max-idle",
        type=number_from_0,
        default=DEFAULT_MAX_IDLE_S,
        metavar="S",
        help="of a longer silence skip the rest: nothing runs then "
        f"(default {DEFAULT_MAX_IDLE_S:g}; 0 never waits)",
    )
    add_measuring_flags(parser, repeat=3)


def run(args: Namespace, argv: list[str]) -> int:
    """Measure, print, write, and return the exit code."""
    # imported here: --help and a misspelt flag should not wait for torch
    from nanorunner.bench.job import timed_job
    from nanorunner.bench.session import run_benchmark

    return run_benchmark("load", args, argv, lambda resolved: timed_job(args, resolved))
