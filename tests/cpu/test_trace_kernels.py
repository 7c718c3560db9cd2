"""What scripts/trace_kernels.py makes of the kernels that a profiler saw; no GPU is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # its files import each other bare

from scripts.trace_kernels import Launch, idle_gaps, in_order, lengths_of, main, summarise

pytestmark = pytest.mark.beside

# two steps: a projection, attention that begins before it has ended, a gap, the next step
LAUNCHES = [
    Launch("projection", 100.0, 110.0),
    Launch("attention", 108.0, 130.0),
    Launch("projection", 135.0, 147.0),
    Launch("attention", 145.0, 169.0),
]


def test_a_kernel_has_its_time_and_launches_of_a_step() -> None:
    found = summarise(LAUNCHES, 2)
    assert found["us_a_step"] == (169 - 100) / 2
    assert found["kernels"] == [
        {"name": "attention", "us_a_step": 23.0, "launches_a_step": 1.0, "us_a_launch": 23.0},
        {"name": "projection", "us_a_step": 11.0, "launches_a_step": 1.0, "us_a_launch": 11.0},
    ]
    assert found["idle_us_a_step"] == 2.5
    assert found["largest_gaps"] == [(5.0, "projection")]
    nothing = {"us_a_step": 0.0, "idle_us_a_step": 0.0, "largest_gaps": [], "kernels": []}
    assert summarise([], 2) == nothing


def test_the_longest_gap_comes_first_and_overlaps_are_none() -> None:
    launches = [*LAUNCHES, Launch("short", 150.0, 151.0), Launch("late", 200.0, 201.0)]
    assert idle_gaps(launches) == [(31.0, "late"), (5.0, "projection")]


def test_kernels_in_order_have_their_gap_to_the_one_before() -> None:
    assert in_order(LAUNCHES) == [(5.0, 12.0, "projection"), (-2.0, 24.0, "attention")]
    assert in_order([]) == in_order(LAUNCHES[:1]) == []


def test_ragged_lengths_are_the_same_on_every_call() -> None:
    assert lengths_of(3, 512, is_ragged=False) == [512] * 3
    ragged = lengths_of(50, 512, is_ragged=True)
    assert ragged == lengths_of(50, 512, is_ragged=True)
    assert 170 <= min(ragged) < 400 < 700 < max(ragged) <= 1024


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "65"], "use at most 64"),
        (["--requests", "8,0"], "0"),
        (["--input-len", "1600", "--ragged"], "prompts of 3200 ids; use at most 3072"),
        (["--chunk", "4000"], "use at most 3072"),
        ([], "no CUDA GPU here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
