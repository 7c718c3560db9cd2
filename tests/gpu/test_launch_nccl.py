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
import torch
from rank_harness import make_config, state

from nanorunner.errors import RankDied
from nanorunner.launch import Ranks

DETECTION_S = 5.0

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.limit(240),
]


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


def test_ranks_meet_on_their_gpus() -> None:
    with ranks_of(2) as ranks:
        assert [ranks.call("meet", 1 << 20) for _ in range(20)] == [3.0] * 20


def test_a_killed_rank_frees_rank_0_and_a_new_engine_works_in_the_same_process() -> None:
    for _ in range(3):
        with ranks_of(2) as ranks:
            assert ranks.call("meet", 4) == 3.0
            pid = ranks.call_all("pid")[1]
            threading.Timer(0.5, os.kill, [pid, signal.SIGKILL]).start()
            start = time.monotonic()
            with pytest.raises(RankDied, match=r"rank 1 .* was killed by SIGKILL"):
                ranks.call("meet_late", 1, 600.0)
            assert time.monotonic() - start < 0.5 + DETECTION_S
        assert state(pid) == ""


def test_an_error_before_the_collective_arrives_with_the_culprits_traceback() -> None:
    with ranks_of(2) as ranks:
        start = time.monotonic()
        with pytest.raises(RankDied, match=r"(?s)rank 1 .*ArithmeticError: the runner lost count"):
            ranks.call("raise_before_meeting", 1)
        assert time.monotonic() - start < DETECTION_S


def test_a_stopped_rank_ends_the_engine_after_the_timeout() -> None:
    with ranks_of(2, step_timeout_s=3.0) as ranks:
        ranks.call("meet", 4)
        os.kill(ranks.call_all("pid")[1], signal.SIGSTOP)
        with pytest.raises(RankDied, match=r"rank 1 .*did not finish in 3 s \(state T\)"):
            ranks.call("meet", 4)
