"""Rank 0's watch over the other ranks: one thread that waits for all of them at once.

It reads every rank's pipe, looks after every process, and counts the time of the call that rank 0
is in. The first failure wins: it is recorded, rank 0 is freed from whatever it waits in, and the
other ranks are killed, which also frees a gloo collective that rank 0 sits in.

    launch.py: begin(call) -> ... -> end(), replies(), check()
    this thread:   pipes, processes, clock -> RankDied recorded -> on_failure() -> kill
"""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanorunner.errors import RankDied
from nanorunner.rank_process import RankProcess, name_signal, process_state
from nanorunner.workers.channel import Channel
from nanorunner.workers.deadline import RunningClock
from nanorunner.workers.pipe import Inbox, Message

TICK_S = 0.25  # how often processes and the clock are looked at when no pipe speaks
TICKS_TO_SUSPECT = 4  # a rank seen stopped this often in a row is reported
# After the first sign of a failure we listen this long for others: a killed rank makes the others
# raise, and their errors may be read before its end is noticed.
GRACE_S = 0.3
EXIT_WAIT_S = 5.0
# Rank 0 mostly leaves by itself: its collective fails. But it may be loading weights for minutes.
PUSH_AFTER_S = 1.5

logger = logging.getLogger("nanorunner")


@dataclass
class CallClock:
    """The call that rank 0 is in."""

    frame: int
    method: str
    timeout_s: float
    clock: RunningClock = field(default_factory=RunningClock)
    seconds: float = 0.0  # at the watcher's last look
    thread: int = field(default_factory=threading.get_ident)
    is_pushed: bool = False


class PeerFailed(RankDied):
    """Pushes rank 0 out of its share of a call; Ranks.guard() raises the failure in its place."""

    def __init__(self) -> None:
        super().__init__(0, os.getpid(), "left its call, as another rank has failed")


class Watcher:
    """Watches the ranks from start() to stop(); everything public is for rank 0's other threads."""

    def __init__(self, channel: Channel, on_failure: Callable[[], None]) -> None:
        self.failure: RankDied | None = None
        self.failed = threading.Event()
        self.ranks: list[RankProcess] = []
        self._channel = channel
        self._on_failure = on_failure
        self._call: CallClock | None = None
        self._replies: dict[int, dict[int, Any]] = {}  # frame -> rank -> value
        self._changed = threading.Condition()
        self._push_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, wake_end = socket.socketpair()
        self._selector.register(wake_end, selectors.EVENT_READ, None)
        self._wake_end = wake_end
        self._is_stopping = False  # the ranks are expected to leave
        self._is_stopped = False
        self._starter = threading.current_thread()  # the ranks die with it: see die_with()
        self._thread = threading.Thread(target=self._run, name="nanorunner-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch; ranks may be added afterwards."""
        self._thread.start()

    def add(self, watched: RankProcess) -> None:
        """Watch one more rank, from its first moment on; its pipe becomes non-blocking."""
        self._selector.register(watched.pipe, selectors.EVENT_READ, (watched, Inbox(watched.pipe)))
        self.ranks.append(watched)

    def begin(self, frame: int, method: str, timeout_s: float) -> None:
        """Say that rank 0 enters a call, which must end within timeout_s of running time."""
        self._call = CallClock(frame, method, timeout_s)

    def end(self) -> None:
        """Say that rank 0 has left the call."""
        with self._push_lock:
            call, self._call = self._call, None
            if call is not None and call.is_pushed:
                _raise_in(call.thread, None)  # take back what has not been raised yet

    def check(self) -> None:
        """Raise the recorded failure, if there is one."""
        if self.failure is not None:
            raise self.failure.copy()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait until is_true(), looked at after every message; raise the failure if one comes.

        The call that was begun limits the wait.
        """
        with self._changed:
            while not is_true():
                self.check()
                self._changed.wait(TICK_S)

    def replies(self, frame: int) -> list[Any]:
        """Wait for every rank's reply to `frame`; return their values in rank order."""
        self.wait_until(lambda: len(self._replies.get(frame, {})) == len(self.ranks))
        with self._changed:
            by_rank = self._replies.pop(frame)
        return [by_rank[watched.rank] for watched in self.ranks]

    def fail(self, failure: RankDied) -> None:
        """Record a failure, unless there is one already, free rank 0 and kill the other ranks."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = failure
        if failure.rank > 0:  # rank 0's own error is about to be raised and seen
            logger.error("%s", str(failure).partition("\n")[0])
        self._send_kill()
        self.failed.set()
        with self._changed:
            self._changed.notify_all()
        self._on_failure()
        self.kill()

    def kill(self) -> None:
        """Kill every rank that still runs, a stopped one too, and reap it."""
        self._send_kill()
        for watched in self.ranks:
            try:
                watched.process.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:  # in an uninterruptible driver call: D in ps
                logger.error(
                    "r%d (pid %d) does not die (state %s); its memory is not free yet",
                    watched.rank,
                    watched.process.pid,
                    process_state(watched.process.pid),
                )

    def expect_exit(self) -> None:
        """Say that the ranks will leave now: the end of a process is no failure any more."""
        self._is_stopping = True

    def stop(self) -> None:
        """End the thread and close the pipes. A second call does nothing."""
        self._is_stopping = self._is_stopped = True
        self._wake.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(EXIT_WAIT_S)
        self._selector.close()
        self._wake_end.close()
        for watched in self.ranks:
            watched.pipe.close()

    def _send_kill(self) -> None:
        for watched in self.ranks:
            if watched.process.poll() is None:
                watched.process.kill()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # nobody would watch the ranks, and rank 0 could wait for ever
            self.fail(RankDied(0, os.getpid(), f"lost its watcher thread: {error!r}"))
            raise

    def _watch(self) -> None:
        grace: RunningClock | None = None
        since_failure: RunningClock | None = None
        while not self._is_stopped:
            for key, _ in self._selector.select(TICK_S if grace is None else GRACE_S / 4):
                if key.data is None:  # stop() closed the other end
                    return
                self._read(*key.data)
            if self.failure is not None:
                since_failure = since_failure or RunningClock()
                if since_failure.elapsed_s() > PUSH_AFTER_S:
                    self._push_rank_0()
            if self._is_stopping or self.failure is not None:
                continue
            self._look_at_states()
            self._look_at_clock()
            if grace is None and any(self._has_failed(watched) for watched in self.ranks):
                grace = RunningClock()
            elif grace is not None and grace.elapsed_s() > GRACE_S:
                self.fail(self._judge())

    def _push_rank_0(self) -> None:
        """Raise PeerFailed in the thread that still makes its share of a call, once."""
        with self._push_lock:
            if self._call is not None and not self._call.is_pushed:
                self._call.is_pushed = True
                _raise_in(self._call.thread, PeerFailed)

    def _read(self, watched: RankProcess, inbox: Inbox) -> None:
        messages, watched.is_open = inbox.read()
        if not watched.is_open:
            self._selector.unregister(watched.pipe)
        with self._changed:
            for message in messages:
                self._take(watched, message)
            self._changed.notify_all()

    def _take(self, watched: RankProcess, message: Message) -> None:
        if message.kind == "ok":
            self._replies.setdefault(message.frame, {})[watched.rank] = message.value
        elif message.kind == "ready":
            watched.is_ready = True
        elif watched.error is None:
            watched.error = message.value

    def _has_failed(self, watched: RankProcess) -> bool:
        if watched.error is not None or not watched.is_open:
            return True
        return watched.process.poll() is not None

    def _judge(self) -> RankDied:
        """Return the failure that came first: a signal from outside, else the earliest error."""
        failed = [watched for watched in self.ranks if self._has_failed(watched)]

        def order(watched: RankProcess) -> tuple[int, float]:
            code = watched.process.poll()
            if code is not None and code < 0:  # cannot be the consequence of a peer's end
                return (0, 0.0)
            return (1, watched.error[0]) if watched.error is not None else (2, 0.0)

        first = min(failed, key=order)
        code = first.process.poll()
        if code is not None and code < 0:
            return self._blame(
                first, f"was killed by {name_signal(-code, self._starter.is_alive())}"
            )
        if first.error is not None:
            return self._blame(first, "raised an error", traceback=first.error[1])
        return self._blame(first, "closed its pipe" if code is None else f"exited with code {code}")

    def _look_at_clock(self) -> None:
        """Fail when the call that rank 0 is in has taken longer than it may."""
        call = self._call
        if call is None or not self.ranks:  # the first one's process is still being made
            return
        call.seconds = call.clock.elapsed_s()
        if call.seconds <= call.timeout_s:
            return
        # the likeliest first: a stopped rank, else the one that has read the least
        late = min(self.ranks, key=lambda w: (not w.ticks_stopped, self._channel.acked(w.rank)))
        state = process_state(late.process.pid)
        self.fail(self._blame(late, f"did not finish in {call.timeout_s:g} s (state {state})"))

    def _look_at_states(self) -> None:
        """Report a rank that is stopped, and one that goes on."""
        for watched in self.ranks:
            pid = watched.process.pid
            if process_state(pid) not in ("T", "t"):
                if watched.ticks_stopped >= TICKS_TO_SUSPECT:
                    logger.warning("r%d (pid %d) goes on", watched.rank, pid)
                watched.ticks_stopped = 0
                continue
            watched.ticks_stopped += 1
            if watched.ticks_stopped == TICKS_TO_SUSPECT:
                logger.warning(
                    "r%d (pid %d) is stopped, by a signal or a debugger; waiting for it "
                    "(`kill -CONT %d` lets it go on)",
                    watched.rank,
                    pid,
                    pid,
                )

    def _blame(self, watched: RankProcess, cause: str, traceback: str = "") -> RankDied:
        call = self._call
        return RankDied(
            watched.rank,
            watched.process.pid,
            cause,
            frame=call.frame if call is not None else 0,
            method=call.method if call is not None else "",
            acked=self._channel.acked(watched.rank),
            seconds=call.seconds if call is not None else 0.0,
            traceback=traceback,
        )


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise `error` at its next line of Python; None takes an earlier one back."""
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
