"""The flags that the measuring commands share; those of the engine are the command line's own."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanorunner.bench.metrics import definitions, parse_slo
from nanorunner.bench.workloads import WORKLOADS
from nanorunner.config import Config
from nanorunner.did_you_mean import did_you_mean
from nanorunner.flags import SAMPLING_HELP, add_engine_flags
from nanorunner.sampling_params import SamplingParams
from nanorunner.token_count import parse_count

DEFAULT_TIME_LIMIT_S = 3600.0
SAMPLING = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "logprobs": int,
}


class ShowDefinitions(argparse.Action):
    """--definitions: print what every figure means, and end."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print and exit with 0."""
        print(definitions())
        parser.exit(0)


def add_measuring_flags(parser: ArgumentParser, *, repeat: int) -> None:
    """Add what every measuring command takes, the engine's flags last."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--repeat",
        type=count_above_0,
        default=repeat,
        metavar="N",
        help=f"measured passes in one process; median and spread are over them (default {repeat})",
    )
    group.add_argument(
        "--warm-up",
        type=count_from_0,
        default=1,
        metavar="N",
        help="passes before them, the whole workload each, so of exactly its shapes (default 1)",
    )
    group.add_argument(
        "--slo",
        type=slo,
        default={},
        metavar="ttft=200,itl=50",
        help="limits in ms that a request must meet to count as goodput: ttft, tpot, itl, e2e",
    )
    group.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON, too")
    group.add_argument(
        "--keep-ids", action="store_true", help="write the first repeat's output ids into it"
    )
    group.add_argument(
        "--time-limit",
        type=number_above_0,
        default=DEFAULT_TIME_LIMIT_S,
        metavar="S",
        help=f"longest pass in seconds (default {DEFAULT_TIME_LIMIT_S:g})",
    )
    group.add_argument(
        "--bandwidth",
        type=number_above_0,
        metavar="GB/S",
        help="memory bandwidth of one device, for --step-times' bound (known for H200)",
    )
    group.add_argument(
        "--tflops",
        type=number_above_0,
        metavar="TFLOP/S",
        help="matrix products of one device, for the same (known for H200, 16-bit)",
    )
    group.add_argument("--definitions", action=ShowDefinitions, help="what every figure means")
    group.add_argument("-q", "--quiet", action="store_true", help="log warnings and errors only")
    sampling = parser.add_argument_group("sampling of every request; it runs to its full length")
    for name, kind in SAMPLING.items():
        sampling.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=argparse.SUPPRESS,
            metavar="N" if kind is int else "X",
            help=SAMPLING_HELP[name],
        )
    add_engine_flags(parser)


def add_workload_flags(parser: ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags of a set of requests; return their group."""
    group = parser.add_argument_group("workload: one of these, ShareGPT-like lengths if none")
    names = ("sharegpt", "fixed", *WORKLOADS)
    group.add_argument(
        "--workload",
        type=lambda text: one_of(text, names),
        metavar="NAME",
        help=f"{', '.join(names)}; nano is nano-vllm's own bench, b8 is 8 x 512 in, 512 out",
    )
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL: prompt, prompt_token_ids or input_len"
    )
    group.add_argument(
        "--num-requests",
        type=count_above_0,
        metavar="N",
        help="of sharegpt or fixed (default 200), or the first N of a file",
    )
    group.add_argument(
        "--input-len", type=count_above_0, metavar="N", help="of fixed (default 512)"
    )
    group.add_argument(
        "--output-len",
        type=count_above_0,
        metavar="N",
        help="of fixed (default 128), or of a file's lines that have none",
    )
    group.add_argument(
        "--length-scale",
        type=number_above_0,
        metavar="X",
        help="multiply sharegpt's lengths, say by 0.1 on a CPU",
    )
    return group


def sampling_params(arguments: Namespace) -> SamplingParams:
    """Return the SamplingParams that the flags ask for; ValueError for what no sampler can do."""
    given = {name: getattr(arguments, name) for name in SAMPLING if hasattr(arguments, name)}
    return SamplingParams(**{"temperature": 0.0, **given})


def check_several_processes(config: Config, command: str) -> None:
    """Refuse, by ValueError, what is meant for one process; `command` measures in one."""
    for name in ("trace", "tap", "tap_json"):
        if value := getattr(config, name):
            raise ValueError(
                f"{name} {value}: every process would write there; use it with `bench {command}`"
            )


def count_above_0(text: str) -> int:
    """Return a count of at least 1, as parse_count() reads it; argparse's error otherwise."""
    return _count(text, least=1)


def counts_above_0(text: str) -> list[int]:
    """Return the counts of "1,8", each of at least 1; argparse's error otherwise."""
    return [count_above_0(part) for part in text.split(",")]


def count_from_0(text: str) -> int:
    """Return a count of at least 0; argparse's error otherwise."""
    return _count(text, least=0)


def number_above_0(text: str) -> float:
    """Return a finite number above 0; argparse's error otherwise."""
    return _number(text, is_zero_allowed=False)


def number_from_0(text: str) -> float:
    """Return a finite number of at least 0; argparse's error otherwise."""
    return _number(text, is_zero_allowed=True)


def one_of(text: str, names: Sequence[str]) -> str:
    """Return a name that is one of several; argparse's error with the closest otherwise."""
    if text not in names:
        raise ArgumentTypeError(f"{text!r}: {did_you_mean(text, names)}")
    return text


def slo(text: str) -> dict[str, float]:
    """Return parse_slo()'s limits; argparse's error otherwise."""
    try:
        return parse_slo(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _count(text: str, least: int) -> int:
    try:
        count = parse_count(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if count < least:
        raise ArgumentTypeError(f"{text}: use {least} or more")
    return count


def _number(text: str, *, is_zero_allowed: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < float("inf") or (is_zero_allowed and value == 0)):
        raise ArgumentTypeError(
            f"{text!r}: use a number {'of at least' if is_zero_allowed else 'above'} 0"
        )
    return value
