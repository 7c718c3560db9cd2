"""What each runner can do, in one table: the engine refuses by it, logs it, and the docs show it.

    python -m nanorunner.compatibility     prints the table, as docs/compatibility.md has it

A feature is a field of SamplingParams, a setting of Config or a method of LLM, by its own name.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import NamedTuple

from nanorunner.sampling_params import SamplingParams
from nanorunner.workers import full_sampling as limits

V1, V2 = "v1", "v2"
RUNNERS = (V1, V2)
DEFAULTS = SamplingParams()


class Feature(NamedTuple):
    """One line of the table."""

    name: str
    v1: bool
    v2: bool
    note: str


TABLE = (
    Feature("temperature", True, True, "0 is greedy"),
    Feature("top_k", True, True, ""),
    Feature("top_p", True, True, ""),
    Feature("seed", True, True, "float32: equal ids in both runners"),
    Feature("n", True, True, "completions share the prompt's full KV blocks; v1 too"),
    Feature("stop", True, True, ""),
    Feature("stop_token_ids", True, True, ""),
    Feature("ignore_eos", True, True, ""),
    Feature("max_tokens", True, True, ""),
    Feature("min_tokens", True, True, "v2 never samples a stop before; v1 ignores one that comes"),
    Feature("detokenize", True, True, ""),
    Feature("min_p", False, True, ""),
    Feature(
        "repetition_penalty",
        False,
        True,
        f"{limits.NUM_PENALTY_SLOTS} requests with penalties run at once",
    ),
    Feature("presence_penalty", False, True, "as above"),
    Feature("frequency_penalty", False, True, "as above"),
    Feature("logit_bias", False, True, f"at most {limits.MAX_BIASES} ids"),
    Feature("allowed_token_ids", False, True, f"at most {limits.MAX_ALLOWED_IDS} ids"),
    Feature(
        "bad_words",
        False,
        True,
        f"at most {limits.MAX_BAD_WORDS} words of {limits.MAX_BAD_WORD_TOKENS} ids together",
    ),
    Feature(
        "logprobs",
        False,
        True,
        "of the raw logits; up to the whole vocabulary, and as many requests at once as have "
        f"{limits.MAX_LOGPROB_ENTRIES} values together",
    ),
    Feature("prompt_logprobs", False, True, "as above; such a prompt takes no prefix-cache hit"),
    Feature("embed", False, True, "pooling last or mean"),
    Feature("async_depth", False, True, "steps in flight above 1"),
    Feature("speculative", False, True, "ngram or draft; the ids stay those of plain decoding"),
)


def check_params(runner: str, params: SamplingParams) -> None:
    """Raise ValueError for the first setting that the runner lacks, with the flag to change."""
    for name in _missing_params(runner):
        value = getattr(params, name)
        if value != getattr(DEFAULTS, name):
            raise ValueError(f"{name} {value!r}: runner {runner} has no {name}; use --runner {V2}")


def check_feature(runner: str, name: str) -> None:
    """Raise ValueError when the runner lacks the feature of that name."""
    if name in missing(runner):
        raise ValueError(f"{name}: runner {runner} has no {name}; use --runner {V2}")


@cache
def missing(runner: str) -> tuple[str, ...]:
    """Return the names of what a runner lacks."""
    return tuple(feature.name for feature in TABLE if not getattr(feature, runner))


def note(runner: str) -> str:
    """Return the line of the start log."""
    names = missing(runner)
    if not names:
        return f"sampler: all of it; runner {runner} lacks nothing"
    return f"sampler: runner {runner} has no {', '.join(names)}; --runner {V2} has"


def markdown() -> str:
    """Return the table for the docs."""
    lines = ["| feature | runner v1 | runner v2 | |", "|---|---|---|---|"]
    for feature in TABLE:
        answers = ["yes" if getattr(feature, runner) else "refused" for runner in RUNNERS]
        lines.append(f"| `{feature.name}` | {answers[0]} | {answers[1]} | {feature.note} |")
    return "\n".join(lines)


@cache
def _missing_params(runner: str) -> tuple[str, ...]:
    known = {field.name for field in fields(SamplingParams)}
    return tuple(name for name in missing(runner) if name in known)


if __name__ == "__main__":
    print(markdown())
