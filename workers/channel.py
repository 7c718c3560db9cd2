"""The wire from rank 0 to the other ranks: a ring of numbered frames in shared memory, with acks.

A call is `pickle.dumps([method, *args])`. It travels as one frame, or as several when it is larger
than a fragment. launch.py calls write_shm(); loop.py calls read_shm().

    byte 0        64         64 + 64 * r        16 KiB                                      1 MiB
         | sent   | ...      | ack[r], event[r] | frame | frame | frame | ..... free ...... |

    frame, at a multiple of 8 bytes, never wrapped round the end:
         | sequence, 4 bytes | length, 4 bytes, little-endian | length bytes of pickle | padding |
           length 0:  no frame; go on at the start of the ring
           top bit:   more fragments of this call follow

Rank 0 alone writes `sent` (the number of the last whole frame) and the frames; rank r alone writes
its ack. An ack means "rank r has copied the frame out of the ring", not "rank r has run it", so
rank 0 may run several frames ahead and never overwrites one that somebody has still to read. The
number in `sent` is the truth, the event only a hint to look at it. Behind the last rank's event the
header is unused, but for a tap (ack_stamps.py).
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from nanorunner.workers.deadline import RunningClock
from nanorunner.workers.event import EVENT_BYTES, Event, Fence

SEGMENT_BYTES = 1 << 20
HEADER_BYTES = 16384
RANK_BYTES = 64 + EVENT_BYTES  # a cache line for the ack, one for the event
MAX_RANKS = (HEADER_BYTES - 64) // RANK_BYTES  # beside rank 0
FRAGMENT_BYTES = 1 << 18  # a quarter of the ring: two can be in flight while a third is written
HEAD_BYTES = 8
MORE = 1 << 31
SPIN_S = 0.002  # longer than the gap between two steps, short enough to heat no idle machine
ROOM_POLL_S = 0.0001

# frame, method, args, then in bytes: where in its call the frame starts, its own, the whole call's
OnFrame = Callable[[int, str, tuple[Any, ...], int, int, int], None]


class ChannelError(RuntimeError):
    """A call may not be sent, a frame was lost, or a rank no longer reads."""


class Call(NamedTuple):
    """One method call as a rank reads it."""

    frame: int  # the number of its (last) frame
    method: str
    args: tuple[Any, ...]


class Channel:
    """One end of the wire. Rank 0 writes; ranks 1 to tp - 1 read.

    memory: zero-filled shared memory. Owner: rank 0, which creates it before the ranks start; valid
            until the last end is closed.
    methods: the only names that may be sent.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        tp: int,
        methods: frozenset[str],
        spin_s: float = SPIN_S,
    ) -> None:
        if tp - 1 > MAX_RANKS:
            raise ValueError(f"tp {tp}: the wire has room for {MAX_RANKS + 1} ranks")
        self.rank = rank
        self.frame = 0  # the last frame that this end wrote or read; the first is 1
        self._methods = methods
        self._spin_s = spin_s
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._ring = memory[HEADER_BYTES:]
        self._ring_bytes = len(self._ring) // 8 * 8
        self._fragment_bytes = min(FRAGMENT_BYTES, self._ring_bytes // 4 // 8 * 8) - HEAD_BYTES
        self._place = 0  # where in the ring the next frame is written or read
        self._ranks = range(1, tp) if rank == 0 else range(rank, rank + 1)
        self._events = [
            Event(memory[_event_byte(r) :][:EVENT_BYTES], create=rank == 0) for r in self._ranks
        ]
        # rank 0: (number, first byte) of every frame that some rank has not acked, oldest first
        self._unacked: deque[tuple[int, int]] = deque()
        self._poison = ""  # rank 0: why nothing can be sent any more
        self.on_frame: OnFrame | None = None  # rank 0: a tap, told of each frame before it is out
        self.on_ack: Callable[[int], None] | None = None  # a reader that wants to know
        self._seen = 0  # a reader's last look at `sent`, made after it had taken the event
        self._fence = Fence()

    def write_shm(
        self,
        method: str,
        *args: Any,
        timeout_s: float = 10.0,
        check: Callable[[], None] | None = None,
    ) -> int:
        """Put one call on the wire and return its frame number.

        Waits for room while a rank lags, calling check() meanwhile, which may raise. Raises
        ChannelError for a method that is not allowed, and when a rank has not made room within
        timeout_s. After any error nothing was sent and the wire is as before, except when the
        fragments before it were already out: then the wire is closed to further calls.
        """
        if self._poison:
            raise ChannelError(f"{method}: the wire is closed: {self._poison}")
        if method not in self._methods:
            raise ChannelError(f"{method!r} is no method of the wire; {sorted(self._methods)} are")
        # before anything is written: arguments that cannot be pickled leave the wire as it was
        data = memoryview(pickle.dumps([method, *args], protocol=5))
        clock = RunningClock()
        for start in range(0, len(data), self._fragment_bytes):
            fragment = data[start : start + self._fragment_bytes]
            try:
                place = self._wait_for_room(len(fragment), clock, timeout_s, check)
            except BaseException as error:
                if start > 0:  # the ranks hold half a call, and nobody can take it back
                    self._poison = f"{method} stopped after {start} of {len(data)} bytes: {error}"
                raise
            is_last = start + len(fragment) == len(data)
            if self.on_frame is not None:
                self.on_frame(self.frame + 1, method, args, start, len(fragment), len(data))
            self._write_frame(place, fragment, is_last)
        return self.frame

    def wait(self, timeout_s: float) -> bool:
        """Reader: wait for a frame that has not been read; False when none came in timeout_s."""
        deadline = time.monotonic() + timeout_s
        while self._seen == self.frame:
            if not self._events[0].wait(deadline - time.monotonic(), self._spin_s):
                return False
            self._seen = self._words[0]  # only now, after the event: see event.py
        return True

    def read_shm(self, timeout_s: float = 10.0) -> Call:
        """Reader: wait for the next call, copy it out, ack it, and return it unpickled.

        Raises ChannelError when no frame comes within timeout_s (of each other, for a call of
        several), and when the frame found is not the next one.
        """
        fragments: list[bytes] = []
        more = True
        while more:
            if not self.wait(timeout_s):
                raise ChannelError(
                    f"rank {self.rank}: no frame after {self.frame} in {timeout_s:g} s"
                )
            fragment, more = self._read_frame()
            fragments.append(fragment)
        method, *args = pickle.loads(b"".join(fragments))
        return Call(self.frame, method, tuple(args))

    def add_on_ack(self, listener: Callable[[int], None]) -> None:
        """Reader: call listener(frame) right after each ack, after the listeners before it."""
        first = self.on_ack
        if first is None:
            self.on_ack = listener
            return

        def both(frame: int) -> None:
            first(frame)
            listener(frame)

        self.on_ack = both

    def acked(self, rank: int) -> int:
        """Return the number of the last frame that `rank` has copied out."""
        number: int = self._words[_ack_word(rank)]
        return number

    def close(self) -> None:
        """Let the memory go. The last call; a second one does nothing."""
        for event in self._events:
            event.close()
        self._words.release()
        self._ring.release()

    def _wait_for_room(
        self,
        num_bytes: int,
        clock: RunningClock,
        timeout_s: float,
        check: Callable[[], None] | None,
    ) -> int:
        """Return where a frame of num_bytes fits; raise ChannelError naming who lags."""
        frame_bytes = HEAD_BYTES + (num_bytes + 7) // 8 * 8
        while (place := self._find_room(frame_bytes)) is None:
            if check is not None:
                check()
            if clock.elapsed_s() > timeout_s:
                acked = {r: self.acked(r) for r in self._ranks}
                late = [r for r in self._ranks if acked[r] == min(acked.values())]
                raise ChannelError(
                    f"rank(s) {late}: no ack of frame {min(acked.values()) + 1} in {timeout_s:g} s"
                )
            time.sleep(ROOM_POLL_S)
        return place

    def _find_room(self, frame_bytes: int) -> int | None:
        """Return where in the ring frame_bytes fit, or None while unread frames are in the way."""
        acked = min(self.acked(r) for r in self._ranks)
        unacked, here = self._unacked, self._place
        while unacked and unacked[0][0] <= acked:
            unacked.popleft()
        # with nothing unread all is free; a frame is at most a quarter of the ring, so one that
        # does not fit at the end cannot reach the marker there when it is put at the start
        oldest = unacked[0][1] if unacked else -1
        if here >= oldest:
            if self._ring_bytes - here >= frame_bytes:
                return here
            return 0 if not unacked or frame_bytes < oldest else None
        return here if here + frame_bytes < oldest else None

    def _write_frame(self, place: int, fragment: memoryview, is_last: bool) -> None:
        """Write one frame at `place`, number it, and wake the ranks."""
        start, length = self._place, len(fragment)
        if place != start and start < self._ring_bytes:
            struct.pack_into("<II", self._ring, start, 0, 0)  # go on at the start of the ring
        number = self.frame + 1
        struct.pack_into(
            "<II", self._ring, place, number & 0xFFFFFFFF, length if is_last else length | MORE
        )
        self._ring[place + HEAD_BYTES : place + HEAD_BYTES + length] = fragment
        self._unacked.append((number, start))
        self._place = place + HEAD_BYTES + (length + 7) // 8 * 8
        self.frame = number
        self._words[0] = number  # after the bytes and before the events: set() is the barrier
        for event in self._events:
            event.set()

    def _read_frame(self) -> tuple[bytes, bool]:
        """Copy the next frame out and ack it; the flag says that more of its call follows."""
        if self._place == self._ring_bytes:
            self._place = 0
        number, length = struct.unpack_from("<II", self._ring, self._place)
        if length == 0:
            self._place = 0
            number, length = struct.unpack_from("<II", self._ring, 0)
        expected = (self.frame + 1) & 0xFFFFFFFF
        if number != expected:
            raise ChannelError(
                f"rank {self.rank}: frame {number} at byte {self._place} instead of {expected}"
            )
        first, length, more = self._place + HEAD_BYTES, length & ~MORE, bool(length & MORE)
        data = bytes(self._ring[first : first + length])
        self._place = first + (length + 7) // 8 * 8
        self.frame += 1
        self._fence.pass_()  # the copy is complete before rank 0 may see the ack
        self._words[_ack_word(self.rank)] = self.frame
        if self.on_ack is not None:
            self.on_ack(self.frame)
        return data, more


def spin_time_s(tp: int) -> float:
    """Return how long a reader may spin: not at all when the ranks do not have a core each."""
    return SPIN_S if tp <= len(os.sched_getaffinity(0)) else 0.0


def _ack_word(rank: int) -> int:
    return (64 + (rank - 1) * RANK_BYTES) // 8


def _event_byte(rank: int) -> int:
    return 64 + (rank - 1) * RANK_BYTES + 64
