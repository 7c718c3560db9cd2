"""`bench latency`: one batch of equal requests, again and again; what a reader waits for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from nanorunner.bench.measuring_flags import add_measuring_flags, count_above_0


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--batch-size",
        "--batch",
        type=count_above_0,
        default=1,
        metavar="N",
        help="requests (default 1)",
    )
    group.add_argument(
        "--input-len", type=count_above_0, default=128, metavar="N", help="ids in (default 128)"
    )
    group.add_argument(
        "--output-len", type=count_above_0, default=128, metavar="N", help="ids out (default 128)"
    )
    add_measuring_flags(parser, repeat=5)


def run(args: Namespace, argv: list[str]) -> int:
    """Measure, print, write, and return the exit code."""
    # imported here: --help and a misspelt flag should not wait for torch
    from nanorunner.bench.job import batch_job
    from nanorunner.bench.session import run_benchmark

    return run_benchmark(
        "latency",
        args,
        argv,
        lambda resolved: batch_job(resolved, args.batch_size, args.input_len, args.output_len),
    )
