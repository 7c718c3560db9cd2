"""Ranks answer in step, and whatever happens to one of them, rank 0 says so and nothing is left."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_harness import DETECTION_S, make_config, ranks_of, start_ranks, state, wait_until

from nanorunner import launch
from nanorunner.errors import RankDied
from nanorunner.launch import Ranks
from nanorunner.rank_process import RankProcess, spawn

EXIT_WAIT_S = 0.5  # instead of 5: what comes after it is the same
CLOSE_S = 50.0  # nobody has waited for a rank that sleeps for 600; mostly it takes EXIT_WAIT_S
SMALL_CALLS = 3
NUM_CALLS = 30_000  # among which are two that are larger than the ring


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_rank_answers_in_rank_order(tp: int) -> None:
    with ranks_of(tp) as ranks:
        assert ranks.call_all("echo", "a") == [(rank, "a") for rank in range(tp)]
        assert ranks.call("echo", "b") == (0, "b")
        assert len(set(ranks.call_all("pid"))) == tp


def test_one_rank_needs_no_process() -> None:
    with ranks_of(1) as ranks:
        assert ranks.call_all("pid") == [os.getpid()]
        with pytest.raises(KeyError):
            ranks.call("fail_at", 0)
        assert ranks.call("echo", 1) == (0, 1), "an error at tp 1 is the runner's own"


def test_thirty_thousand_calls_reach_slow_readers_whole_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DUMMY_PAUSE_S", "0.02")
    sizes = [1, 33, 40, 500, 4000, 33, 33, 33]
    with ranks_of(3) as ranks:
        num_bytes = 0
        for number in range(NUM_CALLS):
            size = sizes[number % 8]
            if number % 2500 == 0:
                size = (1 << 18) + number
            if number % 25_000 == 7:
                size = 8 << 20
            ranks.call("step", number, bytes([number % 251]) * size)
            num_bytes += size
        assert ranks.call_all("count") == [(NUM_CALLS, num_bytes)] * 3


def test_eight_mebibytes_get_through_while_the_ranks_sit_in_a_step() -> None:
    data = os.urandom(8 << 20)
    with ranks_of(3) as ranks:
        ranks.call("sleep", 2.0, 1)
        assert ranks.call_all("echo", data) == [(rank, data) for rank in range(3)]


def test_a_slow_reader_of_a_full_ring_is_waited_for() -> None:
    with ranks_of(2) as ranks:
        ranks.call("sleep", 1.0, 1)
        for number in range(30):
            ranks.call("step", number, bytes([number % 251]) * 100_000)
        assert ranks.call_all("count") == [(30, 3_000_000)] * 2


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_full_ring_with_a_dead_or_stopped_reader_ends_by_name(stop: signal.Signals) -> None:
    changes = {"step_timeout_s": 3.0} if stop == signal.SIGSTOP else {}
    with ranks_of(3, **changes) as ranks:
        pid = ranks.call_all("pid")[2]
        os.kill(pid, signal.SIGSTOP)  # before it is killed too: it shall read nothing
        wait_until(lambda: state(pid) == "T")
        full = _frame(ranks) + SMALL_CALLS + 2  # two pieces of the large call fit, a third does not
        is_dying = stop == signal.SIGKILL
        with (
            _killing(pid, lambda: is_dying and _frame(ranks) == full),
            pytest.raises(RankDied, match=rf"rank 2 \(pid {pid}\)") as caught,
        ):
            _fill_the_ring(ranks)
        assert caught.value.rank == 2
        assert caught.value.method == "step"
        if stop == signal.SIGSTOP:
            assert "did not finish in 3 s (state T)" in caught.value.cause
        else:
            assert "was killed by SIGKILL" in caught.value.cause


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("phase", ["call", "idle"])
def test_a_killed_rank_is_named_with_its_signal(tp: int, phase: str, signs: Path) -> None:
    with ranks_of(tp) as ranks:
        victim = tp - 1
        pid = ranks.call_all("pid")[victim]
        if phase == "call":
            burns = signs / f"burn-{victim}"
            with _killing(pid, burns.exists) as killed_at, pytest.raises(RankDied) as caught:
                ranks.call_all("burn", victim)
            assert caught.value.method == "burn"
        else:
            killed_at = [time.monotonic()]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: _has_failed(ranks))
            with pytest.raises(RankDied) as caught:
                ranks.call("echo", 1)
        assert time.monotonic() - killed_at[0] < DETECTION_S
        assert (caught.value.rank, caught.value.pid) == (victim, pid)
        assert "was killed by SIGKILL" in caught.value.cause


def test_a_killed_rank_ends_a_call_in_which_rank_0_is_busy_itself(signs: Path) -> None:
    with ranks_of(2) as ranks:
        pid = ranks.call_all("pid")[1]
        with (
            _killing(pid, (signs / "load_slowly-0").exists) as killed_at,
            pytest.raises(RankDied, match="was killed by SIGKILL"),
        ):
            ranks.call_all("load_slowly", 60.0)
        assert time.monotonic() - killed_at[0] < DETECTION_S


@pytest.mark.parametrize("victim", [1, 2])
def test_an_error_in_a_rank_arrives_with_its_own_traceback(victim: int) -> None:
    with ranks_of(3) as ranks:
        start = time.monotonic()
        with pytest.raises(RankDied) as caught:
            ranks.call_all("fail_at", victim)
        assert time.monotonic() - start < DETECTION_S
        assert caught.value.rank == victim
        assert f"KeyError: 'the dummy fails on rank {victim}'" in str(caught.value)
        with pytest.raises(RankDied, match="raised an error"):
            ranks.call("echo", 1)


def test_an_error_of_rank_0_is_raised_as_it_is_and_ends_the_others() -> None:
    with ranks_of(3) as ranks:
        pids = ranks.call_all("pid")[1:]
        with pytest.raises(KeyError, match="the dummy fails on rank 0"):
            ranks.call("fail_at", 0)
        wait_until(lambda: [state(pid) for pid in pids] == ["", ""])
        with pytest.raises(RankDied, match="rank 0"):
            ranks.call("echo", 1)


def test_an_error_while_a_rank_loads_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_FAIL_AT_LOAD", "2")
    error = r"(?s)rank 2 .*MemoryError: the dummy has no memory at ([0-9.]+)"
    with pytest.raises(RankDied, match=error) as caught:
        start_ranks(3)
    found = re.search(error, str(caught.value))
    assert found is not None
    assert time.monotonic() - float(found[1]) < DETECTION_S


def test_a_rank_killed_while_it_loads_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], signs: Path
) -> None:
    hold = os.path.join(tmp_path, "hold")
    open(hold, "w").close()
    monkeypatch.setenv("DUMMY_HOLD", hold)
    with (
        _killing(lambda: int((signs / "load-1").read_text()), (signs / "load-1").exists),
        pytest.raises(RankDied, match="was killed by SIGKILL"),
    ):
        start_ranks(3)


def test_a_rank_that_does_not_get_ready_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    hold = os.path.join(tmp_path, "hold")
    open(hold, "w").close()
    monkeypatch.setenv("DUMMY_HOLD", hold)
    with pytest.raises(RankDied, match=r"rank 1 .* did not finish in 2 s \(state [SRD]\)"):
        start_ranks(2, start_timeout_s=2.0)


def test_a_machine_that_takes_longer_than_the_limit_for_a_process_is_told_which_rank_is_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    monkeypatch.setenv("DUMMY_HOLD", str(tmp_path / "hold"))

    def spawn_late(*arguments: Any) -> RankProcess:
        time.sleep(1.0)
        return spawn(*arguments)

    monkeypatch.setattr(launch, "spawn", spawn_late)
    with pytest.raises(RankDied, match=r"rank 1 .* did not finish in 0\.3 s"):
        start_ranks(2, start_timeout_s=0.3)


def test_ctrl_c_while_a_process_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def spawn_interrupted(*arguments: Any) -> RankProcess:
        started = spawn(*arguments)
        pids.append(started.process.pid)
        signal.raise_signal(signal.SIGINT)
        return started

    monkeypatch.setattr(launch, "spawn", spawn_interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_ranks(3)
    assert [state(pid) for pid in pids] == [""], "it was watched, so that it could be ended"


def test_a_second_engine_works_after_the_first_has_failed() -> None:
    for _ in range(3):
        with ranks_of(2) as ranks:
            assert ranks.call_all("echo", 1) == [(0, 1), (1, 1)]
            with pytest.raises(RankDied):
                ranks.call("fail_at", 1)


def test_two_engines_at_once_do_not_meet() -> None:
    with ranks_of(2) as first, ranks_of(2) as second:
        assert first.call_all("echo", 1) == [(0, 1), (1, 1)]
        assert second.call_all("echo", 2) == [(0, 2), (1, 2)]


def test_a_stopped_rank_is_reported_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with ranks_of(2) as ranks, caplog.at_level(logging.WARNING, "nanorunner"):
        pid = ranks.call_all("pid")[1]
        os.kill(pid, signal.SIGSTOP)
        pattern = rf"r1 \(pid {pid}\) is stopped"
        assert wait_until(lambda: re.search(pattern, caplog.text)) < DETECTION_S
        threading.Timer(0.5, lambda: os.kill(pid, signal.SIGCONT)).start()
        assert ranks.call_all("echo", 1) == [(0, 1), (1, 1)]
        wait_until(lambda: "goes on" in caplog.text)


def test_a_stopped_rank_ends_the_engine_after_the_timeout() -> None:
    with ranks_of(2) as ranks:
        pid = ranks.call_all("pid")[1]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state(pid) == "T")
        ranks.config = replace(ranks.config, start_timeout_s=2.5)  # not of the start itself
        with pytest.raises(RankDied, match=r"did not finish in 2\.5 s \(state T\)"):
            ranks.call_all("echo", 1)
    assert state(pid) == ""


@pytest.mark.parametrize("method", ["exit", "__class__", "loop"])
def test_an_unknown_method_is_refused_and_the_ranks_go_on(method: str) -> None:
    with ranks_of(2) as ranks:
        with pytest.raises(ValueError, match="is no method of the wire"):
            ranks.call(method)
        assert ranks.call_all("echo", 1) == [(0, 1), (1, 1)]


def test_an_argument_that_cannot_be_pickled_is_refused_and_the_ranks_go_on() -> None:
    with ranks_of(2) as ranks:
        with pytest.raises(AttributeError):
            ranks.call("step", lambda: None, b"")
        assert ranks.call_all("echo", 1) == [(0, 1), (1, 1)]


def test_a_method_without_a_reply_cannot_be_asked_for_replies() -> None:
    with ranks_of(2) as ranks, pytest.raises(ValueError, match="step has no reply"):
        ranks.call_all("step", 0, b"")


def test_close_ends_a_rank_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "EXIT_WAIT_S", EXIT_WAIT_S)
    ranks = start_ranks(2)
    pid = ranks.call_all("pid")[1]
    ranks.call("sleep", 600.0, 1)
    start = time.monotonic()
    ranks.close()
    assert time.monotonic() - start < CLOSE_S
    assert state(pid) == ""
    ranks.close()
    with pytest.raises(RuntimeError, match="are closed"):
        ranks.call("echo", 1)


def test_an_engine_that_nobody_closed_ends_with_its_last_reference() -> None:
    ranks = start_ranks(2)
    pid = ranks.call_all("pid")[1]
    del ranks
    wait_until(lambda: state(pid) == "")


def test_the_end_of_the_starting_thread_is_named_as_the_cause() -> None:
    started: list[Ranks] = []
    thread = threading.Thread(target=lambda: started.append(start_ranks(2)))
    thread.start()
    thread.join()
    wait_until(lambda: _has_failed(started[0]))
    with pytest.raises(RankDied, match="the thread that started it has ended"):
        started[0].call("echo", 1)
    started[0].close()


def test_too_many_ranks_for_the_wire_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ValueError, match="the wire has room for"):
        Ranks(make_config(1000), "dummy_runner:make_runner", with_group=False)


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder in which the dummy's ranks say where they are."""
    folder = tmp_path / "signs"
    folder.mkdir()
    monkeypatch.setenv("DUMMY_SIGNS", str(folder))
    return folder


@contextmanager
def _killing(pid: int | Callable[[], int], is_time: Callable[[], bool]) -> Iterator[list[float]]:
    """Kill a process as soon as is_time(), unless the block ends before; yields when it was."""
    killed_at: list[float] = []
    is_over = threading.Event()

    def kill() -> None:
        wait_until(lambda: is_over.is_set() or is_time())
        if not is_over.is_set():
            victim = pid if isinstance(pid, int) else pid()
            killed_at.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed_at
    finally:
        is_over.set()
        killer.join()


def _frame(ranks: Ranks) -> int:
    """Return how many frames have been sent."""
    assert ranks._channel is not None
    return ranks._channel.frame


def _fill_the_ring(ranks: Ranks) -> None:
    """Make small calls, then one of 8 MiB, which cannot get through if somebody reads nothing."""
    for number in range(SMALL_CALLS):
        ranks.call("step", number, bytes([number % 251]) * 100_000)
    ranks.call("step", SMALL_CALLS, bytes([SMALL_CALLS]) * (8 << 20))


def _has_failed(ranks: Ranks) -> bool:
    try:
        ranks.check()
    except RankDied:
        return True
    return False
