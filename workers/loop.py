"""The life of a rank: start, read a call, make it, read the next one.

launch.py starts one process per rank above 0, and that process runs rank_main(). Rank 0 has no
loop: its engine makes the same calls on its own runner after it has written them to the wire.

    rank_main: join the group -> build the runner -> "ready" -> loop: read_shm, call, read_shm, ...

A rank leaves in four ways: the call `close`; an error, which it reports first; the end of its pipe,
which says that rank 0 has gone; and the kernel's signal that its parent has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nanorunner.workers import pipe as pipes
from nanorunner.workers.ack_stamps import AckStamps
from nanorunner.workers.channel import SEGMENT_BYTES, Channel, spin_time_s
from nanorunner.workers.messages import METHODS_WITH_REPLY, RunnerConfig
from nanorunner.workers.pipe import Message
from nanorunner.workers.spans import SpanRecorder

LAST_METHOD = "close"
IDLE_WAIT_S = 1.0  # an idle rank looks this often whether rank 0 still lives
START_MESSAGE_TIMEOUT_S = 60.0  # rank 0 sends it right after it has started the process
TRACEBACK_CHARS = 16000
PR_SET_PDEATHSIG = 1

logger = logging.getLogger("nanorunner")


class Start(NamedTuple):
    """What rank 0 tells a new rank over its pipe, once."""

    config: RunnerConfig
    runner: str  # "module:function" that builds the runner
    port: int  # of the store where the ranks meet; 0: no process group is wanted
    methods: frozenset[str]
    methods_with_reply: frozenset[str]
    log_level: int


def loop(
    runner: Any,
    channel: Channel,
    pipe: socket.socket,
    methods_with_reply: frozenset[str] = METHODS_WITH_REPLY,
    is_parent_alive: Callable[[], bool] = lambda: True,
) -> None:
    """Read calls and make them, until `close` has been made or the parent has died."""
    recorder: SpanRecorder | None = getattr(runner, "recorder", None)
    if recorder is not None:
        channel.add_on_ack(recorder.acked)
    method = ""
    while method != LAST_METHOD:
        if not channel.wait(IDLE_WAIT_S):
            if not is_parent_alive():
                return
            continue
        begin = 0 if recorder is None else recorder.now()
        frame, method, args = channel.read_shm()
        if recorder is not None:
            recorder.received(frame, begin)
        value = call(runner, method, *args)
        if recorder is not None:
            recorder.end_run()
        if method in methods_with_reply:
            pipes.send(pipe, Message(frame, "ok", value))


def call(runner: Any, method: str, *args: Any) -> Any:
    """Make one call by its name on this rank's runner and return its value."""
    return getattr(runner, method)(*args)


def rank_main(rank: int, segment_fd: int, pipe_fd: int, parent_pid: int) -> None:
    """Be rank `rank`. The whole process: returns after `close`, exits with 1 after an error."""
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # launch.py blocked it until here
    faulthandler.enable()
    for fd in (segment_fd, pipe_fd):
        os.set_inheritable(fd, False)  # a compiler started by Triton must not keep them open
    pipe = socket.socket(fileno=pipe_fd)
    frame = 0
    channel: Channel | None = None
    try:
        pipe.settimeout(START_MESSAGE_TIMEOUT_S)
        start: Start = pipes.receive(pipe).value
        pipe.settimeout(None)
        threading.Thread(target=_leave_at_end_of, args=(pipe,), daemon=True).start()
        _log_to_stderr(rank, start.log_level)
        tp = start.config.tp
        memory = memoryview(mmap.mmap(segment_fd, SEGMENT_BYTES))
        channel = Channel(memory, rank, tp, start.methods, spin_time_s(tp))
        if start.config.tap:
            channel.add_on_ack(partial(AckStamps(memory, tp).write, rank))
        runner = _build_runner(rank, start)
        pipes.send(pipe, Message(0, "ready", os.getpid()))
        loop(runner, channel, pipe, start.methods_with_reply, lambda: os.getppid() == parent_pid)
    except BaseException:
        frame = 0 if channel is None else channel.frame
        _report_and_exit(pipe, frame)


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that "module:function" names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    It works inside a collective and in a busy loop, where no Python runs. If the parent has died
    before we could ask, this process has another parent by now, and leaves at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def _build_runner(rank: int, start: Start) -> Any:
    """Join the process group, if one is wanted, and return this rank's runner."""
    group = None
    if start.port:
        # here, not at the top: without a group a rank needs no torch, and starts in 0.1 s
        from nanorunner.workers import rendezvous

        rendezvous.share_cores(start.config.tp)
        group = rendezvous.join_group(start.config, rank, start.port)
    return resolve(start.runner)(start.config, rank, group)


def _leave_at_end_of(pipe: socket.socket) -> None:
    """Wait for the end of the pipe, which is the end of rank 0, and leave without a word."""
    with contextlib.suppress(OSError, EOFError):
        pipes.receive(pipe)
    os._exit(1)


def _report_and_exit(pipe: socket.socket, frame: int) -> None:
    """Send the current exception to rank 0 and leave, so as to enter no further collective.

    No clean-up: the group and the device may be in any state, and their exit handlers may wait for
    peers. Closing our sockets is what frees the peers.
    """
    text = traceback.format_exc()[-TRACEBACK_CHARS:]
    try:
        pipes.send(pipe, Message(frame, "error", (time.monotonic(), text)))
    except OSError:  # rank 0 has gone; nobody else can hear it
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _log_to_stderr(rank: int, level: int) -> None:
    """Send this rank's log to stderr, marked r1, r2, ...; stdout belongs to completions."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"r{rank} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
