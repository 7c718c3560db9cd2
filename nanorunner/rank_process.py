"""One rank above 0 as rank 0 sees it: how it is started, and what the kernel says of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass


@dataclass
class RankProcess:
    """One rank above 0, as rank 0 sees it. Written by the watcher's thread alone."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: socket.socket
    is_open: bool = True  # until the end of the pipe was read
    is_ready: bool = False
    error: tuple[float, str] | None = None  # (when, traceback)
    ticks_stopped: int = 0


def spawn(rank: int, tp: int, segment_fd: int) -> RankProcess:
    """Start one rank with the user's interpreter; it inherits the segment and one end of a pipe."""
    ours, theirs = socket.socketpair()
    path = [entry or os.getcwd() for entry in sys.path]
    code = (
        f"import sys; sys.path[:] = {path!r}\n"
        "from nanorunner.workers.loop import rank_main\n"
        f"rank_main({rank}, {segment_fd}, {theirs.fileno()}, {os.getpid()})"
    )
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // tp)))
    # inherited blocked, so that a Ctrl-C while the rank's interpreter starts cannot end it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code, f"nanorunner rank {rank} of {tp}"],
                pass_fds=(segment_fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout belongs to completions
                env=environment,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return RankProcess(rank, process, ours)


def name_signal(number: int, is_starter_alive: bool) -> str:
    """Return a signal's name and, for SIGKILL, who may have sent it."""
    name = signal.strsignal(number) or f"signal {number}"
    with contextlib.suppress(ValueError):  # real-time signals have no names
        name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return name
    if not is_starter_alive:  # the kernel kills a rank with the thread that started it
        return f"{name}, because the thread that started it has ended"
    return f"{name} (`kill -9`, or the kernel when memory ran out)"


def process_state(pid: int) -> str:
    """Return the letter that ps shows: R runs, S sleeps, D in a driver, T stopped, Z dead; or ?"""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # the name before it stands in brackets and may itself hold any character
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return "?"
