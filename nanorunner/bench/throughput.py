"""`bench throughput`: a whole set of requests, handed over at once; what the machine can do."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from nanorunner.bench.measuring_flags import add_measuring_flags, add_workload_flags


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    add_workload_flags(parser)
    add_measuring_flags(parser, repeat=3)


def run(args: Namespace, argv: list[str]) -> int:
    """Measure, print, write, and return the exit code."""
    # imported here: --help and a misspelt flag should not wait for torch
    from nanorunner.bench.job import set_job
    from nanorunner.bench.session import run_benchmark

    return run_benchmark("throughput", args, argv, lambda resolved: set_job(args, resolved))
