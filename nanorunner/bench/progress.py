"""How far a sweep is: a live bar with the time left on a terminal, a line a run elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from nanorunner.bench.journal import Row


class Progress:
    """Counts runs on stderr; stdout belongs to results."""

    def __init__(self, total: int, name: str) -> None:
        self._total = total
        self._num_done = 0
        self._num_failed = 0
        self._start = time.monotonic()
        # smoothing 0: the time left is from the mean of all runs, which differ much
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, desc=name, unit="run", smoothing=0, disable=not is_terminal, leave=True
        )

    def tick(self) -> None:
        """Let the clock of the bar go on while a run runs."""
        if not self._bar.disable:
            self._bar.refresh()

    def done(self, row: Row) -> None:
        """Count a run that has ended."""
        self._num_done += 1
        self._num_failed += row["status"] != "ok"
        if not self._bar.disable:
            if self._num_failed:
                self._bar.set_postfix_str(f"{self._num_failed} failed", refresh=False)
            self._bar.update()
            return
        left = self._total - self._num_done
        left_s = (time.monotonic() - self._start) / self._num_done * left
        settings = " ".join(f"{name}={row['settings'].get(name)}" for name in row["varied"])
        print(
            f"nanorunner: [{self._num_done}/{self._total}] {settings} repeat {row['repeat']}: "
            f"{row['status']} in {row['seconds']:.1f} s; about {left_s:.0f} s left",
            file=sys.stderr,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
