"""When each rank acked which frame: notes that the ranks leave for a tap in the wire's header.

    loop.py: channel.on_ack -> AckStamps.write()          nanorunner/tap.py -> AckStamps.read()

    the header's bytes behind the last rank's event, one part a rank:
         | number, ns | number, ns | ......... |          frame f is in place f % num_places

These bytes are the wire's own and lie unused without a tap (RunnerConfig.tap). Rank r alone writes
its part; rank 0 reads.

A stamp is the rank's perf_counter_ns right after it has stored its ack, the moment of the span
`ack` too. On Linux that clock is one for all processes of a machine. So an ack could be seen a
little before its stamp says, by the time from one line of Python to the next: about 1 us, or until
the rank is given its core back when the kernel takes it away right there.
"""

from __future__ import annotations

import time

from nanorunner.workers.channel import HEADER_BYTES, RANK_BYTES
from nanorunner.workers.event import Fence

SENT_BYTES = 64  # of the header, before the first rank's ack
PLACE_BYTES = 16
# A rank acks at most the frames that are unread, and rank 0 looks at every send: few are enough.
MIN_PLACES = 8
MAX_TP = (HEADER_BYTES - SENT_BYTES) // (RANK_BYTES + MIN_PLACES * PLACE_BYTES) + 1
LOST = -1


class AckStamps:
    """The stamps of every rank.

    memory: the wire's. Owner: rank 0. Lifetime: until close(), which must come before the segment's
    own. Last writer of a rank's part: that rank.
    """

    def __init__(self, memory: memoryview, tp: int) -> None:
        """Raise ValueError when the header has no room for so many ranks."""
        if tp > MAX_TP:
            raise ValueError(
                f"tap: the wire's header has room for the acks of {MAX_TP} ranks; use tp {MAX_TP} "
                f"or fewer, or no tap"
            )
        first = SENT_BYTES + (tp - 1) * RANK_BYTES
        self.num_places = (HEADER_BYTES - first) // (tp - 1) // PLACE_BYTES
        self._words = memory[first:HEADER_BYTES].cast("Q")
        self._fence = Fence()

    def write(self, rank: int, frame: int) -> None:
        """Note that `rank`, which calls this, has just acked a frame."""
        now = time.perf_counter_ns()
        words, place = self._words, self._place(rank, frame)
        words[place] = 0  # first: who reads meanwhile must not take the new time for the old frame
        self._fence.pass_()
        words[place + 1] = now
        self._fence.pass_()
        words[place] = frame

    def read(self, rank: int, frame: int) -> int | None:
        """Return when `rank` acked a frame, in ns; None if it has not yet.

        LOST when it has, and the stamp of a later frame stands there, or is just being written.
        """
        words, place = self._words, self._place(rank, frame)
        if (number := words[place]) != frame:
            return LOST if number > frame else None
        self._fence.pass_()
        stamp: int = words[place + 1]
        self._fence.pass_()
        return stamp if words[place] == frame else LOST

    def close(self) -> None:
        """Let the memory go. A second call does nothing."""
        self._words.release()

    def _place(self, rank: int, frame: int) -> int:
        """Return the first word of a frame's place in a rank's part."""
        return 2 * ((rank - 1) * self.num_places + frame % self.num_places)
