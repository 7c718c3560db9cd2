"""The clock of timeouts counts the time during which the process ran."""

from __future__ import annotations

import time

from nanorunner.workers.deadline import LONGEST_TICK_S, RunningClock


def test_time_between_two_looks_counts_once() -> None:
    before = time.monotonic()
    clock = RunningClock()
    time.sleep(0.05)
    first = clock.elapsed_s()
    second = clock.elapsed_s()
    assert 0.05 <= first <= second
    assert second <= time.monotonic() - before, "looking twice counts nothing twice"


def test_a_long_gap_between_two_looks_counts_as_one_tick() -> None:
    clock = RunningClock()
    clock._last -= 3600.0  # as after an hour of Ctrl-Z
    assert clock.elapsed_s() == LONGEST_TICK_S
