"""The event wakes one waiter, forgets nothing, and never waits for a dead or stopped process."""

from __future__ import annotations

import math
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from rank_harness import state, wait_until

from nanorunner.workers.event import EVENT_BYTES, Event

# the child runs a few lines of ours and leaves by _exit, so other threads' locks cannot matter
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

FOREVER_S = 100.0  # of a wait that should be ended by something else than its timeout
PROMPT_S = 20.0  # of what takes milliseconds: a busy machine may stop us for seconds
# about 3 s on two cores. Each of them needs both processes to run, for which busy cores may take a
# thousand times as long: then time ends the test, unless the variable asks for a number.
NUM_INTERLEAVINGS = int(os.environ.get("NANORUNNER_INTERLEAVINGS", "1000000"))
FEWEST, ENOUGH_S = 1000, 60.0
IS_ASKED_FOR = "NANORUNNER_INTERLEAVINGS" in os.environ


@pytest.fixture
def memory() -> memoryview:
    """Zeroed memory that a forked child shares: a page for words, a page for the event."""
    return memoryview(mmap.mmap(-1, 8192))


@pytest.fixture
def event(memory: memoryview) -> Event:
    return Event(memory[4096:], create=True)


@contextmanager
def child(run: Callable[[], int]) -> Iterator[int]:
    """Run a function in a forked child, which is killed at the end; yields its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_set_before_the_wait_is_not_lost(event: Event) -> None:
    event.set()
    assert event.wait(0.0)


def test_a_wait_takes_all_sets_before_it(event: Event) -> None:
    event.set()
    event.set()
    assert event.wait(1.0)
    assert not event.wait(0.0)


def test_a_cleared_event_is_as_new(event: Event) -> None:
    event.set()
    event.clear()
    assert not event.wait(0.01)


@pytest.mark.parametrize("spin_s", [0.0, 0.01, FOREVER_S])
def test_a_wait_ends_at_its_timeout(event: Event, spin_s: float) -> None:
    start = time.monotonic()
    assert not event.wait(0.05, spin_s)
    assert 0.04 < time.monotonic() - start < PROMPT_S


def test_a_sleeping_waiter_in_another_process_is_woken(memory: memoryview, event: Event) -> None:
    def sleeper() -> int:
        memory[0] = 1
        memory[1] = Event(memory[4096:], create=False).wait(2 * FOREVER_S)
        return 0

    with child(sleeper) as pid:
        wait_until(lambda: memory[0] == 1 and state(pid) == "S")
        event.set()
        wait_until(lambda: memory[1] == 1, FOREVER_S)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_set_returns_at_once_whatever_became_of_the_waiter(
    memory: memoryview, event: Event, stop: signal.Signals
) -> None:
    def sleeper() -> int:
        while True:
            memory[0] = 1
            Event(memory[4096:], create=False).wait(2 * FOREVER_S)

    with child(sleeper) as pid:
        wait_until(lambda: memory[0] == 1 and state(pid) == "S")
        os.kill(pid, stop)
        wait_until(lambda: state(pid) in ("Z", "T"))
        start = time.monotonic()
        for _ in range(10000):
            event.set()
        assert time.monotonic() - start < PROMPT_S
        assert event.wait(0.0), "the dead waiter took what was set after its death"


@pytest.mark.limit(300)
def test_no_interleaving_of_set_and_clear_loses_the_last_number(
    memory: memoryview, event: Event
) -> None:
    """The writer never waits; the reader sleeps whenever it has seen the latest number."""
    words = memory[:4096].cast("Q")

    def writer() -> int:
        mine = Event(memory[4096:], create=False)
        for number in range(1, NUM_INTERLEAVINGS + 1):
            words[0] = number
            mine.set()
            while number - words[1] > number % 7:  # let the reader come close, to catch it asleep
                os.sched_yield()
        return 0

    with child(writer):
        seen = 0
        deadline = math.inf if IS_ASKED_FOR else time.monotonic() + ENOUGH_S
        while seen < NUM_INTERLEAVINGS and (seen < FEWEST or time.monotonic() < deadline):
            # a lost wake-up would sleep here until the timeout
            assert event.wait(FOREVER_S, 0.0 if seen % 3 else 0.0001), f"asleep at {seen}"
            assert words[0] >= seen
            words[1] = seen = words[0]


def test_a_closed_event_lets_its_memory_go() -> None:
    data = bytearray(EVENT_BYTES)
    event = Event(memoryview(data), create=True)
    with pytest.raises(BufferError):
        data.clear()
    event.close()
    event.close()
    data.clear()
