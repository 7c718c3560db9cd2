"""Which steps a page shows: steady ones near the middle, or those that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from synthetic_trace import write_synthetic

from nanorunner.workers.spans import SCHEDULE, UPDATE
from nanorunner.workshop.timeline_read import read_run
from nanorunner.workshop.timeline_steps import Step, choose, named, steps_of


def make(counts: Sequence[tuple[int, int]]) -> list[Step]:
    """Return steps with these requests and tokens."""
    return [Step(n, n * 10, n * 10 + 9, *each) for n, each in enumerate(counts)]


def numbers(steps: Sequence[Step]) -> list[int]:
    return [step.number for step in steps]


def test_steps_begin_with_their_plan_and_end_with_their_update(tmp_path: Path) -> None:
    write_synthetic(tmp_path, "v2", num_steps=6)
    run = read_run(tmp_path)
    table = run.ranks[0].spans
    steps = steps_of(run)
    assert numbers(steps) == list(range(6))
    for step in steps:
        of_step = table.step == step.number
        assert step.begin == table.begin[of_step & (table.name == SCHEDULE)][0]
        assert step.end == table.end[of_step & (table.name == UPDATE)][0]
    assert [step.is_decode for step in steps] == [False, *[True] * 5]
    assert steps[1].begin < steps[0].end  # two in flight


def test_steady_decodes_near_the_middle_are_chosen() -> None:
    decode, wide, prompt = (8, 8), (9, 9), (8, 700)
    assert numbers(choose(make([decode] * 101), 5)) == [48, 49, 50, 51, 52]
    assert numbers(choose(make([decode] * 3), 5)) == [0, 1, 2]
    # around the middle a prompt comes in, and with it another request
    counts = [decode] * 48 + [prompt] + [wide] * 10 + [decode] * 42
    assert numbers(choose(make(counts), 5)) == [50, 51, 52, 53, 54]
    # nothing but prompts: those that are alike
    assert numbers(choose(make([(1, 9), (1, 10), (2, 512), (2, 512), (2, 512), (1, 7)]), 3)) in (
        [2, 3, 4],
        [3, 4, 5],
    )
    # drafts: each request more than one token a step
    assert numbers(choose(make([(1, 99)] + [(4, 20)] * 8), 4)) == [2, 3, 4, 5]


def test_named_steps_are_those_that_are_there(tmp_path: Path) -> None:
    write_synthetic(tmp_path, num_steps=6)
    run = read_run(tmp_path)
    steps = steps_of(run)
    assert numbers(named(run, steps, 2, 4)) == [2, 3, 4]
    assert numbers(named(run, steps, 4, 400)) == [4, 5]
    with pytest.raises(ValueError, match=r"--steps 6:9: .* has the steps 0 to 5"):
        named(run, steps, 6, 9)


@pytest.mark.parametrize(
    ("requests", "tokens", "words"),
    [
        (1, 1, "decode of 1 request"),
        (1200, 1200, "decode of 1,200 requests"),
        (2, 513, "513 tokens of 2 requests"),
        (0, 0, "nothing computed"),
    ],
)
def test_a_step_says_what_it_computed(requests: int, tokens: int, words: str) -> None:
    assert Step(0, 0, 1, requests, tokens).in_words() == words
