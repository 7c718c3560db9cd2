"""The recorder: one table of names, a ring that forgets, laps without gaps, one clock."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest

from nanorunner.workers import spans
from nanorunner.workers.spans import (
    ACK,
    ALL_REDUCE,
    APPLY,
    CPU,
    FORWARD,
    IDLE,
    MEANINGS,
    NAMES,
    NO_FRAME,
    NO_STEP,
    RECEIVE,
    RUN,
    SCHEDULE,
    SEND,
    UPDATE,
    WAIT,
    WIRE,
    RankSpans,
    SpanRecorder,
    WordRing,
    clock_problem,
)


def test_each_name_has_a_constant_and_a_meaning() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for number, name in enumerate(NAMES):
        assert getattr(spans, name.upper()) == number
        assert MEANINGS[name]


def test_a_full_ring_forgets_its_oldest_and_says_how_many() -> None:
    ring = WordRing(4, 2)
    for number in range(3):
        ring.push(number, -number)
    assert (ring.rows().tolist(), ring.num_lost) == ([[0, 0], [1, -1], [2, -2]], 0)
    for number in range(3, 11):
        ring.push(number, 2**62 + number)
    assert ring.num_lost == 7
    assert ring.rows().tolist() == [[number, 2**62 + number] for number in range(7, 11)]
    ring.rows()[:] = 0  # a copy
    assert ring.rows()[0, 0] == 7


def test_laps_follow_one_another_from_the_plan_to_the_update() -> None:
    recorder = SpanRecorder(rank=0)
    recorder.begin_round()
    recorder.lap_of(SCHEDULE, 7)
    begin = recorder.now()
    recorder.sent(3, begin)
    recorder.begin_run()
    recorder.begin_step(7)
    recorder.lap(APPLY)
    recorder.lap(FORWARD)
    recorder.end_step()
    recorder.end_run()
    recorder.lap_of(WAIT, 7)
    recorder.lap_of(UPDATE, 7)
    table = recorder.collect(1.0).table()
    rows = list(zip(*(column.tolist() for column in table), strict=True))
    assert {row[1] for row in rows} == {CPU}
    assert {row[4] for row in rows} == {7}
    laps = [row for row in rows if row[0] not in (SEND, RUN)]
    assert [row[0] for row in laps] == [SCHEDULE, WIRE, WIRE, APPLY, FORWARD, WAIT, UPDATE]
    run = next(row for row in rows if row[0] == RUN)
    for left, right in pairwise(laps):
        # the run's end lies between what the runner does and what the engine does next
        assert left[3] == right[2] or (left[0], right[0]) == (FORWARD, WAIT)
    assert run[2] == laps[2][2]
    assert laps[4][3] <= run[3] == laps[5][2]
    assert {row[5] for row in rows if row[0] in (SEND, RUN, APPLY)} == {3}


def test_a_frame_without_a_step_carries_no_step() -> None:
    recorder = SpanRecorder(rank=1)
    begin = recorder.now()
    recorder.acked(5)
    recorder.received(5, begin)
    recorder.begin_step(2)
    recorder.end_step()
    recorder.end_run()
    recorder.received(6, recorder.now())
    recorder.end_run()
    table = recorder.collect(1.0).table()
    found = list(zip(table.name.tolist(), table.step.tolist(), table.frame.tolist(), strict=True))
    assert found == [
        (ACK, NO_STEP, 5),
        (RECEIVE, NO_STEP, 5),
        (WIRE, 2, 5),
        (RUN, 2, 5),
        (RECEIVE, NO_STEP, 6),
        (RUN, NO_STEP, 6),
    ]
    assert table.begin[1] <= table.begin[0] == table.end[0] <= table.end[1]


def test_a_rest_is_one_span_until_the_next_round() -> None:
    recorder = SpanRecorder(rank=0)
    recorder.begin_round()
    recorder.lap_of(UPDATE, 0)
    recorder.rest()
    time.sleep(0.01)
    recorder.begin_round()
    recorder.begin_round()
    table = recorder.collect(1.0).table()
    assert table.name.tolist() == [UPDATE, IDLE]
    assert table.end[1] - table.begin[1] >= 10_000_000
    assert (table.step[1], table.frame[1]) == (NO_STEP, NO_FRAME)


def test_warm_up_records_nothing() -> None:
    recorder = SpanRecorder(rank=0)
    recorder.lap(FORWARD, on_gpu=True)
    recorder.begin_gpu()
    assert recorder.begin_inner(ALL_REDUCE) is None
    assert recorder.ring.num_pushed == 0


def test_facts_are_the_steps_own_and_rank_0s_alone() -> None:
    counts, computed = [1, 5, 3], [10, 0, 256]
    for rank in (0, 1):
        recorder = SpanRecorder(rank)
        recorder.begin_step(4)
        recorder.note_batch(np.array(counts), np.array(computed), 2)
        for _ in range(7):
            recorder.end_inner(ALL_REDUCE, recorder.begin_inner(ALL_REDUCE))
        recorder.end_step()
        recorder.begin_step(5)
        recorder.note_batch(np.ones(3, np.int64), np.array([11, 5, 259]), 3)
        recorder.end_step()
        recorder.begin_step(6)
        recorder.note_batch(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
        recorder.end_step()  # a step of nobody computes nothing
        facts = [column.tolist() for column in recorder.collect(1.0).facts()]
        # each new token attends to the cached ones, to those before it, and to itself
        attended = sum(
            have + place + 1
            for count, have in zip(counts, computed, strict=True)
            for place in range(count)
        )
        rows = [[4, 5], [3, 3], [9, 3], [275, 278], [attended, 278], [2, 3], [7, 0]]
        assert facts == (rows if rank == 0 else [[]] * 7)


def test_all_processes_of_a_machine_share_the_clock() -> None:
    assert time.get_clock_info("perf_counter").implementation == "clock_gettime(CLOCK_MONOTONIC)"
    program = "import time; print(time.perf_counter_ns())"
    before = SpanRecorder.now()
    child = int(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    )
    assert before < child < SpanRecorder.now()


def test_a_rank_with_another_clock_is_named() -> None:
    def answer(rank: int, taken_ns: int) -> RankSpans:
        return RankSpans(rank, b"", b"", 0, taken_ns, (), ())

    assert clock_problem(100, [answer(0, 110), answer(1, 120)], 130) == ""
    for taken_ns in (99, 131):
        problem = clock_problem(100, [answer(0, 110), answer(1, taken_ns)], 130)
        assert "rank 1" in problem
        assert str(taken_ns) in problem


@pytest.mark.parametrize("num_spans", [0, 5])
def test_what_crosses_the_wire_is_what_was_recorded(num_spans: int) -> None:
    recorder = SpanRecorder(rank=3, max_spans=4)
    recorder.begin_step(0)
    for _ in range(num_spans):
        recorder.lap(FORWARD)
    found = recorder.collect(1.0)
    assert (found.rank, found.num_lost) == (3, max(0, num_spans + 1 - 4))
    assert len(found.table().name) == min(num_spans + 1, 4)
    assert found.taken_ns <= recorder.now()
    assert recorder.collect(1.0).words == found.words  # it stays recorded
