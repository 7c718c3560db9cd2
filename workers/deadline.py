"""A clock that leaves out the time during which this process did not run.

Ctrl-Z stops rank 0 and every other rank together, and a laptop's lid stops the machine: neither may
count towards a step's timeout, or `fg` would find the engine dead.
"""

from __future__ import annotations

import time

LONGEST_TICK_S = 1.0  # whoever polls does so more often; a longer gap means it did not run


class RunningClock:
    """Seconds since it was made, each gap between two looks counted as LONGEST_TICK_S at most."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._elapsed_s = 0.0

    def elapsed_s(self) -> float:
        """Return the seconds counted so far; call it at least once per LONGEST_TICK_S."""
        now = time.monotonic()
        self._elapsed_s += min(now - self._last, LONGEST_TICK_S)
        self._last = now
        return self._elapsed_s
