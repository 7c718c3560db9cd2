"""Run one command in a process of its own, with a time limit, and leave nothing of it behind.

    we -- Popen --> launcher: "die with my parent" -- exec --> the command, leader of its own group

Its stdout and stderr go to a file, so that no pipe can fill. When time is up, when we are
interrupted or when the command ends but its children do not, the whole group is killed. When we
are killed (SIGKILL), the kernel kills the command, and a nanorunner's ranks die with its rank 0.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]  # where the package nanorunner lies
POLL_S = 0.05
GRACE_S = 1.0
KILL_LIMIT_S = 10.0  # how long killed processes may take to vanish: GPU memory is given back first
LAUNCHER = (
    "import os, sys\n"
    "from nanorunner.workers.loop import die_with\n"
    "die_with(int(sys.argv[1]))\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class Outcome(NamedTuple):
    """How a command ended."""

    exit_code: int  # negative: the signal that ended it
    seconds: float
    timed_out: bool


def run_fresh(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a command to its end, or until timeout_s have passed, and return how it ended.

    log: gets stdout and stderr. tick() is called about every POLL_S. "python" as the first word is
    this interpreter. Raises whatever tick raises and KeyboardInterrupt, after the group is gone;
    RuntimeError when a killed process does not vanish.
    """
    words = [sys.executable if command[0] == "python" else command[0], *command[1:]]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # a group of its own; Ctrl-C reaches us alone
        )
    timed_out = False
    try:
        while process.poll() is None and not timed_out:
            tick()
            time.sleep(POLL_S)
            # it may have ended in time, and we are the ones who were late to see it
            timed_out = time.monotonic() - start > timeout_s and process.poll() is None
    finally:
        # one that ended by itself may have helpers that are just about to follow it
        end_group(process, grace_s=0.0 if process.poll() is None else GRACE_S)
    return Outcome(process.returncode, time.monotonic() - start, timed_out)


def end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait grace_s for what is left of a leader's group, kill it, return when all of it has gone.

    Raises RuntimeError naming the processes that are still there after KILL_LIMIT_S.
    """
    start = time.monotonic()
    while members := _group_members(process.pid):
        waited = time.monotonic() - start
        if waited > grace_s + KILL_LIMIT_S:
            raise RuntimeError(f"still there {KILL_LIMIT_S:g} s after SIGKILL: {members}")
        if waited >= grace_s:
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                    member.kill()
        process.poll()  # takes the leader's exit code, or it would stay as a zombie
        time.sleep(0.02)
    process.wait(KILL_LIMIT_S)


def _group_members(group: int) -> list[psutil.Process]:
    """Return the live processes of a group, and their children of whatever group."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.update([process, *process.children(recursive=True)])
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue  # ended in between, or another user's
    return list(found)
