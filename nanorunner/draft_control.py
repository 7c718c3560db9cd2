"""Whether drafts pay: each step is a plain one or has K drafts a request, whichever is faster.

    query_len(num_decodes)    before a step: 1, or q = 1 + K
    step_read(...)            after its output: the time since the output before -> observe(...)

A bucket of batch sizes (1, 2, 3-4, 5-8, ...) measures both ways for itself: seconds a step, and ids
that a request gets from a step. Ids a second decide, as measured in pure decode steps, whatever a
step's time consists of. Each figure has two averages: a slow one that can tell a few percent apart,
and a fast one that sees a sudden change within some tens of steps.

The way not taken is probed, for PROBE_STEPS to LONGEST_PROBE measured steps, until the answer is
clear. What all this costs, against always taking the faster way:

    probes      the next one waits until the last is at most 1 / SHARE of the steps (so 98.4 % of a
                gain stay) and what it lost at most COST of the time: at most 1 % of the time. Say
                a verify step takes three plain ones and brings nothing: a probe of 11 steps, those
                in flight included, loses the time of 22, so 2,200 plain steps follow.
    hysteresis  a way that is less than MARGIN better is not taken: at most 1.5 % of the time
    the start   FIRST_STEPS with drafts, and the first probe: in that example 16 * 2 = 32 steps'
                time, once in a bucket; 0.6 % of 5,000 steps

Under a load whose prompts leave no two pure decode steps beside each other nothing can be measured;
then, after LONGEST_UNSEEN steps, there are no drafts until something can.

Time and acceptance are noisy, so a change must be clear beyond its standard error as well.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

FIRST_STEPS = 16  # before a bucket's first probe
PROBE_STEPS = 8  # measured before anything is concluded
LONGEST_PROBE = 64
SHARE = 64
COST = 0.01
MARGIN = 0.015  # of the logarithm of ids a second
CLEAR = 2.0  # standard errors, between slow averages
SUDDEN = 3.0  # the same against a fast average, which varies more and is looked at as often
DOUBT = 4.0  # a change that is less clear than this is looked at again soon
RECHECK_STEPS = 256
LONGEST_UNSEEN = 256
KNOWN = 0.08  # relative standard error with which the way taken can be compared
SLOW, FAST = 1 - 1 / 512, 1 - 1 / 32  # what an average keeps of its past at each step
LONGEST_STEP = 3.0  # times the mean; longer is a pause of the caller, and counts as this much

logger = logging.getLogger("nanorunner")


class DraftController:
    """The choice for every batch size. Owner: the scheduler. clock: seconds that never go back."""

    def __init__(
        self, num_speculative_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens {num_speculative_tokens}: use at least 1")
        self._query_len = 1 + num_speculative_tokens
        self._clock = clock
        self._buckets: dict[int, Bucket] = {}  # by the exponent of the largest batch size
        # The last output, if it was of a pure decode step.
        self._read_step = -1
        self._read_query_len = 0
        self._read_s = 0.0

    def query_len(self, num_decodes: int) -> int:
        """How many rows each decode of the next step should have; asked once for each step."""
        return self._query_len if self._bucket(num_decodes).next_is_drafting() else 1

    def step_read(self, step_id: int, num_decodes: int, query_len: int, num_new_ids: int) -> None:
        """Note that a step's output has come, each step's in turn.

        num_decodes: 0 for a step with prompts in it, whose time says nothing of decoding.
        num_new_ids: those of use; what came for requests that had ended is not.
        """
        now_s = self._clock()
        # The first step after a change is left out: what is in flight beside it is of the other
        # kind, and so are the caches.
        is_next = step_id == self._read_step + 1 and query_len == self._read_query_len
        if num_decodes and is_next:
            self.observe(num_decodes, query_len, now_s - self._read_s, num_new_ids)
        self._read_step, self._read_s = step_id, now_s
        self._read_query_len = query_len if num_decodes else 0

    def observe(self, num_decodes: int, query_len: int, seconds: float, num_new_ids: int) -> None:
        """Take in how long a pure decode step took and how many ids it brought."""
        if num_new_ids > 0 and seconds > 0:  # else all its requests had ended before it was read
            bucket = self._bucket(num_decodes)
            bucket.observe(query_len > 1, seconds, num_new_ids / num_decodes)

    def _bucket(self, num_decodes: int) -> Bucket:
        exponent = (num_decodes - 1).bit_length()
        bucket = self._buckets.get(exponent)
        if bucket is None:
            # It begins as the nearest one does by now; the very first with drafts.
            nearest = min(self._buckets, key=lambda other: abs(other - exponent), default=None)
            is_drafting = nearest is None or self._buckets[nearest].is_drafting
            bucket = self._buckets[exponent] = Bucket(exponent, self._query_len - 1, is_drafting)
        return bucket


class Bucket:
    """The choice for batch sizes of one power of two, above the one before it."""

    def __init__(self, exponent: int, num_drafts: int, is_drafting: bool) -> None:
        self.is_drafting = is_drafting  # the way taken
        self.is_probing = False  # the other one just now
        largest = 1 << exponent
        self._name = f"{largest // 2 + 1} to {largest}" if exponent > 1 else str(largest)
        self._num_drafts = num_drafts
        self._ways = (Way(), Way())  # plain, drafting
        self._steps_to_probe = FIRST_STEPS
        self._probe_steps = 0  # scheduled in this probe
        self._unseen_steps = 0  # scheduled since one was measured
        self._has_said_unseen = False

    @property
    def _current(self) -> Way:
        return self._ways[self.is_drafting]

    @property
    def _other(self) -> Way:
        return self._ways[not self.is_drafting]

    def next_is_drafting(self) -> bool:
        """Choose for the next step, which may be one of a probe."""
        self._unseen_steps += 1
        if self._unseen_steps > LONGEST_UNSEEN:
            self._say_unseen()
            return False
        if self.is_probing:
            self._probe_steps += 1
            # Its steps may be measured late or, with prompts among them, never.
            if self._probe_steps > 2 * LONGEST_PROBE:
                self._end_probe()
        else:
            self._steps_to_probe -= 1
            if self._steps_to_probe < 0 and self._current.is_known():
                self.is_probing, self._probe_steps = True, 1
                self._other.forget()
        return self.is_drafting != self.is_probing

    def observe(self, is_drafting: bool, seconds: float, ids: float) -> None:
        """Take in a step, ids: of a request in the mean; then judge."""
        self._unseen_steps = 0
        self._ways[is_drafting].add(seconds, ids)
        if min(way.num_steps for way in self._ways) < PROBE_STEPS:
            return
        gain, error = self._gain(is_fast=False)
        if self.is_probing:
            is_long = self._other.num_steps >= LONGEST_PROBE
            if gain > MARGIN and (is_long or gain > CLEAR * error):
                self._switch(gain > DOUBT * error)
            elif is_long or gain + CLEAR * error < MARGIN:
                self._end_probe()
        elif gain > max(MARGIN, CLEAR * error):
            self._switch_back()
        else:
            gain, error = self._gain(is_fast=True)
            if gain > max(MARGIN, SUDDEN * error):
                self._current.trust_the_fast()
                self._switch_back()

    def _say_unseen(self) -> None:
        if not self._has_said_unseen:
            self._has_said_unseen = True
            logger.info(
                "speculation for batches of %s: off while steps without prompts are too rare to "
                "measure what it brings",
                self._name,
            )

    def _gain(self, *, is_fast: bool) -> tuple[float, float]:
        """Return by how much the other way is better, of the logarithm, and the standard error."""
        rate, variance = self._current.rate(is_fast=is_fast)
        other_rate, other_variance = self._other.rate(is_fast=False)
        return math.log(other_rate / rate), math.sqrt(variance + other_variance)

    def _end_probe(self) -> None:
        """Stay, and let the next probe wait until this one has been paid for."""
        self.is_probing = False
        self._steps_to_probe = SHARE * self._probe_steps
        if self._other.num_steps and self._current.num_steps:
            rate, _ = self._current.rate(is_fast=False)
            lost_s = self._other.total_s - self._other.total_ids / rate
            paid_after = int(lost_s / COST / self._current.mean_s)
            self._steps_to_probe = max(self._steps_to_probe, paid_after)

    def _switch(self, is_clear: bool) -> None:
        """Take the other way from now on."""
        rates = [way.rate(is_fast=False)[0] for way in self._ways]
        self.is_drafting = not self.is_drafting
        self.is_probing = False
        self._steps_to_probe = SHARE * PROBE_STEPS if is_clear else RECHECK_STEPS
        logger.info(
            "speculation for batches of %s: %s; a request had %.1f ids/s with %d drafts, %.1f "
            "without",
            *(self._name, "on" if self.is_drafting else "off"),
            *(rates[True], self._num_drafts, rates[False]),
        )

    def _switch_back(self) -> None:
        """Take the other way for what is remembered of it; what it does now is measured anew."""
        self._switch(is_clear=False)
        self._current.forget()


class Way:
    """What was measured of one way since it was last forgotten."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.num_steps = 0
        self.total_s = self.total_ids = 0.0
        self._seconds = Average(SLOW), Average(FAST)
        self._ids = Average(SLOW), Average(FAST)

    @property
    def mean_s(self) -> float:
        """Seconds of a step."""
        return self._seconds[0].mean

    def is_known(self) -> bool:
        """Whether there is enough to compare a probe with."""
        if self.num_steps < PROBE_STEPS:
            return False
        _, variance = self.rate(is_fast=False)
        return variance < KNOWN**2 or self.num_steps >= LONGEST_PROBE

    def add(self, seconds: float, ids: float) -> None:
        """Take in a step and how many ids a request got from it."""
        if self.num_steps >= PROBE_STEPS:
            seconds = min(seconds, LONGEST_STEP * self.mean_s)
        self.num_steps += 1
        self.total_s += seconds
        self.total_ids += ids
        for seconds_average, ids_average in zip(self._seconds, self._ids, strict=True):
            seconds_average.add(seconds)
            ids_average.add(ids)

    def rate(self, *, is_fast: bool) -> tuple[float, float]:
        """Return the ids a second of a request, and the variance of its logarithm."""
        ids, seconds = self._ids[is_fast], self._seconds[is_fast]
        return ids.mean / seconds.mean, ids.relative_variance() + seconds.relative_variance()

    def trust_the_fast(self) -> None:
        """Let the slow averages be as the fast ones are: what was before has changed."""
        for slow, fast in (self._seconds, self._ids):
            slow.become(fast)


class Average:
    """The mean of a series that forgets its past, and how sure that mean is."""

    def __init__(self, keep: float) -> None:
        self.mean = 0.0
        self._keep = keep
        self._weight = self._weight_of_squares = self._spread = 0.0

    def add(self, value: float) -> None:
        """Take in the newest value."""
        keep = self._keep
        self._weight = self._weight * keep + 1
        self._weight_of_squares = self._weight_of_squares * keep * keep + 1
        difference = value - self.mean
        self.mean += difference / self._weight
        self._spread = self._spread * keep + difference * (value - self.mean)

    def relative_variance(self) -> float:
        """The square of the mean's standard error, as a share of the mean's square."""
        num_values = self._weight**2 / self._weight_of_squares  # as if all had the same weight
        return self._spread / self._weight / max(num_values - 1, 1) / self.mean**2

    def become(self, other: Average) -> None:
        """Take over what another one knows."""
        self.mean, self._weight = other.mean, other._weight
        self._weight_of_squares, self._spread = other._weight_of_squares, other._spread
