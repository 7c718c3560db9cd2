"""A rank that fails inside, before or on its way to a collective frees the others in seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gloo_runner
import pytest
import torch
from rank_harness import DETECTION_S, make_config, state, wait_until

from nanorunner import launch
from nanorunner.errors import RankDied
from nanorunner.launch import Ranks
from nanorunner.rank_process import RankProcess, spawn


@contextmanager
def ranks_of(tp: int, **changes: Any) -> Iterator[Ranks]:
    ranks = Ranks(
        make_config(tp, **changes),
        "gloo_runner:make_runner",
        methods=gloo_runner.METHODS,
        methods_with_reply=gloo_runner.WITH_REPLY,
    )
    try:
        yield ranks
    finally:
        ranks.close()


def test_ranks_meet_share_the_cores_and_leave_torch_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    with ranks_of(3) as ranks:
        assert [ranks.call("meet", 4) for _ in range(20)] == [6.0] * 20
        share = max(1, len(os.sched_getaffinity(0)) // 3)
        assert ranks.call_all("num_threads") == [share] * 3
    assert torch.get_num_threads() == before


def test_a_killed_rank_frees_rank_0_from_the_collective_and_a_new_engine_works() -> None:
    for _ in range(2):
        with ranks_of(3) as ranks:
            pids = ranks.call_all("pid")
            threading.Timer(0.5, lambda pid=pids[2]: os.kill(pid, signal.SIGKILL)).start()
            start = time.monotonic()
            with pytest.raises(RankDied, match=r"rank 2 .* was killed by SIGKILL"):
                ranks.call("meet_late", 2, 600.0)
            assert time.monotonic() - start < 0.5 + DETECTION_S
        assert [state(pid) for pid in pids[1:]] == ["", ""]


def test_an_error_before_the_collective_arrives_with_the_culprits_traceback() -> None:
    with ranks_of(3) as ranks:
        start = time.monotonic()
        with pytest.raises(RankDied, match=r"(?s)rank 2 .*ArithmeticError: the runner lost count"):
            ranks.call("raise_before_meeting", 2)
        assert time.monotonic() - start < DETECTION_S


def test_an_error_of_rank_0_frees_the_others() -> None:
    with ranks_of(2) as ranks:
        pid = ranks.call_all("pid")[1]
        with pytest.raises(ArithmeticError):
            ranks.call("raise_before_meeting", 0)
        wait_until(lambda: state(pid) == "")


def test_a_stopped_rank_in_a_collective_goes_on() -> None:
    with ranks_of(2) as ranks:
        pid = ranks.call_all("pid")[1]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, lambda: os.kill(pid, signal.SIGCONT)).start()
        assert ranks.call("meet", 4) == 3.0


def test_a_stopped_rank_in_a_collective_ends_the_engine_after_the_timeout() -> None:
    with ranks_of(2, step_timeout_s=2.0) as ranks:
        pid = ranks.call_all("pid")[1]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state(pid) == "T")
        with pytest.raises(RankDied, match=r"rank 1 .*did not finish in 2 s \(state T\)"):
            ranks.call("meet", 4)


def test_a_rank_that_fails_to_load_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_FAIL_AT_LOAD", "1")
    with pytest.raises(RankDied, match=r"(?s)rank 1 .*MemoryError"), ranks_of(2):
        pass


def test_a_rank_killed_before_the_ranks_have_met_frees_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed_at: list[float] = []

    def spawn_stopped(*arguments: Any) -> RankProcess:
        """Stop the rank before rank 0, which starts it, goes to the store: they cannot meet."""
        started = spawn(*arguments)
        started.process.send_signal(signal.SIGSTOP)

        def kill() -> None:
            killed_at.append(time.monotonic())
            started.process.kill()

        threading.Timer(0.5, kill).start()  # rank 0 waits at the store by then, as a rule
        return started

    monkeypatch.setattr(launch, "spawn", spawn_stopped)
    with pytest.raises(RankDied, match=r"rank 1 .* was killed by SIGKILL"), ranks_of(2):
        pass
    assert time.monotonic() - killed_at[0] < DETECTION_S
