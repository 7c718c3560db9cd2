"""A pass serves every request, from the moment it is due, and stamps each id as it comes out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nanorunner.bench import arrivals
from nanorunner.bench.driver import Clock, PassRecord, Request, run_pass
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams

STEP_S = 0.125


class World:
    """A time that only steps and sleeps move, and an engine of `width` requests in it."""

    def __init__(self, width: int = 8, max_idle_s: float = 1e9) -> None:
        self.time_s = 1000.0
        self.slept_s = 0.0
        self.width = width
        self.most_inside = 0
        self.left: dict[int, int] = {}  # request id -> ids to go
        self.num_added = 0
        self.fails_at: int | None = None
        self.clock = Clock(max_idle_s, lambda: self.time_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.slept_s += seconds

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        request_id = 100 + self.num_added
        self.num_added += 1
        self.left[request_id] = params.max_tokens
        self.most_inside = max(self.most_inside, len(self.left))
        return request_id

    def step(self) -> list[RequestUpdate]:
        self.time_s += STEP_S
        updates = []
        for request_id in list(self.left)[: self.width]:
            self.left[request_id] -= 1
            reason = None if self.left[request_id] else "length"
            if request_id == self.fails_at:
                reason = "error: no room"
            if reason is not None:
                del self.left[request_id]
            updates.append(RequestUpdate(request_id, [self.left.get(request_id, 0)], reason))
        return updates

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def abort_all(self) -> None:
        self.left.clear()

    def run(self, lengths: Sequence[int], schedule: arrivals.Arrivals) -> PassRecord:
        requests = [Request([1, 2], SamplingParams(max_tokens=length)) for length in lengths]
        return run_pass(self, requests, schedule, self.clock, time_limit_s=60.0)


def test_the_wait_for_a_busy_engine_counts_from_the_arrival() -> None:
    # the second is due in the middle of the first one's step, and the engine takes one at a time
    record = World(width=1).run([2, 1], arrivals.replay([0.0, STEP_S / 2]))
    first, second = record.requests
    assert first.token_times_s == [STEP_S, 2 * STEP_S]
    assert (second.arrival_s, second.handover_s) == (STEP_S / 2, STEP_S)
    assert second.token_times_s == [3 * STEP_S]
    assert record.duration_s == 3 * STEP_S
    assert (first.token_ids, second.token_ids) == ([1, 0], [0])


def test_a_burst_keeps_every_request() -> None:
    schedule = arrivals.open_loop("burst", 200, 40.0, seed=1, burstiness=0.1)
    record = World(width=4).run([1 + i % 5 for i in range(200)], schedule)
    assert [len(r.token_ids) for r in record.requests] == [1 + i % 5 for i in range(200)]
    assert all(r.is_finished for r in record.requests)
    assert [r.arrival_s for r in record.requests] == list(schedule.due_s)
    assert all(r.arrival_s <= r.handover_s < r.token_times_s[0] for r in record.requests)


def test_a_closed_loop_is_always_full_and_an_end_brings_the_next() -> None:
    world = World()
    record = world.run([3, 1, 2, 2, 1, 1], arrivals.closed_loop(6, 2))
    assert world.most_inside == 2
    ends = {r.token_times_s[-1] for r in record.requests}
    assert [r.arrival_s for r in record.requests[:2]] == [0.0, 0.0]
    assert {r.arrival_s for r in record.requests[2:]} <= ends
    assert record.duration_s == 5 * STEP_S  # 10 ids, 2 at a time


def test_silence_is_slept_through_and_what_is_longer_than_allowed_is_skipped() -> None:
    schedule = arrivals.replay([0.0, 1.0, 3601.0])
    world = World(max_idle_s=2.0)
    record = world.run([1, 1, 1], schedule)
    assert [r.token_times_s for r in record.requests] == [[STEP_S], [1 + STEP_S], [3601 + STEP_S]]
    assert world.slept_s == pytest.approx(1.0 - STEP_S + 2.0)
    assert record.skipped_idle_s == pytest.approx(3600 - STEP_S - 2.0)
    assert record.duration_s == pytest.approx(3601 + STEP_S)


def test_a_failure_ends_its_request_and_no_other() -> None:
    world = World()
    world.fails_at = 101
    record = world.run([3, 3, 3], arrivals.all_at_once(3))
    assert [r.finish_reason for r in record.requests] == ["length", "error: no room", "length"]
    assert [r.is_finished for r in record.requests] == [True, False, True]


def test_a_pass_that_takes_too_long_is_ended_with_its_requests() -> None:
    world = World()
    with pytest.raises(TimeoutError, match="1 of 2 requests have ended after 60 s"):
        world.run([1, 10_000], arrivals.all_at_once(2))
    assert not world.has_unfinished()
