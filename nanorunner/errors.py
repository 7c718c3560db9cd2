"""The errors of rank 0 that name another rank."""

from __future__ import annotations


class RankDied(RuntimeError):
    """A rank died, raised, or did not answer; the engine is closed, a new one may be started.

    rank, pid: who.  cause: how, in words.  frame, method: the call on the wire, 0 and "" when none.
    acked: the last frame that the rank copied out.  seconds: how long that call had been going on.
    traceback: the rank's own, "" when it left none.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        cause: str,
        *,
        frame: int = 0,
        method: str = "",
        acked: int = 0,
        seconds: float = 0.0,
        traceback: str = "",
    ) -> None:
        self.rank = rank
        self.pid = pid
        self.cause = cause
        self.frame = frame
        self.method = method
        self.acked = acked
        self.seconds = seconds
        self.traceback = traceback
        super().__init__(self._text())

    def copy(self) -> RankDied:
        """Return an equal error to raise: one that was raised twice would grow its traceback."""
        return RankDied(
            self.rank,
            self.pid,
            self.cause,
            frame=self.frame,
            method=self.method,
            acked=self.acked,
            seconds=self.seconds,
            traceback=self.traceback,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (RankDied, (self.rank, self.pid, self.cause), self.__dict__)

    def _text(self) -> str:
        text = f"rank {self.rank} (pid {self.pid}) {self.cause}"
        if self.method:
            text += f", {self.seconds:.1f} s into frame {self.frame} ({self.method})"
        else:
            text += ", with no call on the wire"
        text += f"; it had acked frame {self.acked}" if self.rank > 0 else ""
        return f"{text}\n\n{self.traceback}" if self.traceback else text
