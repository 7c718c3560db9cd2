"""Prompts from a file, one JSON object a line; with times it is a trace that can be replayed.

    {"prompt": "Hello", "output_len": 64}            text, completed as it stands
    {"prompt_token_ids": [1, 2, 3], "output_len": 8}
    {"input_len": 512, "output_len": 128}            so many random ids
    ... "timestamp_s": 0.25   or   "timestamp_ms": 250      when it arrived, in a trace

A line without output_len takes --output-len. Any other key is refused by name: a `timestamp`
without a unit would be read wrongly by a factor of 1000 half of the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorunner.did_you_mean import did_you_mean

PROMPT_KEYS = ("prompt", "prompt_token_ids", "input_len")
TIME_KEYS = {"timestamp_s": 1.0, "timestamp_ms": 1e-3}  # seconds in one of it
KEYS = (*PROMPT_KEYS, "output_len", *TIME_KEYS)


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One request of a file: text, ids or a length; exactly one of the three is there."""

    output_len: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    input_len: int | None = None
    time_s: float | None = None


def read_prompt_file(
    path: str | Path, default_output_len: int | None, *, is_trace: bool
) -> list[PromptLine]:
    """Return the requests of a file in its order; ValueError names file, line and key.

    is_trace: every line must have a time; else none may, for it would be ignored.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    lines = []
    # not splitlines(): JSON may hold U+2028 and its like, which are no ends of a line here
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                lines.append(_read_line(line, default_output_len, is_trace))
            except ValueError as error:
                raise ValueError(f"{path} line {number}: {error}") from None
    if not lines:
        raise ValueError(f"{path}: it has no line; write one JSON object a line")
    return lines


def _read_line(line: str, default_output_len: int | None, is_trace: bool) -> PromptLine:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(entry, dict):
        raise ValueError('is no JSON object; write {"prompt": "..."}')
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(key, KEYS)}")
    given = [key for key in PROMPT_KEYS if key in entry]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'no prompt'}: give one of {PROMPT_KEYS}")
    if "output_len" not in entry and default_output_len is None:
        raise ValueError("output_len: is missing; write it, or give --output-len")
    text, ids = entry.get("prompt"), entry.get("prompt_token_ids")
    if "prompt" in entry and (not isinstance(text, str) or not text):
        raise ValueError(f"prompt {text!r}: use some text")
    if "prompt_token_ids" in entry and not _are_ids(ids):
        raise ValueError("prompt_token_ids: use a list of token ids, at least one")
    return PromptLine(
        output_len=_positive("output_len", entry.get("output_len", default_output_len)),
        text=text,
        token_ids=tuple(ids) if ids is not None else None,
        input_len=_positive("input_len", entry["input_len"]) if "input_len" in entry else None,
        time_s=_time_s(entry, is_trace),
    )


def _time_s(entry: dict[str, Any], is_trace: bool) -> float | None:
    given = [key for key in TIME_KEYS if key in entry]
    if not is_trace:
        if given:
            raise ValueError(f"{given[0]}: only a trace has times; give it as --replay")
        return None
    if len(given) != 1:
        raise ValueError(f"a trace needs one of {' or '.join(TIME_KEYS)} in every line")
    value = entry[given[0]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{given[0]} {value!r}: use a number")
    return float(value) * TIME_KEYS[given[0]]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} {value!r}: use a whole number above 0")
    return value


def times_of(lines: Sequence[PromptLine]) -> list[float]:
    """Return a trace's times in seconds."""
    return [line.time_s for line in lines if line.time_s is not None]
