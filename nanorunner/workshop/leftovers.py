"""What a run may leave behind: processes with its mark, names in /dev/shm.

The fault lab and scripts/soak_kill.py put a variable into the environment of what they start; every
process below inherits it, so an orphan is found as well as a child. tests/conftest.py asks here
for the names, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SHARED_MEMORY = Path("/dev/shm")
# How names of ours, of multiprocessing and of torch begin there.
OUR_NAMES = ("nanorunner", "sem.mp-", "psm_", "torch_")
POLL_S = 0.01


def marked_pids(variable: str, value: str) -> set[int]:
    """Return the live processes that were started with variable=value, at any depth."""
    pids = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(variable) == value:
                pids.add(process.pid)
    return pids


def rank_pid(pids: set[int], rank: int) -> int:
    """Return which of these processes is a rank, 0 when none is (yet)."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if f"nanorunner rank {rank} of" in " ".join(psutil.Process(pid).cmdline()):
                return pid
    return 0


def shared_names() -> set[str]:
    """Return the names in /dev/shm that an engine of this user could have left."""
    if not SHARED_MEMORY.is_dir():
        return set()
    names = set()
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if path.name.startswith(OUR_NAMES) and path.lstat().st_uid == os.getuid():
                names.add(path.name)
    return names


def wait_until(is_true: Callable[[], Any], limit_s: float, what: str) -> float:
    """Wait for is_true() and return after how many seconds it was; TimeoutError after limit_s.

    When time is up it looks once more: on a busy machine this process itself may have stood still.
    """
    start = time.monotonic()
    is_late = False
    while not is_true():
        if is_late:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(POLL_S)
        is_late = time.monotonic() - start > limit_s
    return time.monotonic() - start
