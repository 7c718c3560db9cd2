"""When requests arrive: at once, at random, evenly, in bursts, as others end, or as recorded.

    all       every request at 0
    poisson   gaps exponential with mean 1 / rate
    constant  one every 1 / rate
    burst     gaps gamma-distributed with shape `burstiness` and mean 1 / rate, as vLLM's flag of
              that name: below 1 they come in bursts, 1 is Poisson, above 1 more evenly
    closed    `concurrency` requests at 0, then one at each moment when another ends
    trace     at the times of a file, divided by `speed`

The first request is due at 0. A random schedule is not stretched to its rate: offered_per_s says
what it came to. One seed gives the same times in every repeat and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random
from typing import Any

from nanorunner.did_you_mean import did_you_mean

KINDS = ("all", "poisson", "constant", "burst", "closed", "trace")
WITH_RATE = ("poisson", "constant", "burst")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The schedule of one pass.

    due_s: when requests are due, ascending, in the workload's order. In a closed loop only the
    first `concurrency` are known; each later one is due when another request ends.
    """

    kind: str
    due_s: tuple[float, ...]
    rate_per_s: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    speed: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the end of one request is what brings the next."""
        return self.kind == "closed"

    def describe(self) -> dict[str, Any]:
        """Return what a result says of it."""
        given = {
            "rate_per_s": self.rate_per_s,
            "burstiness": self.burstiness,
            "concurrency": self.concurrency,
            "speed": self.speed,
        }
        about: dict[str, Any] = {"kind": self.kind}
        about |= {name: value for name, value in given.items() if value is not None}
        if not self.is_closed and self.due_s[-1] > 0:
            about["offered_per_s"] = (len(self.due_s) - 1) / self.due_s[-1]
        return about


def all_at_once(num_requests: int) -> Arrivals:
    """Return the schedule of an offline batch."""
    return Arrivals(kind="all", due_s=(0.0,) * num_requests)


def open_loop(
    kind: str, num_requests: int, rate_per_s: float, seed: int, burstiness: float = 1.0
) -> Arrivals:
    """Return a schedule of WITH_RATE; ValueError for a rate or a burstiness that has none."""
    if kind not in WITH_RATE:
        raise ValueError(f"arrivals {kind!r}: {did_you_mean(kind, WITH_RATE)}")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ValueError(f"rate {rate_per_s}: use requests per second above 0, or --arrivals all")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ValueError(f"burstiness {burstiness}: use a number above 0; 1 is Poisson")
    random = Random(f"arrivals {seed}")  # a stream of its own, whatever the prompts drew
    gap_s = 1 / rate_per_s
    if kind == "constant":
        gaps = [gap_s] * (num_requests - 1)
    else:
        shape = burstiness if kind == "burst" else 1.0
        gaps = [random.gammavariate(shape, gap_s / shape) for _ in range(num_requests - 1)]
    return Arrivals(
        kind=kind,
        due_s=tuple(accumulate(gaps, initial=0.0)),
        rate_per_s=rate_per_s,
        burstiness=burstiness if kind == "burst" else None,
    )


def closed_loop(num_requests: int, concurrency: int) -> Arrivals:
    """Return a schedule that keeps `concurrency` requests in the engine."""
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency}: use 1 or more")
    due_s = (0.0,) * min(concurrency, num_requests)
    return Arrivals(kind="closed", due_s=due_s, concurrency=concurrency)


def replay(times_s: Sequence[float], speed: float = 1.0) -> Arrivals:
    """Return a recorded schedule, its first time moved to 0; ValueError when times go back."""
    if not (math.isfinite(speed) and speed > 0):
        raise ValueError(f"speed {speed}: use a number above 0; 2 replays in half the time")
    for index, (before, time_s) in enumerate(pairwise(times_s), start=1):
        if time_s < before:
            raise ValueError(
                f"trace: request {index} comes at {time_s:g} s, before request {index - 1} at "
                f"{before:g} s; sort the file by time"
            )
    due_s = tuple((time_s - times_s[0]) / speed for time_s in times_s)
    return Arrivals(kind="trace", due_s=due_s, speed=speed)
