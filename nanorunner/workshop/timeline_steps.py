"""The steps of a run, and which of them a page shows.

A step lies between the begin of its `schedule` and the end of its `update` on rank 0. With two in
flight a step begins before the last one has ended. It is steady when it decodes one token for each
of as many requests as the step before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nanorunner.workers.spans import NO_STEP, SCHEDULE, UPDATE, SpanTable, StepFacts
from nanorunner.workshop.timeline_read import Run

NUM_SHOWN = 16  # steps of a page, unless --steps names some


class Step(NamedTuple):
    """One step that was planned and whose output was taken in."""

    number: int
    begin: int  # ns
    end: int
    num_requests: int  # 0: this is not known, as its figures are lost or it had none
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether every request got one token."""
        return 0 < self.num_requests == self.num_tokens

    def in_words(self) -> str:
        """Return what was computed."""
        if not self.num_requests:
            return "nothing computed"
        requests = f"{self.num_requests:,} request{'s'[: self.num_requests != 1]}"
        if self.is_decode:
            return f"decode of {requests}"
        return f"{self.num_tokens:,} tokens of {requests}"


def steps_of(run: Run) -> list[Step]:
    """Return the whole steps, ascending; ValueError when there is none."""
    begins = _times(run.ranks[0].spans, SCHEDULE)
    ends = _times(run.ranks[0].spans, UPDATE)
    facts = _counts(run.ranks[0].facts)
    steps = [
        Step(number, begins[number][0], ends[number][1], *facts.get(number, (0, 0)))
        for number in sorted(begins.keys() & ends.keys())
    ]
    if not steps:
        raise ValueError(f"{run.folder}: no whole step is in it; trace a run that has a prompt")
    return steps


def choose(steps: Sequence[Step], num_shown: int = NUM_SHOWN) -> list[Step]:
    """Return num_shown steps that follow one another, as steady and as near the middle as can be.

    All of them when there are not more.
    """
    if len(steps) <= num_shown:
        return list(steps)
    is_alike = [False, *(before[3:] == after[3:] for before, after in pairwise(steps))]
    is_steady = [alike and step.is_decode for alike, step in zip(is_alike, steps, strict=True)]
    num_places = len(steps) - num_shown + 1
    not_alike, not_steady = (
        num_shown - np.convolve(mask, np.ones(num_shown, np.int64), "valid")
        for mask in (is_alike, is_steady)
    )
    distance = np.abs(np.arange(num_places) - (num_places - 1) / 2)
    first = int(np.lexsort((distance, not_alike, not_steady))[0])  # by the last key first
    return list(steps[first : first + num_shown])


def named(run: Run, steps: Sequence[Step], first: int, last: int) -> list[Step]:
    """Return the steps `first` to `last`, as --steps names them; ValueError if none is there."""
    found = [step for step in steps if first <= step.number <= last]
    if not found:
        raise ValueError(
            f"--steps {first}:{last}: {run.folder} has the steps {steps[0].number} to "
            f"{steps[-1].number}"
        )
    return found


def _times(table: SpanTable, name: int) -> dict[int, tuple[int, int]]:
    """Return begin and end of the spans of this name, by step."""
    mask = (table.name == name) & (table.step != NO_STEP)
    columns = (table.step[mask], table.begin[mask], table.end[mask])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {step: (begin, end) for step, begin, end in rows}


def _counts(facts: StepFacts) -> dict[int, tuple[int, int]]:
    """Return requests and tokens of the steps."""
    columns = (facts.step, facts.num_requests, facts.num_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {step: (requests, tokens) for step, requests, tokens in rows}
