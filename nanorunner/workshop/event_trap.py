"""The program that asks whether multiprocessing.Event.set() survives the death of its waiter.

It says "killed" when the waiter is dead and calls set(); whoever started it (questions_wire.py)
sees whether it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from multiprocessing.synchronize import Event

from nanorunner.rank_process import process_state
from nanorunner.workshop.leftovers import wait_until

PATIENCE_S = 10.0  # of what takes milliseconds
ABOUT_TO_WAIT = b"w"


def main() -> None:
    """Kill a waiter that sleeps in the Event, say so, and call set()."""
    context = multiprocessing.get_context("fork")
    event = context.Event()
    ours, waiters = os.pipe()
    waiter = context.Process(target=_wait, args=(event, waiters), daemon=True)
    waiter.start()
    assert waiter.pid is not None, "it was started"
    pid = waiter.pid
    os.close(waiters)  # the waiter's copy alone is left, and ends with it
    assert select.select([ours], [], [], PATIENCE_S)[0], "the waiter does not start"
    wait_until(lambda: process_state(pid) == "S", PATIENCE_S, "the waiter to sleep")
    os.kill(pid, signal.SIGKILL)
    waiter.join(PATIENCE_S)
    print("killed", flush=True)
    event.set()


def _wait(event: Event, waiters: int) -> None:
    os.write(waiters, ABOUT_TO_WAIT)  # the next thing that this process sleeps in is the Event
    event.wait(60.0)


if __name__ == "__main__":
    main()
