"""The GPU's clock, read by timing events, and its place on the CPU's.

    event ... event ... event        each so many ms after a reference event: the GPU's time
       |                  |
    anchor             anchor        moments at which both clocks were read

An event tells only its distance from another one, in float32 milliseconds, which are exact to less
than 0.1 us within a second. So the reference follows along; the GPU's own time is a sum of
distances, and the anchors correct what that sum and the two clocks' different rates make of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

NS_A_MS = 1e6
FOLLOW_NS = 500_000_000  # float32 milliseconds below 512 are exact to 31 ns
NUM_TRIES = 4  # of which the quickest counts: an interrupt may hit any of them
ANCHOR_TIMEOUT_NS = 1_000_000_000
MAX_ANCHORS = 8192  # of one a second at most: the last two hours


class TimingEvent(Protocol):
    """What is asked of torch.cuda.Event(enable_timing=True)."""

    def record(self) -> None:
        """Put the event behind all that is enqueued on the current stream."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def elapsed_time(self, end_event: TimingEvent) -> float:
        """Return the milliseconds from this event to another one; both have been passed."""


class Anchor(NamedTuple):
    """One moment on both clocks."""

    gpu_ns: int
    host_ns: int
    plus_minus_ns: int  # the event ran at some time within this


class GpuClock:
    """The time of one GPU's events in ns since the first anchor."""

    def __init__(
        self,
        new_event: Callable[[], TimingEvent],
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.anchors: deque[Anchor] = deque(maxlen=MAX_ANCHORS)
        self.now = now
        self._new_event = new_event
        self._reference: TimingEvent | None = None
        self._reference_ns = 0.0

    def ns_of(self, event: TimingEvent) -> float:
        """Return when the GPU passed an event, which it has."""
        if self._reference is None:
            self._reference = event
        return self._reference_ns + self._reference.elapsed_time(event) * NS_A_MS

    def follow(self, event: TimingEvent) -> bool:
        """Make an event the reference if the present one is old; True: it must not be used again.

        The GPU has passed it.
        """
        at_ns = self.ns_of(event)
        if at_ns - self._reference_ns < FOLLOW_NS:
            return False
        self._reference, self._reference_ns = event, at_ns
        return True

    def anchor(self) -> bool:
        """Read both clocks, while nothing is enqueued on the GPU; return whether it answered."""
        best: tuple[int, int, TimingEvent] | None = None
        for _ in range(NUM_TRIES):
            event = self._new_event()
            before = self.now()
            event.record()
            while not event.query():
                if self.now() - before > ANCHOR_TIMEOUT_NS:
                    return False
            after = self.now()
            if best is None or after - before < best[1] - best[0]:
                best = before, after, event
        assert best is not None, "there is more than one try"
        before, after, event = best
        gpu_ns = self.ns_of(event)
        self.anchors.append(Anchor(int(gpu_ns), (before + after) // 2, (after - before) // 2))
        self._reference, self._reference_ns = event, gpu_ns
        return True

    def to_host(self, gpu_ns: Int64) -> Int64:
        """Return times of the GPU's clock as times of the CPU's.

        Between two anchors in proportion, outside of them at the GPU's own rate.
        """
        if not gpu_ns.size:
            return gpu_ns
        gpu, host, _ = np.array(self.anchors, np.int64).T
        # the small part of the offset alone goes through floating point
        offset = np.interp(gpu_ns, gpu, (host - gpu) - (host[0] - gpu[0]))
        on_host: Int64 = gpu_ns + (host[0] - gpu[0]) + np.rint(offset).astype(np.int64)
        return on_host
