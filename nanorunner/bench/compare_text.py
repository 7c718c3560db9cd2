"""A comparison as a person reads it: figures beside each other, then what they may be taken for."""

from __future__ import annotations

from typing import Any

from nanorunner.bench.result import draft_words
from nanorunner.bench.tables import CHIEF_METRICS, aligned, number

MAX_VALUE = 40  # longest value of the table of differences, in characters


def comparison_text(comparison: dict[str, Any]) -> str:
    """Return the text of a comparison that conclude() has made."""
    results = {side["side"]: side["result"] for side in comparison["sides"]}
    first, rounds = comparison["first"], comparison["rounds"]
    lines = [f"{rounds} round(s), a fresh process each; ratio: side / {first}, round by round", ""]
    if results:
        lines += [aligned(_figures(results, comparison["ratios"])), ""]
    for side, found in comparison["agreement"].items():
        lines.append(f"outputs of {side}: {_agreement_words(found, first, rounds)}")
    for side, result in results.items():
        if drafts := (result.get("counters") or {}).get("drafts"):
            lines.append(f"drafts of {side}: {draft_words(drafts)}")
    if comparison["differences"]:
        lines += ["", "what differed:", aligned(_differences(comparison, list(results)))]
    for side, names in comparison["absent"].items():
        lines.append(f"{side} has no: {', '.join(names)}")
    for name, reason in comparison["skipped"].items():
        lines.append(f"skipped {name}: {reason}")
    lines.append("")
    if comparison["problems"]:
        lines += [f"PROBLEM: {problem}" for problem in comparison["problems"]]
    else:
        lines.append(
            "no runner of ours fell back, as far as its settings and its graph steps say; model, "
            "dtype, budget, requests and seed were the same"
        )
    return "\n".join(lines)


def _figures(results: dict[str, Any], ratios: dict[str, Any]) -> list[list[str]]:
    """Return the table of the chief metrics, a side's ratio beside its value."""
    header = ["metric"]
    for side in results:
        header += [side, *(["ratio", "low", "high", "verdict"] if side in ratios else [])]
    table = [header]
    for name in CHIEF_METRICS:
        if not any(name in result["metrics"] for result in results.values()):
            continue
        row = [name]
        for side, result in results.items():
            value = result["metrics"].get(name)
            row.append("-" if value is None else number(value["median"]))
            if side in ratios:
                ratio = ratios[side].get(name)
                if ratio is None:
                    row += ["-"] * 4
                else:
                    row += [f"{ratio[key]:.3f}" for key in ("median", "low", "high")]
                    row.append(ratio["verdict"])
        table.append(row)
    return table


def _agreement_words(found: dict[str, Any], first: str, num_rounds: int) -> str:
    if "not_compared" in found:
        return f"not compared: {found['not_compared']}"
    words = (
        f"{found['equal_requests']} of {found['requests']} requests have the ids of {first} "
        f"({found['share']:.1%}); {found['tokens_before_a_difference']:,} of {found['tokens']:,} "
        f"ids come before a first difference"
    )
    if num_rounds > 1:
        words += f", in round {found['round']}, where it is the least"
    places = ", ".join(f"request {a} at id {b}" for a, b in found["first_differences"][:3])
    return words + (f" ({places})" if places else "")


def _differences(comparison: dict[str, Any], sides: list[str]) -> list[list[str]]:
    table = [["setting", *sides]]
    for name, values in comparison["differences"].items():
        table.append([name, *(str(values.get(side, "-"))[:MAX_VALUE] for side in sides)])
    return table
