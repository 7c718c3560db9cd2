"""What goes to an engine of bench_speculation.py, what comes back, and what is made of it.

    Job -> speculation_sides.py, a process -> [Pass] -> text_rows | oracle_rows -> a line each

Rates of several passes are all their ids over all their seconds; times of a step are medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PLAIN, NGRAM, ADAPTIVE, ORACLE = "plain", "ngram", "adaptive", "oracle"
TASKS = ("repeat", "continue", "correct", "summarise")  # in check_speculation.py's order
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one engine is to be measured on, in a process of its own."""

    side: str
    settings: dict[str, Any]  # of LLM
    batch_sizes: list[int]
    repeats: int
    num_tokens: int  # ids of a request: of text at most, of the oracle's exactly
    num_prompts: int = 0  # text: in all
    byte_ids: bool = False  # text: bytes are ids
    input_len: int = 0  # oracle: tokens of a prompt; 0: this is about text
    probabilities: list[float] = field(default_factory=list)  # oracle
    turn: int = 0  # oracle: each turn draws other drafts
    first: str = ""  # the file of the first plain result, "" for that one itself


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Requests in batches of one size, one batch after the other."""

    batch_size: int
    requests: int
    output_tokens: int
    seconds: float
    meant: list[int]  # [K] drafts proposed in each place
    accepted: list[int]  # [K]
    verified: int  # requests in verify steps
    task: str = ""  # text
    probability: float | None = None  # oracle: of a draft to be right
    # oracle: from where all requests have an id to where the first one ends
    window_s: float = 0.0
    window_steps: int = 0
    window_ids: int = 0
    same_ids: int | None = None  # oracle: requests with the plain side's ids

    @property
    def step_s(self) -> float:
        """Seconds of a decode step."""
        return self.window_s / self.window_steps


def expected_ids(probability: float, num_drafts: int) -> float:
    """Return the ids that a request gets from a step whose drafts are right independently.

    1 + P + ... + P^K = (1 - P^(K+1)) / (1 - P): draft i counts when it and all before it are right.
    """
    return sum(probability**place for place in range(num_drafts + 1))


def drafts_of(passes: Sequence[Pass]) -> dict[str, Any]:
    """Return the share accepted in each place, and the mean of a verify step's ids."""
    meant = [sum(place) for place in zip(*(one.meant for one in passes), strict=True)]
    accepted = [sum(place) for place in zip(*(one.accepted for one in passes), strict=True)]
    verified = sum(one.verified for one in passes)
    return {
        "acceptance": [round(a / max(m, 1), 4) for a, m in zip(accepted, meant, strict=True)],
        "mean_accepted_length": round(1 + sum(accepted) / verified, 4) if verified else 1.0,
    }


def text_rows(passes: dict[str, list[Pass]], same_ids: dict[str, int]) -> list[dict[str, Any]]:
    """Return a row for each batch size, task and side; passes and same_ids by side.

    A row's rate is over all passes; times_plain compares it with the plain side's.
    """
    rows: list[dict[str, Any]] = []
    for batch_size in sorted({one.batch_size for one in passes[PLAIN]}):
        for task in (ALL, *TASKS):
            plain_rate = 0.0
            for side, ran in passes.items():
                chosen = [p for p in ran if p.batch_size == batch_size and task in (ALL, p.task)]
                rate = _rate([(p.output_tokens, p.seconds) for p in chosen])
                plain_rate = plain_rate or rate
                rows.append(
                    {
                        "batch_size": batch_size,
                        "task": task,
                        "side": side,
                        "tokens_per_s": round(rate, 1),
                        "times_plain": round(rate / plain_rate, 3),
                        **drafts_of(chosen),
                        "same_ids": same_ids[f"{side} {batch_size}"] if task == ALL else None,
                    }
                )
    return rows


def oracle_rows(
    plain: Sequence[Pass], oracle: Sequence[Pass], num_drafts: int
) -> list[dict[str, Any]]:
    """Return a row for each batch size and probability: expected and measured speed-up.

    Expected: the formula's ids a step over (verify step time / plain step time). The verify step's
    time is that of passes whose drafts are all wrong, so both times were measured apart from the
    speed-up that they are compared with.
    """
    rows = []
    for batch_size in sorted({one.batch_size for one in plain}):
        without = [one for one in plain if one.batch_size == batch_size]
        ran = [one for one in oracle if one.batch_size == batch_size]
        plain_s = statistics.median(one.step_s for one in without)
        verify_s = statistics.median(one.step_s for one in ran if one.probability == 0)
        plain_rate = _rate([(one.window_ids, one.window_s) for one in without])
        for probability in sorted({one.probability for one in ran if one.probability}):
            chosen = [one for one in ran if one.probability == probability]
            ids = sum(one.window_ids for one in chosen)
            row_steps = batch_size * sum(one.window_steps for one in chosen)
            rate = _rate([(one.window_ids, one.window_s) for one in chosen])
            formula = expected_ids(probability, num_drafts)
            expected, measured = formula * plain_s / verify_s, rate / plain_rate
            rows.append(
                {
                    "batch_size": batch_size,
                    "probability": probability,
                    "plain_tokens_per_s": round(plain_rate, 1),
                    "tokens_per_s": round(rate, 1),
                    "plain_step_ms": round(plain_s * 1000, 4),
                    "verify_step_ms": round(verify_s * 1000, 4),
                    "expected_ids_a_step": round(formula, 4),
                    "ids_a_step": round(ids / row_steps, 4),
                    "expected_speed_up": round(expected, 4),
                    "speed_up": round(measured, 4),
                    "difference_percent": round(100 * (measured / expected - 1), 2),
                    **drafts_of(chosen),
                    "same_ids": sum(one.same_ids or 0 for one in chosen),
                    "requests": sum(one.requests for one in chosen),
                }
            )
    return rows


def _rate(passes: Sequence[tuple[int, float]]) -> float:
    """Return the ids a second of passes of (ids, seconds)."""
    return sum(ids for ids, _ in passes) / sum(seconds for _, seconds in passes)
