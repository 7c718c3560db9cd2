"""What one fault of the lab did, what was seen, how long it took, and whether that is right."""

from __future__ import annotations

import json
from collections.abc import Callable


def _print(text: str) -> None:
    print(text, flush=True)


class FaultReport:
    """Collects lines and prints each as it comes, so that whoever watches sees it happen."""

    def __init__(self, name: str, say: Callable[[str], None] = _print) -> None:
        self.name = name
        self.done: list[str] = []
        self.seen: list[str] = []
        self.wrong: list[str] = []  # what did not come as it must
        self.seconds = 0.0  # from the fault to the moment when it was seen
        self._say = say

    def did(self, text: str) -> None:
        """Say what was done."""
        self.done.append(text)
        self._say(f"  done  {text}")

    def saw(self, text: str) -> None:
        """Say what was seen."""
        self.seen.append(text)
        self._say(f"  seen  {text}")

    def took(self, seconds: float, limit_s: float, what: str) -> None:
        """Say how long it took; longer than limit_s is wrong."""
        self.seconds = seconds
        self._say(f"  took  {seconds:.2f} s {what} (at most {limit_s:g} s)")
        self.must(seconds <= limit_s, f"it took more than {limit_s:g} s")

    def left(self, what: list[str]) -> None:
        """Say what is left of it all; anything is wrong."""
        self._say(f"  left  {', '.join(what) or 'no process, nothing in /dev/shm'}")
        self.must(not what, "something is left")

    def must(self, is_so: bool, otherwise: str) -> None:
        """Check something that must hold; `otherwise` says what is wrong when it does not."""
        if not is_so:
            self.wrong.append(otherwise)
            self._say(f"  WRONG {otherwise}")

    def end(self, seconds: float) -> None:
        """Say how it went, all in all."""
        how = "NOT as it must be" if self.wrong else "as it must be"
        self._say(f"  so    {how}; {seconds:.1f} s in all")

    def as_json(self) -> str:
        """Return the report as one line."""
        return json.dumps(
            {
                "fault": self.name,
                "good": not self.wrong,
                "seconds": round(self.seconds, 3),
                "done": self.done,
                "seen": self.seen,
                "wrong": self.wrong,
            }
        )
