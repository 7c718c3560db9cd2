"""From spans to parts: sums fit the steps, idle time is nobody's, a slower part shows by name."""

from __future__ import annotations

import numpy as np
import pytest

from nanorunner.step_times import OTHER, step_lines, step_times, whole_steps
from nanorunner.workers.spans import (
    ALL_REDUCE,
    CPU,
    FORWARD,
    GPU,
    GRAPH,
    IDLE,
    NO_STEP,
    PREPARE,
    RUN,
    SAMPLE,
    SCHEDULE,
    STAGE,
    UPDATE,
    WAIT,
    RankSpans,
)

US = 1000
LAPS = {SCHEDULE: 40, STAGE: 20, GRAPH: 60, WAIT: 700, UPDATE: 80}  # us, of a step on the CPU
GPU_LAPS = {PREPARE: 10, FORWARD: 600, SAMPLE: 90}
CALLER_US = 25


def record(
    num_steps: int, *, slower: dict[int, int] | None = None, has_gpu: bool = True
) -> RankSpans:
    """Return the spans of equal steps, one at a time; a rest of 1 s in the middle."""
    laps = {**LAPS, **GPU_LAPS, **(slower or {})}
    rows: list[tuple[int, ...]] = []
    facts: list[tuple[int, ...]] = []
    now = 10**12
    for step in range(num_steps):
        if step == num_steps // 2:
            rows.append((IDLE, CPU, now, now + 10**9, NO_STEP, 0))
            now += 10**9
        run_begin = now
        for name in LAPS:
            end = now + laps[name] * US
            rows.append((name, CPU, now, end, step, 0))
            now = end
            if name == GRAPH and has_gpu:
                at = now - 50 * US  # the GPU begins while the launch is under way
                for part in GPU_LAPS:
                    rows.append((part, GPU, at, at + laps[part] * US, step, 0))
                    if part == FORWARD:
                        rows.append((ALL_REDUCE, GPU, at + 100 * US, at + 107 * US, step, 0))
                    at += laps[part] * US
        rows.append((RUN, CPU, run_begin, now, step, 1))  # holds laps; is none
        facts.append((step, 4, 4, 400, 400, 4, 57))
        now += CALLER_US * US
    words = np.array(rows, np.int64).tobytes()
    return RankSpans(0, words, np.array(facts, np.int64).tobytes(), 0, now, (), ("a note",))


def test_the_parts_of_the_cpu_add_up_to_the_step_and_those_of_the_gpu_with_its_bubble_too() -> None:
    num_steps = 20
    steps = step_times(record(num_steps))
    wall_us = sum(LAPS.values()) + CALLER_US
    assert steps["num_steps"] == num_steps
    # the first step has no caller's time before it
    assert steps["step_us"]["mean"] == pytest.approx(wall_us - CALLER_US / num_steps)
    assert steps["step_us"]["median"] == pytest.approx(wall_us)
    parts = steps["parts"]
    for name, microseconds in (("schedule", 40), ("graph", 60), ("wait", 700), (OTHER, CALLER_US)):
        assert parts[name]["kind"] == "cpu"
        assert parts[name]["median_us"] == pytest.approx(microseconds)
    # one all-reduce of 57 was timed, and is a part of the forward
    assert parts["all_reduce"]["median_us"] == pytest.approx(57 * 7)
    assert parts["forward"]["median_us"] == pytest.approx(600 - 57 * 7)
    assert parts["bubble"]["median_us"] == pytest.approx(wall_us - sum(GPU_LAPS.values()))
    for kind in ("cpu", "gpu"):
        mean_us = sum(part["mean_us"] for part in parts.values() if part["kind"] == kind)
        share = sum(part["share"] for part in parts.values() if part["kind"] == kind)
        assert mean_us == pytest.approx(steps["step_us"]["mean"], rel=0.05)
        assert share == pytest.approx(1, rel=0.05)
    assert steps["gpu_idle_share"] == pytest.approx(1 - sum(GPU_LAPS.values()) / wall_us, abs=0.01)
    assert "idle" not in parts
    assert steps["note"].endswith("a note")


def test_a_part_that_is_a_fifth_slower_is_found_by_its_name() -> None:
    before = step_times(record(20))["parts"]
    for name, number in (("stage", STAGE), ("sample", SAMPLE), ("update", UPDATE)):
        slower_us = round({**LAPS, **GPU_LAPS}[number] * 1.2)
        after = step_times(record(20, slower={number: slower_us}))["parts"]
        changed = [
            part
            for part in before
            if part not in ("bubble", OTHER)  # they follow
            and abs(after[part]["median_us"] / before[part]["median_us"] - 1) > 0.02
        ]
        assert changed == [name]


def test_where_both_have_a_part_of_one_name_the_cpus_is_its_launch() -> None:
    spans = record(4)
    rows = np.frombuffer(spans.words, np.int64).reshape(-1, 6).copy()
    rows[rows[:, 0] == STAGE, 0] = FORWARD
    parts = step_times(spans._replace(words=rows.tobytes()))["parts"]
    assert (parts["forward launch"]["kind"], parts["forward"]["kind"]) == ("cpu", "gpu")
    assert parts["forward launch"]["median_us"] == pytest.approx(20)


def test_a_cpu_has_no_bubble() -> None:
    steps = step_times(record(6, has_gpu=False))
    assert steps["gpu_idle_share"] is None
    assert {part["kind"] for part in steps["parts"].values()} == {"cpu"}
    assert "no GPU" in steps["note"]


def test_only_whole_steps_within_the_time_count() -> None:
    spans = record(10)
    table = spans.table()
    begin, end = int(table.begin[table.step == 3].min()), int(table.end[table.step == 7].max()) - 1
    assert whole_steps(spans, begin + 1, end).tolist() == [4, 5, 6]
    assert step_times(spans, begin + 1, end)["num_steps"] == 3
    with pytest.raises(ValueError, match="no step"):
        step_times(spans, int(table.end.max()))


def test_the_table_names_every_part_and_what_was_lost() -> None:
    steps = step_times(record(5)._replace(num_lost=3))
    text = "\n".join(step_lines(steps))
    for name in steps["parts"]:
        assert f"\n{name} " in text
    assert "GPU idle" in text
    assert "3 spans were lost" in text
