"""A rank that fails while rank 0's GPU waits for it in NCCL: rank 0 is free in seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import gloo_runner
import pytest
from kernel_cases import RANK_COUNTS
from rank_harness import make_config, state

from nanorunner.errors import RankDied
from nanorunner.launch import Ranks

DETECTION_S = 5.0

pytestmark = [pytest.mark.limit(300), pytest.mark.parametrize("tp", RANK_COUNTS)]


@contextmanager
def ranks_of(tp: int, **changes: float) -> Iterator[Ranks]:
    ranks = Ranks(
        make_config(tp, device="cuda", **changes),
        "gloo_runner:make_runner",
        methods=gloo_runner.METHODS,
        methods_with_reply=gloo_runner.WITH_REPLY,
    )
    try:
        yield ranks
    finally:
        ranks.close()


def test_ranks_meet_on_their_gpus(tp: int) -> None:
    with ranks_of(tp) as ranks:
        assert [ranks.call("meet", 1 << 20) for _ in range(20)] == [sum_of(tp)] * 20


def test_a_killed_rank_frees_rank_0_and_a_new_engine_works_in_the_same_process(tp: int) -> None:
    victim = tp - 1
    for _ in range(3):
        with ranks_of(tp) as ranks:
            assert ranks.call("meet", 4) == sum_of(tp)
            pid = ranks.call_all("pid")[victim]
            threading.Timer(0.5, os.kill, [pid, signal.SIGKILL]).start()
            start = time.monotonic()
            with pytest.raises(RankDied, match=rf"rank {victim} .* was killed by SIGKILL"):
                ranks.call("meet_late", victim, 600.0)
            assert time.monotonic() - start < 0.5 + DETECTION_S
        assert state(pid) == ""


def test_an_error_before_the_collective_arrives_with_the_culprits_traceback(tp: int) -> None:
    victim = tp - 1
    with ranks_of(tp) as ranks:
        start = time.monotonic()
        words = rf"(?s)rank {victim} .*ArithmeticError: the runner lost count"
        with pytest.raises(RankDied, match=words):
            ranks.call("raise_before_meeting", victim)
        assert time.monotonic() - start < DETECTION_S


def test_a_stopped_rank_ends_the_engine_after_the_timeout(tp: int) -> None:
    victim = tp - 1
    with ranks_of(tp, step_timeout_s=3.0) as ranks:
        ranks.call("meet", 4)
        os.kill(ranks.call_all("pid")[victim], signal.SIGSTOP)
        words = rf"rank {victim} .*did not finish in 3 s \(state T\)"
        with pytest.raises(RankDied, match=words):
            ranks.call("meet", 4)


def sum_of(tp: int) -> float:
    """Return what `meet` does: the sum of rank + 1 over the ranks."""
    return float(sum(range(1, tp + 1)))
