"""One question with a computed answer: what is asked, what counts as right, what a slip is told.

check.py reads an answer, judge() compares it. An answer is a number, a shape, a set of ranks or a
word; how it is written down (29,360,128 or 29360128; [64, 32] or 64x32) does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nanorunner.workers.model_config import ModelConfig

Answer = int | float | tuple[int, ...] | frozenset[int] | str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the answers are computed for."""

    model: ModelConfig
    tp: int
    runner: str  # v1 | v2
    dtype: str  # of weights and KV cache
    item_bytes: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about one Setting, its answer computed."""

    text: str
    answer: Answer
    hint: str  # for a wrong answer that is no known slip
    why: str  # told when the answer is right: the way there, with the numbers
    # wrong answers that we foresee and their hints; one that is right here is right
    slips: dict[Answer, str] = field(default_factory=dict)
    tolerance: float = 0.0  # relative
    options: dict[str, str] = field(default_factory=dict)  # letter -> words, of a choice


def judge(question: Question, text: str) -> tuple[bool, str]:
    """Return whether the answer is right and what to say: the way there, or one hint.

    Raises ValueError when the text is no answer of the kind that is asked for.
    """
    given = read_answer(question.answer, text, question.options)
    if _is_equal(given, question.answer, question.tolerance):
        return True, question.why
    for slip, hint in question.slips.items():
        if _is_equal(given, slip, question.tolerance):
            return False, hint
    return False, question.hint


def read_answer(like: Answer, text: str, options: Mapping[str, str] | None = None) -> Answer:
    """Return the answer that a text gives, of the kind of `like`; ValueError if it gives none.

    One of several options may be given by its letter, by its words, or by both.
    """
    words = text.strip().lower()
    if isinstance(like, str):
        return _option(text, options) if options else _plain(text)
    if isinstance(like, tuple):
        numbers = tuple(int(number) for number in re.findall(r"\d+", words))
        if len(numbers) != len(like):
            raise ValueError(f"{text!r}: write a shape, as [64, 32] or 64x32")
        return numbers
    if isinstance(like, frozenset):
        numbers = tuple(int(number) for number in re.findall(r"\d+", words))
        if not numbers:
            raise ValueError(f"{text!r}: write ranks, as 0 or 0,1")
        return frozenset(numbers)
    try:
        return float(re.sub(r"[,_ ]|ms$|bytes$", "", words))
    except ValueError:
        raise ValueError(f"{text!r}: write a number") from None


def _option(text: str, options: Mapping[str, str]) -> str:
    """Return the letter of the option that a text names."""
    given = _plain(text)
    for letter, option in options.items():
        if given in (letter, _plain(option), f"{letter} {_plain(option)}"):
            return letter
    raise ValueError(f"{text!r}: write one of {', '.join(options)}")


def _plain(text: str) -> str:
    """Return the words of a text, without what stands around them."""
    return re.sub(r"\W+", " ", text.lower()).strip()


def _is_equal(given: Answer, answer: Answer, tolerance: float) -> bool:
    if isinstance(answer, int | float) and isinstance(given, int | float):
        return abs(given - answer) <= tolerance * abs(answer)
    return given == answer
