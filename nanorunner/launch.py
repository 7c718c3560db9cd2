"""Rank 0's side of the other ranks: start them, call them, hear them out, and let none survive.

    engine.py -> Ranks.call("step", wire) -> channel.write_shm -> every rank's loop -> runner.step
                                          -> rank 0's own runner.step -> its value

Ranks are plain child processes started with the user's interpreter; they do not import the user's
script, so it needs no `if __name__ == "__main__"`. The segment loses its name before they start and
the events lie inside it: nothing of ours has a name that a crash could leave behind.
"""

from __future__ import annotations

import logging
import os
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nanorunner.errors import RankDied
from nanorunner.interrupt import DeferInterrupt
from nanorunner.rank_process import spawn
from nanorunner.segment import Segment
from nanorunner.tap import Tap
from nanorunner.watch import EXIT_WAIT_S, PeerFailed, Watcher
from nanorunner.workers import loop as rank_loop
from nanorunner.workers import pipe as pipes
from nanorunner.workers.channel import Channel
from nanorunner.workers.messages import (
    METHODS,
    METHODS_WITH_REPLY,
    RunnerConfig,
    StepHandle,
    StepOutput,
)
from nanorunner.workers.pipe import Message
from nanorunner.workers.spans import SpanRecorder

RUNNER = "nanorunner.workers.runner_factory:make_runner"
# A peer's death reaches rank 0 as an error of its own collective before the watcher has judged it.
VERDICT_WAIT_S = 5.0
TRACE_WRITING_S = 30.0  # of the ranks' traces: a full ring takes a core about a second
FOREIGN_VERDICT_WAIT_S = 1.0  # for errors that no collective raises, such as ValueError

logger = logging.getLogger("nanorunner")


class _Meeting:
    """What rank 0 may wait in for the other ranks: the store where they meet, and their group."""

    def __init__(self) -> None:
        self.server: Any = None  # rank 0 is its client: dropping the server ends every wait at it
        self.group: Any = None

    def break_up(self) -> None:
        """End whatever rank 0 waits in; called by the watcher at a failure."""
        self.server = None
        if self.group is not None:
            self.group.abort()

    def close(self) -> None:
        """Leave; a second call does nothing."""
        group, self.group, self.server = self.group, None, None
        if group is not None:
            group.close()


class Ranks:
    """All ranks of one engine, rank 0's own runner among them.

    After an error in any rank, or in rank 0's own share of a call, the other ranks are dead, every
    further call raises RankDied, and close() frees what is left. At tp 1 there is no process, no
    segment, and errors are the runner's own.
    """

    def __init__(
        self,
        config: RunnerConfig,
        runner: str = RUNNER,
        *,
        with_group: bool = True,
        methods: frozenset[str] = METHODS,
        methods_with_reply: frozenset[str] = METHODS_WITH_REPLY,
        tap: Tap | None = None,
    ) -> None:
        """Start ranks 1 to tp - 1 from this thread, which must outlive them, and build rank 0.

        runner: "module:function" that every rank imports and calls with (config, rank, group);
        with_group: False leaves out torch and passes None as the group;
        tap: shows the wire's frames; it is closed with the ranks.
        Raises RankDied when a rank does not get ready within config.start_timeout_s; whatever is
        raised, no process is left.
        """
        self.config = replace(config, tap=tap is not None)
        self.defer_interrupt = DeferInterrupt()
        self.runner: Any = None
        self.recorder: SpanRecorder | None = None  # rank 0's, if its runner has one
        self._meeting = _Meeting()
        self._methods = methods
        self._methods_with_reply = methods_with_reply
        self._is_closed = False
        self._is_broken = False
        self._threads_before: int | None = None
        self._segment: Segment | None = None
        self._channel: Channel | None = None
        self._watcher: Watcher | None = None
        self._tap = tap
        if config.tp == 1:
            self._build_own_runner(runner, with_group)
            return
        try:
            self._segment = Segment()
            self._channel = Channel(self._segment.buffer, 0, config.tp, methods)
            if tap is not None:
                tap.attach(self._segment.buffer, self._channel)
            self._start(runner, with_group, self._segment)
        except BaseException:
            self._is_broken = True
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Make one call on every rank and return the value of rank 0's own runner.

        Returns when rank 0 has made its share; the others may still be at theirs, except for a
        method with a reply, which is waited for.
        """
        if method in self._methods_with_reply:
            return self.call_all(method, *args)[0]
        self._check_method(method)
        if self._channel is None:
            return rank_loop.call(self.runner, method, *args)
        with (
            self.defer_interrupt,
            self.guard(method, self.config.step_timeout_s, sent_since=self._channel.frame),
        ):
            self._write(method, *args)
            return self._run(method, *args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Make one call of a method that replies; return every rank's value in rank order."""
        if method not in self._methods_with_reply:
            raise ValueError(f"{method} has no reply; {sorted(self._methods_with_reply)} have")
        self._check_method(method)
        if self._watcher is None or self._channel is None:
            return [rank_loop.call(self.runner, method, *args)]
        with self.guard(method, self.config.start_timeout_s, sent_since=self._channel.frame):
            frame = self._write(method, *args)
            value = self._run(method, *args)
            values = [value, *self._watcher.replies(frame)]
        self._look_at_tap()
        return values

    def result(self, handle: StepHandle) -> StepOutput:
        """Wait for a step's output; RankDied when a rank fails meanwhile or the step is late.

        Rank 0 polls its device, and the device may wait for a peer that has died: the watcher then
        aborts the collective, so the poll ends and nobody reads what it left.
        """
        if self._channel is None:
            return handle.result()
        with self.guard("step", self.config.step_timeout_s):
            output = handle.result()
            if self._meeting.group is not None:
                self._meeting.group.check()  # an all-reduce that gave up leaves nonsense
        self._look_at_tap()
        return output

    def check(self) -> None:
        """Raise RankDied when a rank has failed; for use inside waits."""
        if self._watcher is not None:
            self._watcher.check()

    @contextmanager
    def guard(self, method: str, timeout_s: float, sent_since: int | None = None) -> Iterator[None]:
        """Watch a wait of rank 0 for what every rank does together.

        If it takes longer than timeout_s, or fails because a peer has died, the block ends in
        RankDied. Any other error leaves the ranks out of step, so they are killed and it goes on;
        except when no frame was sent after frame `sent_since`, for then nobody is.
        """
        watcher, channel = self._watcher, self._channel
        if watcher is None or channel is None:
            yield
            return
        watcher.check()
        watcher.begin(channel.frame + 1, method, timeout_s)
        try:
            yield
            watcher.check()  # an aborted collective returns, with nonsense in its tensors
        except PeerFailed:
            watcher.check()
            raise
        except RankDied:
            raise
        except BaseException as error:
            if channel.frame != sent_since:
                self._raise_the_cause(error, method)
            raise
        finally:
            watcher.end()

    def close(self) -> None:
        """End every rank and free everything, within about 10 s, longer where traces are written.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._is_broken = self._is_broken or (
            self._watcher is not None and self._watcher.failure is not None
        )
        try:
            if self._watcher is not None and not self._is_broken:
                self._say_goodbye()
            self._close_runner()
        finally:
            self._free()

    def _close_runner(self) -> None:
        if self.runner is None:
            return
        try:
            self.runner.close()
        except Exception as error:
            if not self._is_broken:
                raise
            logger.warning("closing rank 0 after the failure: %r", error)  # that one is the news

    def _build_own_runner(self, runner: str, with_group: bool, port: int = 0) -> None:
        if with_group:
            # here, not at the top: the wire alone needs no torch
            from nanorunner.workers import rendezvous

            self._threads_before = rendezvous.share_cores(self.config.tp)
            self._meeting.group = rendezvous.join_group(self.config, 0, port)
        self.runner = rank_loop.resolve(runner)(self.config, 0, self._meeting.group)
        self.recorder = getattr(self.runner, "recorder", None)

    def _start(self, runner: str, with_group: bool, segment: Segment) -> None:
        """Start every rank, build rank 0's runner meanwhile, and wait until all are ready."""
        if self._channel is None:
            raise ValueError("the segment comes first")
        port = 0
        if with_group:
            from nanorunner.workers import rendezvous

            self._meeting.server = rendezvous.open_store(self.config.start_timeout_s)
            port = self._meeting.server.port
        # not a method of ours: the watcher's thread would keep an engine alive that nobody holds
        watcher = self._watcher = Watcher(self._channel, self._meeting.break_up)
        self._finalizer = weakref.finalize(
            self, _abandon, watcher, self._channel, segment, self._tap, os.getpid()
        )
        watcher.start()
        start = rank_loop.Start(
            self.config,
            runner,
            port,
            self._methods,
            self._methods_with_reply,
            logger.getEffectiveLevel(),
        )
        with self.guard("start", self.config.start_timeout_s):
            for rank in range(1, self.config.tp):
                with self.defer_interrupt:  # Ctrl-C in here would leave a process unwatched
                    started = spawn(rank, self.config.tp, segment.fd)
                    watcher.add(started)
                pipes.send(started.pipe, Message(0, "start", start))
            segment.close_descriptor()
            self._build_own_runner(runner, with_group, port)
            watcher.wait_until(lambda: all(watched.is_ready for watched in watcher.ranks))

    def _write(self, method: str, *args: Any) -> int:
        if self._channel is None:
            raise ValueError("no wire at tp 1")
        # twice the time: the watcher's clock ends the wait first, and knows whom to name
        timeout_s = 2 * max(self.config.step_timeout_s, self.config.start_timeout_s)
        begin = 0 if self.recorder is None else self.recorder.now()
        frame = self._channel.write_shm(method, *args, timeout_s=timeout_s, check=self.check)
        if self.recorder is not None:
            self.recorder.sent(frame, begin)
        return frame

    def _run(self, method: str, *args: Any) -> Any:
        """Make rank 0's share of a call that is on the wire."""
        if self.recorder is not None:
            self.recorder.begin_run()
        value = rank_loop.call(self.runner, method, *args)
        if self.recorder is not None:
            self.recorder.end_run()
        return value

    def _look_at_tap(self) -> None:
        """Let the tap say what the other ranks have acked by now."""
        if self._tap is not None:
            self._tap.look()

    def _check_method(self, method: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{method}: the ranks are closed")
        if method not in self._methods:
            raise ValueError(f"{method!r} is no method of the wire; {sorted(self._methods)} are")

    def _raise_the_cause(self, error: BaseException, method: str) -> None:
        """Raise RankDied if a peer is to blame for rank 0's error; else end the others."""
        watcher, channel = self._watcher, self._channel
        if watcher is None or channel is None:
            return
        if isinstance(error, Exception):
            is_likely = isinstance(error, RuntimeError | OSError | TimeoutError)
            if watcher.failed.wait(VERDICT_WAIT_S if is_likely else FOREIGN_VERDICT_WAIT_S):
                try:
                    watcher.check()
                except RankDied as failure:
                    raise failure from error
        watcher.fail(
            RankDied(0, os.getpid(), f"raised {error!r}", frame=channel.frame, method=method)
        )

    def _say_goodbye(self) -> None:
        """Send `close`, the last call, and give the ranks time to leave."""
        if self._watcher is None or self._channel is None:
            return
        self._watcher.expect_exit()
        begin = 0 if self.recorder is None else self.recorder.now()
        wait_s = EXIT_WAIT_S if self.config.trace is None else EXIT_WAIT_S + TRACE_WRITING_S
        try:
            frame = self._channel.write_shm(rank_loop.LAST_METHOD, timeout_s=EXIT_WAIT_S)
            if self.recorder is not None:
                self.recorder.sent(frame, begin)
        except Exception as error:
            logger.warning("the ranks are killed, as they cannot be told to leave: %s", error)
            return
        for watched in self._watcher.ranks:
            try:
                watched.process.wait(wait_s)
            except subprocess.TimeoutExpired:
                logger.warning("r%d did not leave in %g s; it is killed", watched.rank, wait_s)

    def _free(self) -> None:
        if self._watcher is not None:
            self._finalizer.detach()
            self._watcher.expect_exit()
            self._watcher.kill()
            self._watcher.stop()
        self._meeting.close()
        self.runner = None
        try:
            if self._tap is not None:
                self._tap.close()
        finally:
            self._free_memory()

    def _free_memory(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._segment is not None:
            self._segment.close()
        if self._threads_before is not None and self.config.tp > 1:
            import torch

            torch.set_num_threads(self._threads_before)


def _abandon(
    watcher: Watcher, channel: Channel, segment: Segment, tap: Tap | None, owner_pid: int
) -> None:
    """Kill the ranks of an engine that nobody closed; runs when it is collected, and at exit."""
    if os.getpid() == owner_pid:  # a forked copy of rank 0 has no say
        watcher.expect_exit()
        watcher.kill()
        watcher.stop()
        if tap is not None:
            tap.close()
        channel.close()
        segment.close()
