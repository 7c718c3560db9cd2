"""`nanorunner bench compare v1 v2 [vllm] [hf]`: the same work on every side, and what may be said.

    for each round: one fresh process a side, in turns (the order flips every round)
    -> ratios with their spread, equal outputs, who fell back, what differed

The flags after the sides are those of `bench throughput` and hold for all of them: same model,
dtype, backend, graph sizes, token budget, requests and seed. A side may have settings of its own,
as v2:async_depth=1. A peer that is not installed is skipped by name, as long as two sides are left.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanorunner.bench import throughput
from nanorunner.bench.compare_text import comparison_text
from nanorunner.bench.fresh_process import run_fresh
from nanorunner.bench.measuring_flags import (
    check_several_processes,
    count_above_0,
    number_above_0,
    number_from_0,
    sampling_params,
)
from nanorunner.bench.result import check_writable, summarise, write_result
from nanorunner.bench.sides import Side, check_peer_sampling, parse_sides
from nanorunner.bench.verdicts import (
    MIN_ROUNDS_OF_A_VERDICT,
    absent,
    agreement,
    differences,
    fell_back,
    ratios,
    unfair,
)
from nanorunner.config import make_config
from nanorunner.exit_codes import OK, REFUSED, REQUEST_FAILED
from nanorunner.flags import Parser, engine_settings

DEFAULT_ROUNDS = 3
DEFAULT_TIMEOUT_S = 1800.0
MAX_ERROR_LINES = 12
FLAGS_OF_EACH_PROCESS = ("--out", "--keep-ids", "--quiet", "-q")  # compare gives them itself
OWN_FLAGS = ("--rounds", "--timeout", "--min-agreement")

Result = dict[str, Any]


class Rounds(NamedTuple):
    """What one side brought."""

    results: list[Result]  # one a round
    problem: str  # why there are not as many as rounds; "" when there are


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags, and those of `throughput`."""
    parser.add_argument(
        "sides",
        nargs="+",
        metavar="SIDE",
        help="v1, v2, v2:SETTING=VALUE,..., vllm, hf; sides come before the flags",
    )
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--rounds",
        type=count_above_0,
        default=DEFAULT_ROUNDS,
        metavar="N",
        help=f"fresh processes of each side, in turns (default {DEFAULT_ROUNDS}); --repeat is "
        f"the measured passes in each, and a verdict needs {MIN_ROUNDS_OF_A_VERDICT} rounds",
    )
    group.add_argument(
        "--timeout",
        type=number_above_0,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"of one process (default {DEFAULT_TIMEOUT_S:g})",
    )
    group.add_argument(
        "--min-agreement",
        type=number_from_0,
        metavar="X",
        help="fail below this share of requests with equal ids (default: 1 in float32, else 0: "
        "near-ties may fall either way in 16 bits)",
    )
    throughput.add_flags(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compare, print and return the exit code: 1 when a side failed, fell back or disagreed."""
    try:
        sides = parse_sides(args.sides)
        flags = flags_of_all(argv, len(sides))
        asked = engine_settings(args)
        if "runner" in asked:
            raise ValueError(f"--runner {asked['runner']}: name the runners as sides instead")
        params = sampling_params(args)
        for side in sides:
            if side.is_peer:
                check_peer_sampling(side.label, params)
                continue
            config = make_config({**asked, **side.own, "runner": side.name})
            check_several_processes(config, "throughput")
        known = _throughput_parser().long_flags()
        for side in sides:
            side.command(flags, known, Path("x"))  # refuses an unknown setting of its own
        skipped = {
            side.label: f"{name} is not installed" for side in sides if (name := side.missing())
        }
        if len(sides) - len(skipped) < 2:
            raise ValueError(
                f"compare {' '.join(args.sides)}: only {sides[0].label} can run here "
                f"({', '.join(skipped.values())}); install it, or name another side"
            )
        check_writable(args.out)
    except (ValueError, OSError) as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return REFUSED
    for label, reason in skipped.items():
        print(f"nanorunner: skipped {label}: {reason}", file=sys.stderr)
    present = [side for side in sides if side.label not in skipped]

    def command(side: Side, out: Path) -> list[str]:
        return side.command(flags, known, out)

    measured = measure(present, command, args.rounds, args.timeout)
    comparison = conclude(present, measured, asked, args.min_agreement)
    comparison |= {
        "command": shlex.join(["python", "-m", "nanorunner", "bench", "compare", *argv]),
        "rounds": args.rounds,
        "skipped": skipped,
    }
    print(comparison_text(comparison))
    without_results = [
        {k: v for k, v in side.items() if k != "result"} for side in comparison["sides"]
    ]
    # before the file: a full disk must not lose it
    print(json.dumps({**comparison, "sides": without_results}), flush=True)
    try:
        if args.out is not None:
            write_result(args.out, comparison)
    except OSError as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return REQUEST_FAILED
    return REQUEST_FAILED if comparison["problems"] else OK


def flags_of_all(argv: Sequence[str], num_sides: int) -> list[str]:
    """Return the flags that every side gets: all but the sides and this command's own."""
    if any(word.startswith("-") for word in argv[:num_sides]):
        raise ValueError("compare: name the sides first, then the flags")
    own = Parser(add_help=False)
    for flag in (*OWN_FLAGS, "--out"):
        own.add_argument(flag)
    for flag in ("--keep-ids", "--quiet"):
        own.add_argument(flag, action="store_true")
    own.add_argument("-q", action="store_true")
    return own.parse_known_args(list(argv[num_sides:]))[1]


def measure(
    sides: Sequence[Side],
    command: Callable[[Side, Path], list[str]],
    rounds: int,
    timeout_s: float,
) -> dict[str, Rounds]:
    """Return what every side brought; one that fails is left out of the rounds after."""
    measured = {side.label: Rounds([], "") for side in sides}
    with tempfile.TemporaryDirectory(prefix="nanorunner-compare-") as name:
        for number in range(rounds):
            # flipped every round, so that a machine that warms up favours nobody
            for side in sides if number % 2 == 0 else reversed(sides):
                so_far = measured[side.label]
                if so_far.problem:
                    continue
                print(f"nanorunner: round {number + 1} of {rounds}: {side.label}", file=sys.stderr)
                out, log = Path(name, "result.json"), Path(name, "log")
                out.unlink(missing_ok=True)
                outcome = run_fresh(command(side, out), log, timeout_s)
                if outcome.timed_out or outcome.exit_code != OK or not out.exists():
                    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                    how = "timed out" if outcome.timed_out else f"exit code {outcome.exit_code}"
                    problem = "\n  ".join([f"{side.label}: {how}", *lines[-MAX_ERROR_LINES:]])
                    measured[side.label] = Rounds(so_far.results, problem)
                    continue
                so_far.results.append(json.loads(out.read_text(encoding="utf-8")))
    return measured


def conclude(
    sides: Sequence[Side],
    measured: dict[str, Rounds],
    asked: dict[str, Any],
    min_agreement: float | None,
) -> dict[str, Any]:
    """Return the comparison: all sides' results, and what follows from them.

    "problems" holds in words whatever forbids a conclusion; [] when nothing does.
    """
    problems = [rounds.problem for rounds in measured.values() if rounds.problem]
    whole = [side for side in sides if not measured[side.label].problem]
    results = {side.label: measured[side.label].results for side in whole}
    merged = {label: together(its) for label, its in results.items()}
    first = sides[0]
    for side in whole:
        if not side.is_peer:
            wanted = {**asked, **side.own, "runner": side.name}
            for number, result in enumerate(results[side.label], start=1):
                for problem in fell_back(result, wanted):
                    problems.append(f"{side.label} fell back in round {number}: {problem}")
    found = differences(results)
    own = [name for side in sides for name in side.own]
    problems += [f"not the same on all sides: {name}" for name in unfair(found, own)]
    comparison: dict[str, Any] = {
        "kind": "compare",
        "first": first.label,
        "sides": [{"side": label, "result": result} for label, result in merged.items()],
        "ratios": {},
        "agreement": {},
        "differences": found,
        "absent": absent(results),
        "problems": problems,
    }
    base = results.get(first.label, [])
    for side in whole[1:] if base else []:
        its = results[side.label]
        comparison["ratios"][side.label] = {
            name: ratio._asdict() for name, ratio in ratios(base, its).items()
        }
        comparison["agreement"][side.label] = _agreement(side, base, its, min_agreement, problems)
    for result in merged.values():
        result.pop("output_ids")  # compared: nobody needs a million ids in a file
    return comparison


def together(results: Sequence[Result]) -> Result:
    """Return the rounds of a side as one result for a reader.

    Its settings, counters and ids are the first round's: whoever judges them takes every round's.
    """
    repeats = [values for result in results for values in result["repeats"]]
    samples = [counts for result in results for counts in result["samples"]]
    return {
        **results[0],
        "repeats": repeats,
        "samples": samples,
        "metrics": summarise(repeats, samples),
    }


def _agreement(
    side: Side,
    first: Sequence[Result],
    other: Sequence[Result],
    min_agreement: float | None,
    problems: list[str],
) -> dict[str, Any]:
    """Return how far a side's outputs are the first one's, of the round where they are it least.

    Adds to problems when that is too little.
    """
    reason = _incomparable(side, first[0])
    if reason:
        return {"not_compared": reason}
    by_round = [
        agreement(a["output_ids"], b["output_ids"]) for a, b in zip(first, other, strict=True)
    ]
    place = min(range(len(by_round)), key=lambda index: by_round[index].share)
    equal = by_round[place]
    least = min_agreement
    if least is None:
        is_exact = {result["config"]["dtype"] for result in (*first, *other)} == {"float32"}
        least = 1.0 if is_exact else 0.0
    if equal.share < least:
        problems.append(
            f"{side.label}: the ids of {equal.equal_requests} of {equal.requests} requests are "
            f"the first side's in round {place + 1}; at least {least:.0%} must be"
        )
    return {**equal._asdict(), "share": equal.share, "least": least, "round": place + 1}


def _incomparable(side: Side, first: Result) -> str:
    """Return why a side's ids say nothing, "" when they do."""
    if not side.is_peer:
        return ""
    if first["config"]["load_format"] == "dummy":
        return "random weights, and a peer's are others; give a model with weights"
    if first["workload"]["sampling"]["temperature"] > 0:
        return "sampled with random numbers of its own; use temperature 0"
    return ""


def _throughput_parser() -> Parser:
    parser = Parser(prog="throughput")
    throughput.add_flags(parser)
    return parser
