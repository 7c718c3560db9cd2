"""Schedules have the rate and the spread they claim; the first request is due at 0."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, pstdev

import pytest

from nanorunner.bench import arrivals


def gaps(schedule: arrivals.Arrivals) -> list[float]:
    return [after - before for before, after in pairwise(schedule.due_s)]


@pytest.mark.parametrize(
    ("kind", "burstiness", "spread"),
    # of gamma-distributed gaps: standard deviation / mean = 1 / sqrt(shape)
    [("poisson", 1.0, 1.0), ("burst", 0.25, 2.0), ("burst", 4.0, 0.5), ("constant", 1.0, 0.0)],
)
def test_gaps_have_the_mean_and_the_spread_of_their_kind(
    kind: str, burstiness: float, spread: float
) -> None:
    schedule = arrivals.open_loop(kind, 20_001, 50.0, seed=0, burstiness=burstiness)
    found = gaps(schedule)
    assert schedule.due_s[0] == 0.0
    assert min(found) >= 0
    assert mean(found) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(found) / mean(found) == pytest.approx(spread, rel=0.05, abs=1e-9)
    assert schedule.describe()["offered_per_s"] == pytest.approx(50, rel=0.05)


def test_a_seed_fixes_the_times_and_another_changes_them() -> None:
    first, again, other = (arrivals.open_loop("poisson", 9, 1.0, seed) for seed in (5, 5, 6))
    assert first == again != other


def test_all_come_at_once_and_a_closed_loop_begins_with_its_width() -> None:
    assert arrivals.all_at_once(3).due_s == (0.0, 0.0, 0.0)
    closed = arrivals.closed_loop(10, 4)
    assert closed.is_closed
    assert closed.due_s == (0.0,) * 4
    assert arrivals.closed_loop(2, 4).due_s == (0.0,) * 2
    assert closed.describe() == {"kind": "closed", "concurrency": 4}


def test_a_trace_keeps_its_gaps_and_starts_at_0() -> None:
    assert arrivals.replay([10.0, 10.5, 13.0]).due_s == (0.0, 0.5, 3.0)
    assert arrivals.replay([10.0, 10.5, 13.0], speed=2.0).due_s == (0.0, 0.25, 1.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: arrivals.open_loop("posson", 1, 1.0, 0), "did you mean poisson"),
        (lambda: arrivals.open_loop("poisson", 1, 0.0, 0), "rate 0.0: use requests per second"),
        (lambda: arrivals.open_loop("burst", 1, 1.0, 0, 0.0), "burstiness 0.0: use a number"),
        (lambda: arrivals.closed_loop(1, 0), "concurrency 0: use 1 or more"),
        (lambda: arrivals.replay([1.0, 0.5]), "request 1 comes at 0.5 s, before request 0"),
        (lambda: arrivals.replay([1.0], speed=0.0), "speed 0.0: use a number above 0"),
    ],
)
def test_what_makes_no_schedule_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words):
        make()
