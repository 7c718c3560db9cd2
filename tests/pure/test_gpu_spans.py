"""GPU spans by events on a simulated GPU: on the CPU's clock, no two steps mixed, and no wait."""

from __future__ import annotations

from itertools import pairwise

import pytest
from simulated_gpu import Captured, SimulatedGpu

from nanorunner.workers.gpu_clock import GpuClock
from nanorunner.workers.gpu_spans import GpuSpans
from nanorunner.workers.spans import (
    ALL_REDUCE,
    DOWNLOAD,
    FORWARD,
    GPU,
    GRAPH,
    NAMES,
    PREPARE,
    SAMPLE,
    SPAN_WORDS,
    STAGE,
    WordRing,
)

DEPTH = 2
PARTS = {PREPARE: 10_000, FORWARD: 600_000, SAMPLE: 40_000}  # ns on the GPU
TOLERANCE_NS = 500  # of the anchors, whose events the host can place no better


def make(
    gpu: SimulatedGpu, *, copies: int = DEPTH + 1, has_graph_events: bool = True, **settings: int
) -> GpuSpans:
    return GpuSpans(
        WordRing(1 << 14, SPAN_WORDS),
        gpu.event,
        (lambda: gpu.event(is_for_graph=True)) if has_graph_events else None,
        graph_problem="" if has_graph_events else "this one has no such events",
        graph_copies=copies,
        clock=GpuClock(gpu.event, gpu.now),
        **settings,
    )


def capture(gpu: SimulatedGpu, spans: GpuSpans) -> list[Captured]:
    """Return the copies of a graph of all parts."""
    copies = []
    for _ in range(spans.graph_copies):
        gpu.begin_capture()
        spans.begin_capture()
        for name, ns in PARTS.items():
            gpu.work(ns)
            spans.mark_in_graph(name)
        copies.append(Captured(gpu.end_capture(), spans.end_capture()))
    return copies


def settle(gpu: SimulatedGpu, spans: GpuSpans) -> None:
    """Let the GPU come to its end and read the rest."""
    gpu.wait()
    spans.settle(1.0)


def rows(spans: GpuSpans) -> list[tuple[str, int, int, int]]:
    """Return (name, step, begin, end) of all spans, on the host's clock."""
    found = spans.ring.rows()
    assert (found[:, 1] == GPU).all()
    found[:, 2:4] = spans.clock.to_host(found[:, 2:4])
    return [(NAMES[name], step, begin, end) for name, _, begin, end, step, _ in found.tolist()]


@pytest.mark.parametrize("rate", [1.0, 1 + 30e-6, 1 - 30e-6])
def test_spans_lie_on_the_cpus_clock_after_minutes_and_whatever_the_gpus_rate(rate: float) -> None:
    gpu = SimulatedGpu(rate)
    spans = make(gpu)
    truth = []
    for step in range(200):
        gpu.host_ns += 1_000_000_000  # three minutes in all
        spans.begin_step()
        spans.begin()
        gpu.work(1)
        begin = gpu._free_ns
        gpu.work(300_000)
        spans.mark(FORWARD)
        truth.append((step, begin, gpu._free_ns))
        spans.end_step(step, 0)
        gpu.wait()
    settle(gpu, spans)
    found = rows(spans)
    assert [row[:2] for row in found] == [("forward", step) for step in range(200)]
    for (_, _, begin, end), (_, true_begin, true_end) in zip(found, truth, strict=True):
        assert begin == pytest.approx(true_begin, abs=TOLERANCE_NS)
        assert end == pytest.approx(true_end, abs=TOLERANCE_NS)


def test_a_busy_gpu_is_never_waited_for_and_still_keeps_time_for_a_minute() -> None:
    gpu = SimulatedGpu(1 + 30e-6)
    spans = make(gpu)
    last = []
    for step in range(600):
        spans.begin_step()
        spans.begin()
        gpu.work(100_000_000)
        spans.mark(FORWARD)
        spans.end_step(step, 0)
        last.append(gpu._free_ns)
        if step:
            gpu.host_ns = max(gpu.host_ns, last[step - 1])  # one step in flight, always
    assert len(spans.clock.anchors) == 1  # there was no idle moment
    settle(gpu, spans)
    assert len(spans.clock.anchors) == 2
    found = rows(spans)
    assert len(found) == 600
    for (_, _, begin, end), true_end in zip(found, last, strict=True):
        assert end == pytest.approx(true_end, abs=5_000)
        assert end - begin == pytest.approx(100_000_000, abs=5_000)


def test_a_graphs_parts_are_told_apart_with_two_steps_in_flight() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu)
    copies = capture(gpu, spans)
    begins = run_replays(gpu, spans, copies, num_steps=50)
    settle(gpu, spans)
    found = rows(spans)
    assert spans.num_lost == 0
    assert len(found) == 50 * len(PARTS)
    for step, begin in enumerate(begins):
        for name, ns in PARTS.items():
            assert (NAMES[name], step) == found[0][:2]
            assert found[0][2] == pytest.approx(begin, abs=TOLERANCE_NS)
            assert found[0][3] - found[0][2] == pytest.approx(ns, abs=TOLERANCE_NS)
            begin += ns
            found.pop(0)


def run_replays(
    gpu: SimulatedGpu, spans: GpuSpans, copies: list[Captured], num_steps: int
) -> list[int]:
    """Replay in every step, DEPTH in flight; return when each began on the GPU."""
    begins, ends = [], []
    for step in range(num_steps):
        spans.begin_step()
        begins.append(max(gpu._free_ns, gpu.host_ns + 200))
        spans.replay(copies)
        spans.end_step(step, 0)
        ends.append(gpu._free_ns)
        if step >= DEPTH - 1:
            gpu.host_ns = max(gpu.host_ns, ends[step - DEPTH + 1])
    return begins


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_graphs_a_step_lose_nothing_at_any_depth(depth: int) -> None:
    """A draft model's own graph behind the step's: the copies of both take turns by the step."""
    gpu = SimulatedGpu()
    spans = make(gpu, copies=depth + 1)
    graphs = [capture(gpu, spans), capture(gpu, spans)]
    ends: list[int] = []
    for step in range(40):
        spans.begin_step()
        for copies in graphs:
            spans.replay(copies)
        spans.end_step(step, 0)
        ends.append(gpu._free_ns)
        if step >= depth - 1:
            gpu.host_ns = max(gpu.host_ns, ends[step - depth + 1])
    settle(gpu, spans)
    assert spans.num_lost == 0
    assert len(rows(spans)) == 40 * 2 * len(PARTS)


def test_a_graph_that_runs_again_too_early_costs_its_measurement_and_mixes_nothing() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu, copies=1)
    copies = capture(gpu, spans)
    num_steps = 30
    begins = run_replays(gpu, spans, copies, num_steps)
    settle(gpu, spans)
    found = rows(spans)
    assert spans.num_lost > 0
    assert spans.num_lost + len(found) == num_steps * len(PARTS)
    for name, step, begin, end in found:
        before = sum(list(PARTS.values())[: [NAMES[p] for p in PARTS].index(name)])
        assert begin == pytest.approx(begins[step] + before, abs=TOLERANCE_NS)
        assert end - begin == pytest.approx(PARTS[NAMES.index(name)], abs=TOLERANCE_NS)


def test_without_events_in_graphs_a_graph_is_one_span_and_that_is_said() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu, has_graph_events=False)
    assert spans.graph_copies == 1
    copies = capture(gpu, spans)
    assert spans.notes() == ()  # nothing was replayed
    run_replays(gpu, spans, copies, num_steps=5)
    settle(gpu, spans)
    found = rows(spans)
    assert [row[:2] for row in found] == [("graph", step) for step in range(5)]
    assert found[2][3] - found[2][2] == pytest.approx(sum(PARTS.values()), abs=TOLERANCE_NS)
    assert "a graph is one span, as this one has no such events" in spans.notes()


def test_a_graph_follows_eager_work_and_what_lies_between_is_no_span() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu)
    copies = capture(gpu, spans)
    spans.begin_step()
    spans.begin()
    gpu.work(5_000)
    spans.mark(STAGE)
    gpu.wait()
    gpu.host_ns += 70_000  # the GPU waits for the launch
    spans.replay(copies)
    gpu.work(8_000)
    spans.mark(SAMPLE)
    spans.end_step(3, 9)
    settle(gpu, spans)
    found = rows(spans)
    assert [row[0] for row in found] == ["stage", "prepare", "forward", "sample", "sample"]
    assert found[1][2] - found[0][3] >= 70_000
    assert all(left[3] == right[2] for left, right in pairwise(found[1:]))
    assert spans.ring.rows()[0, 4:].tolist() == [3, 9]


def test_some_all_reduces_are_timed_and_all_are_counted() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu, all_reduces=57)
    spans.begin_step()
    spans.begin()
    for _ in range(57):
        begun = spans.begin_inner(ALL_REDUCE)
        gpu.work(6_000)
        if begun is not None:
            spans.end_inner(ALL_REDUCE, begun)
    spans.mark(FORWARD)
    spans.end_step(0, 0)
    gpu.begin_capture()
    spans.begin_capture()
    in_graph = [spans.begin_inner_in_graph(ALL_REDUCE) for _ in range(57)]
    gpu.end_capture()
    settle(gpu, spans)
    found = rows(spans)
    assert [row[0] for row in found] == ["forward"] + ["all_reduce"] * 2
    for _, _, begin, end in found[1:]:
        assert end - begin == pytest.approx(6_000, abs=TOLERANCE_NS)
        assert found[0][2] <= begin <= end <= found[0][3]
    assert sum(begun is not None for begun in in_graph) == 2
    assert spans.end_capture().num_all_reduces == 57
    assert "every 29th is timed" in spans.notes()[0]


def test_a_step_whose_events_never_come_is_lost_after_the_time_limit() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu)
    spans.begin_step()
    spans.begin()
    gpu.work(10**15)
    spans.mark(FORWARD)
    begun = spans.begin_inner(DOWNLOAD)
    assert begun is not None
    spans.end_inner(DOWNLOAD, begun)
    spans.end_step(0, 0)
    num_anchors = len(spans.clock.anchors)
    spans.settle(0.01)
    assert (spans.num_lost, rows(spans)) == (2, [])
    assert len(spans.clock.anchors) == num_anchors  # the GPU is not idle


def test_marks_outside_of_steps_and_captures_record_nothing() -> None:
    gpu = SimulatedGpu()
    spans = make(gpu)
    spans.mark_in_graph(FORWARD)
    assert spans.begin_inner_in_graph(ALL_REDUCE) is None
    spans.begin_step()
    spans.mark(STAGE)  # nothing has begun
    spans.end_step(0, 0)
    settle(gpu, spans)
    assert rows(spans) == []
    assert spans.num_lost == 0
    assert GRAPH not in spans.ring.rows()[:, 0]
