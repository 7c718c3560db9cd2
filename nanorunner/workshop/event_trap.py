"""The program that asks whether multiprocessing.Event.set() survives the death of its waiter.

It says "killed" when the waiter is dead and calls set(); whoever started it (questions_wire.py)
sees whether it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

SLEEP_S = 0.3  # by then the waiter sleeps in the Event
JOIN_S = 5.0


def main() -> None:
    """Kill a waiter, say so, and call set()."""
    context = multiprocessing.get_context("fork")
    event = context.Event()
    waiter = context.Process(target=event.wait, args=(60.0,), daemon=True)
    waiter.start()
    time.sleep(SLEEP_S)
    assert waiter.pid is not None, "it was started"
    os.kill(waiter.pid, signal.SIGKILL)
    waiter.join(JOIN_S)
    print("killed", flush=True)
    event.set()


if __name__ == "__main__":
    main()
