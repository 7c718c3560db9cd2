"""One pass: requests go to the engine when they are due, and every id is stamped as it comes out.

    due (arrivals.py) -> engine.add_request -> engine.step() -> ids, each with the time at which
                                                                step() had returned it

One process, one thread: between two steps the driver hands over whatever has become due, so a
request may wait up to one step for its hand-over. That wait counts: TTFT begins at its due time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from nanorunner.bench.arrivals import Arrivals
from nanorunner.bench.metrics import RequestRecord
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams

NAP_S = 0.05  # longest single sleep: Ctrl-C and the time limit are looked at this often


class Serving(Protocol):
    """What the driver needs of an engine."""

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request and return its id."""

    def step(self) -> Sequence[RequestUpdate]:
        """Run a step and return what it brought."""

    def has_unfinished(self) -> bool:
        """Whether step() has anything left to do."""

    def abort_all(self) -> None:
        """End every request."""


class Request(NamedTuple):
    """A prompt and how to continue it."""

    prompt_ids: list[int]
    params: SamplingParams


class PassRecord(NamedTuple):
    """What one pass brought."""

    requests: list[RequestRecord]  # in the workload's order
    duration_s: float  # from the start to the last id, skipped idle time included
    skipped_idle_s: float


class Clock:
    """The pass's time in seconds, 0 at its start. Idle waits are real up to max_idle_s each.

    What is left of a longer one is skipped: the clock is set forward and nobody sleeps. So a trace
    with hours of silence ends, and no request sees a difference.
    """

    def __init__(
        self,
        max_idle_s: float,
        read: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.skipped_s = 0.0
        self._max_idle_s = max_idle_s
        self._read = read
        self._sleep = sleep
        self._start = read()

    def now(self) -> float:
        """Return the time."""
        return self._read() - self._start + self.skipped_s

    def wait_until(self, due_s: float) -> None:
        """Return at due_s, after at most max_idle_s of real sleep; for an idle engine alone."""
        begin = self.now()
        awake_s = min(due_s, begin + self._max_idle_s)
        while (left := awake_s - self.now()) > 0:
            self._sleep(min(left, NAP_S))
        self.skipped_s += max(0.0, due_s - self.now())


def run_pass(
    engine: Serving,
    requests: Sequence[Request],
    arrivals: Arrivals,
    clock: Clock,
    time_limit_s: float,
) -> PassRecord:
    """Serve every request once and return what the caller saw. The engine is idle then.

    Raises TimeoutError, with every request aborted, when the pass takes more real time.
    """
    records = [RequestRecord(len(request.prompt_ids)) for request in requests]
    live: dict[int, RequestRecord] = {}
    due_s = deque(arrivals.due_s)
    end_s, index, num_ended = 0.0, 0, 0
    while num_ended < len(records):
        now_s = clock.now()
        while due_s and index < len(records) and due_s[0] <= now_s:
            record = records[index]
            live[engine.add_request(*requests[index])] = record
            record.arrival_s, record.handover_s = due_s.popleft(), clock.now()
            index += 1
        if not live:
            assert due_s, "nothing runs, nothing is due, and not every request has ended"
            clock.wait_until(due_s[0])
            continue
        updates = engine.step()
        end_s = clock.now()
        for request_id, new_ids, finish_reason, _ in updates:
            record = live[request_id]
            record.token_ids += new_ids
            record.token_times_s += [end_s] * len(new_ids)
            if finish_reason is not None:
                record.finish_reason = finish_reason
                del live[request_id]
                num_ended += 1
                if arrivals.is_closed:
                    due_s.append(end_s)
        real_s = end_s - clock.skipped_s
        if real_s > time_limit_s and num_ended < len(records):
            engine.abort_all()
            raise TimeoutError(
                f"{num_ended} of {len(records)} requests have ended after {real_s:.0f} s; raise "
                f"--time-limit, or ask for less"
            )
    while engine.has_unfinished():  # steps in flight that bring nobody anything
        engine.step()
    return PassRecord(records, end_s, clock.skipped_s)
