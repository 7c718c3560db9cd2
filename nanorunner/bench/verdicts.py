"""What a comparison may conclude: ratios and their spread, equal outputs, fair terms, fall-backs.

All functions take results in result.py's form; sides are compared with the first one, and every
round counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanorunner.bench.metrics import METRICS

Result = dict[str, Any]

# What must be equal for the figures to say something about the sides alone.
FAIR = (
    "model",
    "tp",
    "device",
    "dtype",
    "load_format",
    "attention_backend",
    "all_reduce",
    "share_gpu",
    "check_ranks",
    "enforce_eager",
    "graph_sizes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "prefix_cache",
    "seed",
)
# What differs in any run and says nothing.
NO_DIFFERENCE = ("runner", "engine", "step_timeout_s", "start_timeout_s")

# Of two equal sides all N rounds fall on one side of 1 with 2 x 0.5^N: 25 % at 3, 3 % at 6.
MIN_ROUNDS_OF_A_VERDICT = 6


class Ratio(NamedTuple):
    """A metric of a side over the first side's, round by round."""

    median: float
    low: float
    high: float
    verdict: str  # better | worse | higher, lower in all N rounds | no clear difference | one round


def ratios(first: Sequence[Result], other: Sequence[Result]) -> dict[str, Ratio]:
    """Return the ratio of every metric that both have, other / first, each round with its own.

    A verdict needs every round on one side of 1, and MIN_ROUNDS_OF_A_VERDICT of them; of fewer it
    is said which side they lie on.
    """
    found: dict[str, Ratio] = {}
    for name, metric in METRICS.items():
        pairs = [
            (a["metrics"][name]["median"], b["metrics"][name]["median"])
            for a, b in zip(first, other, strict=True)
            if name in a["metrics"] and name in b["metrics"]
        ]
        values = [b / a for a, b in pairs if a]
        if not values:
            continue
        low, high = min(values), max(values)
        verdict = "no clear difference" if len(values) > 1 else "one round"
        if len(values) > 1 and (low > 1 or high < 1):
            verdict = f"{'lower' if high < 1 else 'higher'} in all {len(values)} rounds"
            if len(values) >= MIN_ROUNDS_OF_A_VERDICT:
                verdict = "better" if (high < 1) == metric.is_better_low else "worse"
        found[name] = Ratio(statistics.median(values), low, high, verdict)
    return found


class Agreement(NamedTuple):
    """How far two sides' output ids are the same."""

    requests: int
    equal_requests: int
    tokens: int
    tokens_before_a_difference: int
    first_differences: list[tuple[int, int]]  # (request, place of the first other id), ten at most

    @property
    def share(self) -> float:
        """The share of requests whose ids are all equal."""
        return self.equal_requests / self.requests if self.requests else 1.0


def agreement(first: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Agreement:
    """Compare two sides' output ids, request by request."""
    differences = []
    num_tokens = num_before = num_equal = 0
    for index, (a, b) in enumerate(zip(first, other, strict=True)):
        length = max(len(a), len(b))
        place = next(
            (i for i in range(length) if i >= len(a) or i >= len(b) or a[i] != b[i]), length
        )
        num_tokens += length
        num_before += place
        num_equal += place == length
        if place < length:
            differences.append((index, place))
    return Agreement(len(first), num_equal, num_tokens, num_before, differences[:10])


def fell_back(result: Result, asked: Mapping[str, Any]) -> list[str]:
    """Return each way in which a nanorunner did other than it was asked; [] when in none.

    asked: settings by name, an "auto" left out. Graph steps are compared with the steps that held
    decodes alone, which are those that a graph can serve.
    """
    config, counters = result["config"], result["counters"]
    problems = [
        f"{name}: asked for {value}, ran with {config[name]}"
        for name, value in asked.items()
        if name in config and value not in (None, "auto") and config[name] != value
    ]
    if config["device"] != "cuda" or config["enforce_eager"]:
        return problems
    if not config["graph_sizes"]:
        problems.append("no CUDA graphs were captured")
    elif counters["graphs"] is not None:
        scheduler, dispatched = counters["scheduler"], counters["graphs"]["dispatched"]
        decode_steps = scheduler["steps"] - scheduler["mixed_steps"] - scheduler["prefill_steps"]
        is_whole = {name: not name.startswith(("eager", "layers ")) for name in dispatched}
        graph_steps = sum(n for name, n in dispatched.items() if is_whole[name])
        if graph_steps < decode_steps:
            problems.append(
                f"{decode_steps - graph_steps} of {decode_steps} decode steps ran eager"
            )
    return problems


def differences(results: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, Any]]:
    """Return the settings and versions that differ between sides: name -> side -> value.

    results: those of every round, by side. One that differs between a side's own rounds is in, with
    {"by_round": [values]}. A side that has no such setting says nothing about it; absent() lists
    those.
    """
    table: dict[str, dict[str, list[Any]]] = {}
    for side, rounds in results.items():
        for result in rounds:
            for name, value in _terms(result).items():
                table.setdefault(name, {}).setdefault(side, []).append(value)
    found = {}
    for name, values in table.items():
        first = next(iter(values.values()))[0]
        if any(value != first for its in values.values() for value in its):
            found[name] = {side: _one_or_by_round(its) for side, its in values.items()}
    return found


def _one_or_by_round(values: list[Any]) -> Any:
    return values[0] if all(each == values[0] for each in values) else {"by_round": values}


def absent(results: Mapping[str, Sequence[Result]]) -> dict[str, list[str]]:
    """Return the settings that others have and a side does not, by side; one with all is out."""
    terms = {
        side: {name for result in rounds for name in _terms(result)}
        for side, rounds in results.items()
    }
    names = dict.fromkeys(
        name for rounds in results.values() for result in rounds for name in _terms(result)
    )
    missing = {
        side: [name for name in names if name not in values] for side, values in terms.items()
    }
    return {side: its for side, its in missing.items() if its}


def unfair(found: Mapping[str, Mapping[str, Any]], asked: Sequence[str]) -> list[str]:
    """Return those differences that nobody asked for and that decide a comparison."""
    decisive = {*FAIR, "workload", "commit"} - set(asked)
    return [name for name in found if name in decisive]


def _terms(result: Result) -> dict[str, Any]:
    """Return what a side ran with, by name: settings, versions, commit, workload."""
    versions = result["machine"].get("versions", {})
    return {
        **{name: v for name, v in result["config"].items() if name not in NO_DIFFERENCE},
        **{f"version of {name}": v for name, v in versions.items()},
        "commit": result.get("commit"),
        "workload": result["workload"]["digest"],
    }
