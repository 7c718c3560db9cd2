"""Faults of processes: a rank killed, stopped or out of memory; rank 0 killed; leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from nanorunner import doctor
from nanorunner.errors import RankDied
from nanorunner.exit_codes import RANK_DIED
from nanorunner.rank_process import process_state
from nanorunner.segment import PREFIX
from nanorunner.workshop.fault_lab import Lab
from nanorunner.workshop.leftovers import SHARED_MEMORY, wait_until

DETECTION_S = 5.0  # the promise: a dead rank is named, and every rank has gone, within this
WORK_S = 60.0  # of what nobody promises and takes a second: longer on a busy machine, not for ever
START_S = 60.0  # of new ranks, PyTorch included where the lab is full
STOPPED_S = 8.0  # longest time that a rank is kept stopped, should nobody notice
OLD_S = 3600.0
VICTIM = 1
GONE = "?Z"  # states of a process that has ended; its new parent may not have heard of it yet


def kill_idle(lab: Lab) -> None:
    """SIGKILL rank 1 while no call is on the wire."""
    ranks = lab.start(2)
    pid = lab.pid_of_rank(VICTIM)
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    lab.report.did(f"sent SIGKILL to rank 1 (pid {pid}); no call is on the wire")
    died = _wait_for_death(ranks.check)
    lab.report.saw(f"RankDied: {died}")
    lab.report.took(time.monotonic() - start, DETECTION_S, "from the kill to the report")
    lab.report.must((died.rank, died.pid) == (VICTIM, pid), "another rank is blamed")
    lab.report.must("SIGKILL" in died.cause, "the signal is not named")


def stop(lab: Lab) -> None:
    """SIGSTOP rank 1 until rank 0 has noticed, then let it go on."""
    ranks = lab.start(2)
    pid = lab.pid_of_rank(VICTIM)
    noticed: list[float] = []

    def let_it_go_on() -> None:
        try:
            noticed.append(wait_until(lambda: lab.logged("is stopped"), STOPPED_S, "a warning"))
        except TimeoutError:
            noticed.append(STOPPED_S)
        with contextlib.suppress(ProcessLookupError):  # it may have been killed as stopped too long
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(target=let_it_go_on)
    thread.start()
    lab.report.did(f"sent SIGSTOP to rank 1 (pid {pid}) and made a call that needs its answer")
    answers = ranks.call_all("echo", b"hello")
    thread.join(STOPPED_S)
    lab.report.saw(f"warning: {lab.logged('is stopped') or 'none'}")
    wait_until(lambda: lab.logged("goes on"), WORK_S, "the warning's end")
    lab.report.saw(f"after SIGCONT: {lab.logged('goes on')}; the call returned")
    lab.report.took(noticed[0], DETECTION_S, "from the stop to the warning")
    lab.report.must(len(answers) == 2, "the call did not come back whole")
    lab.report.must(bool(lab.logged("is stopped")), "nobody noticed")


def oom(lab: Lab) -> None:
    """Rank 1 raises MemoryError inside a call."""
    ranks = lab.start(2)
    ranks.call_all("sabotage", VICTIM, "raise", 0.0)
    lab.report.did("told rank 1 to raise MemoryError in its next call; made that call")
    start = time.monotonic()
    try:
        ranks.call_all("echo", b"")
    except RankDied as died:
        seconds = time.monotonic() - start
        lab.report.saw(f"RankDied: {str(died).partition(chr(10))[0]}")
        lab.report.saw(f"its traceback ends: {died.traceback.strip().splitlines()[-1]}")
        lab.report.saw(f"the command line would leave with exit code {RANK_DIED}")
        lab.report.took(seconds, DETECTION_S, "from the call to the report")
        lab.report.must(died.rank == VICTIM, "another rank is blamed")
        lab.report.must("MemoryError" in died.traceback, "its own traceback is missing")
        lab.report.must((died.method, died.frame > 0) == ("echo", True), "the call is not named")
    else:
        lab.report.must(False, "no error came")


def orphan(lab: Lab) -> None:
    """SIGKILL rank 0, a process of its own here; its ranks must leave."""
    program = subprocess.Popen(
        [sys.executable, "-m", "nanorunner.workshop.fault_orphan", str(int(lab.is_full))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert program.stdout is not None
        line = program.stdout.readline()  # it gives up by itself, so this ends
        lab.report.must(bool(line), "the program did not start")
        ranks = json.loads(line or "[]")
        lab.report.did(f"started a program: rank 0 is pid {program.pid}, the others {ranks}")
        program.kill()
        lab.report.did("sent SIGKILL to rank 0")
        # these alone: to search all processes for the lab's mark takes a busy machine seconds
        seconds = wait_until(
            lambda: all(process_state(pid) in GONE for pid in ranks),
            DETECTION_S,
            "the ranks to leave",
        )
        lab.report.saw(
            "every rank has left: the kernel ended them with the thread that had started them"
        )
        lab.report.took(seconds, DETECTION_S, "from the kill to the last rank's end")
    finally:
        program.kill()
        program.wait(WORK_S)
        if program.stdout is not None:
            program.stdout.close()


def leftover(lab: Lab) -> None:
    """Leave a segment's name as a crash would: doctor reports it, the next start removes it."""
    old, young = (SHARED_MEMORY / f"{PREFIX}{secrets.token_hex(16)}" for _ in range(2))
    try:
        for path in (old, young):
            path.write_bytes(bytes(8))
        long_ago = time.time() - OLD_S
        os.utime(old, (long_ago, long_ago))
        lab.report.did(f"left two names in {SHARED_MEMORY}, one of them as old as an hour")
        facts = " | ".join(fact.text for fact in doctor.shared_memory_facts())
        lab.report.saw(f"doctor: {facts}")
        lab.report.must(old.name in facts, "doctor does not report it")
        start = time.monotonic()
        answers = lab.start(2).call_all("echo", b"")
        lab.report.took(time.monotonic() - start, START_S, "to start again")
        lab.report.saw(f"warning: {lab.logged('removed') or 'none'}")
        lab.report.must(not old.exists(), "the old name is still there")
        lab.report.must(young.exists(), "a start that may be under way has lost its segment")
        lab.report.must(len(answers) == 2, "the new ranks do not answer")
        lab.report.saw("the young name was left alone: it could be a start that is under way")
    finally:
        for path in (old, young):
            path.unlink(missing_ok=True)


def _wait_for_death(check: Callable[[], None]) -> RankDied:
    """Call check() until it raises RankDied, and return that; TimeoutError after DETECTION_S."""
    caught: list[RankDied] = []

    def has_died() -> bool:
        try:
            check()
        except RankDied as died:
            caught.append(died)
        return bool(caught)

    wait_until(has_died, DETECTION_S, "the report of a dead rank")
    return caught[0]
