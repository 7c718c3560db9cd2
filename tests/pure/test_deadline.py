"""The clock of timeouts counts the time during which the process ran."""

from __future__ import annotations

import time

from nanorunner.workers.deadline import LONGEST_TICK_S, RunningClock


def test_time_between_two_looks_counts() -> None:
    clock = RunningClock()
    time.sleep(0.05)
    assert 0.05 <= clock.elapsed_s() < 1.0
    assert clock.elapsed_s() < 1.0, "looking twice counts nothing twice"


def test_a_long_gap_between_two_looks_counts_as_one_tick() -> None:
    clock = RunningClock()
    clock._last -= 3600.0  # as after an hour of Ctrl-Z
    assert clock.elapsed_s() == LONGEST_TICK_S
