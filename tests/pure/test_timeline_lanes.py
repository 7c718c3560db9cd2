"""Spans nest in their lanes, arrows point forward in time, bubbles are what the GPU waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_trace import write_synthetic

from nanorunner.step_times import step_times
from nanorunner.workers.spans import (
    DOWNLOAD,
    FORWARD,
    GPU,
    IDLE,
    NO_FRAME,
    RECEIVE,
    SAMPLE,
    SEND,
    SPAN_WORDS,
    SpanTable,
    StepFacts,
)
from nanorunner.workshop.timeline_arrows import FRAME, IS_LOST, LAUNCH, OUTPUT, arrows_of
from nanorunner.workshop.timeline_lanes import (
    COPY_LANE,
    CPU_LANE,
    GPU_LANE,
    LANES,
    WIRE_LANE,
    Lanes,
    Span,
    lanes_of,
)
from nanorunner.workshop.timeline_read import RankTrace, Run, read_run

KINDS = ["v1 on a GPU", "v2 on a GPU", "v1 on a CPU", "v2 on a CPU"]
NUM_STEPS = 12
NUM_START_FRAMES = 4


def read(tmp_path: Path, kind: str, tp: int = 3, **changes: Any) -> Run:
    """Return a synthetic run."""
    shape: dict[str, Any] = {"tp": tp, "has_gpu": kind.endswith("GPU"), "num_steps": NUM_STEPS}
    write_synthetic(tmp_path, kind[:2], **(shape | changes))
    return read_run(tmp_path)


def check_nesting(spans: list[Span]) -> None:
    """Whoever begins inside another one ends inside it; a depth says how many are around."""
    around: list[Span] = []
    for span in spans:
        assert span.begin <= span.end
        while around and around[-1].end <= span.begin:
            around.pop()
        assert not around or span.end <= around[-1].end
        assert span.depth == len(around)
        around.append(span)


@pytest.mark.parametrize("kind", KINDS)
def test_every_span_is_in_one_lane_and_they_nest(tmp_path: Path, kind: str) -> None:
    run = read(tmp_path, kind, rest_after=[6])
    first, last = run.limits_ns()
    for trace, lanes in zip(run.ranks, lanes_of(run), strict=True):
        assert lanes.num_cut == 0
        found = [span for lane in LANES for span in lanes.spans[lane]]
        table = trace.spans
        columns = (table.name, table.begin, table.end, table.step, table.frame)
        recorded = Counter(zip(*(column.tolist() for column in columns), strict=True))
        assert Counter(span[:5] for span in found) == recorded
        for lane in LANES:
            check_nesting(lanes.ordered(lane))
            assert all(first <= span.begin <= span.end <= last for span in lanes.ordered(lane))
        assert bool(lanes.spans[GPU_LANE]) == run.has_gpu
        assert not lanes.spans[COPY_LANE]


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Return spans of one GPU, in any order, of any length, overlapping or not."""
    times = st.integers(0, 60)
    found: list[tuple[int, ...]] = []
    for step in range(draw(st.integers(0, 12))):
        begin, end = sorted((draw(times), draw(times)))
        found.append((FORWARD, GPU, begin, end, step, NO_FRAME))
    return found


@given(rows())
def test_whatever_overlaps_is_cut_until_it_nests(words: list[tuple[int, ...]]) -> None:
    run = make_run(words)
    (lanes,) = lanes_of(run)
    spans = lanes.spans[GPU_LANE]
    check_nesting(spans)
    check_nesting(lanes.ordered(GPU_LANE))
    assert len(spans) == len(words)
    before = {step: (begin, end) for _, _, begin, end, step, _ in words}
    cut = [span for span in spans if (span.begin, span.end) != before[span.step]]
    assert len(cut) == lanes.num_cut
    assert max((s.begin - before[s.step][0] for s in cut), default=0) == lanes.most_cut_ns


def make_run(words: Sequence[tuple[int, ...]], runner: str = "v2") -> Run:
    """Return a run of one rank with these spans."""
    table = SpanTable(*np.array(words, np.int64).reshape(-1, SPAN_WORDS).T)
    facts = StepFacts(*np.zeros((len(StepFacts._fields), 0), np.int64))
    rank = RankTrace(0, 1, 0, (), None, table, facts)
    return Run(Path("traces"), {"runner": runner, "device": "cuda"}, (rank,))


def test_two_steps_that_the_clock_lets_overlap_are_cut_and_counted() -> None:
    run = make_run([(FORWARD, GPU, 0, 1000, 0, 0), (FORWARD, GPU, 997, 2000, 1, 0)])
    (lanes,) = lanes_of(run)
    assert [(span.begin, span.end) for span in lanes.spans[GPU_LANE]] == [(0, 1000), (1000, 2000)]
    assert (lanes.num_cut, lanes.most_cut_ns, lanes.bubbles) == (1, 3, [])


@pytest.mark.parametrize(("runner", "lane"), [("v1", GPU_LANE), ("v2", COPY_LANE)])
def test_v2_copies_beside_the_main_stream(runner: str, lane: str) -> None:
    words = [(SAMPLE, GPU, 0, 10, 0, 0), (DOWNLOAD, GPU, 10, 20, 0, 0)]
    (lanes,) = lanes_of(make_run(words, runner))
    assert [span.name for span in lanes.spans[lane]][-1] == DOWNLOAD
    assert lanes.bubbles == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_has_an_arrow_to_each_other_rank(tmp_path: Path, kind: str) -> None:
    run = read(tmp_path, kind)
    ranks = lanes_of(run)
    drawn, not_drawn = arrows_of(run, ranks)
    assert not_drawn == {}
    found = Counter((arrow.frame, arrow.head.rank) for arrow in drawn if arrow.kind == FRAME)
    frames = range(1, NUM_START_FRAMES + NUM_STEPS + 1)
    assert found == Counter((frame, rank) for frame in frames for rank in (1, 2))
    for arrow in drawn:
        assert arrow.tail.at <= arrow.head.at
        for end in (arrow.tail, arrow.head):
            assert any(s.begin <= end.at < s.end for s in ranks[end.rank].spans[end.lane])
    for arrow in drawn:
        if arrow.kind == FRAME:
            assert (arrow.tail.rank, arrow.tail.lane, arrow.head.lane) == (0, WIRE_LANE, WIRE_LANE)
            assert around(ranks, arrow.tail.rank, WIRE_LANE, arrow.tail.at).name == SEND
            assert around(ranks, arrow.head.rank, WIRE_LANE, arrow.head.at).name == RECEIVE


def around(ranks: list[Lanes], rank: int, lane: str, at: int) -> Span:
    """Return the outermost span of a lane at a time."""
    return next(s for s in ranks[rank].spans[lane] if s.begin <= at < s.end)


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_its_launches_and_the_reading_of_its_output(
    tmp_path: Path, kind: str
) -> None:
    run = read(tmp_path, kind)
    ranks = lanes_of(run)
    drawn = arrows_of(run, ranks).drawn
    launches = Counter((a.step, a.tail.rank, a.head.rank) for a in drawn if a.kind == LAUNCH)
    expected = [(step, rank, rank) for step in range(NUM_STEPS) for rank in range(3)]
    assert launches == Counter(expected if run.has_gpu else [])
    outputs = [arrow for arrow in drawn if arrow.kind == OUTPUT]
    assert [arrow.step for arrow in outputs] == list(range(NUM_STEPS))
    lane = GPU_LANE if run.has_gpu else CPU_LANE
    assert {(arrow.tail.rank, arrow.tail.lane) for arrow in outputs} == {(0, lane)}
    assert {(arrow.head.rank, arrow.head.lane) for arrow in outputs} == {(0, CPU_LANE)}
    if run.has_gpu:
        for step, (begin, end) in enumerate(work_of(ranks[0])):
            launch = next(a for a in drawn if (a.kind, a.step, a.head.rank) == (LAUNCH, step, 0))
            assert launch.head.at - begin <= 1  # just inside the span
            assert end - outputs[step].tail.at <= 1


def work_of(lanes: Lanes) -> list[tuple[int, int]]:
    """Return when the GPU began and ended each step."""
    steps = [
        [span for span in lanes.spans[GPU_LANE] if span.step == step] for step in range(NUM_STEPS)
    ]
    return [(min(s.begin for s in each), max(s.end for s in each)) for each in steps]


def test_what_a_ring_has_lost_costs_its_arrow_and_is_counted(tmp_path: Path) -> None:
    run = read(tmp_path, "v2 on a GPU", tp=2, num_lost=3)
    first, second = run.ranks
    gone = first._replace(spans=without(first.spans, SEND, 2))
    drawn, not_drawn = arrows_of(run, lanes_of(run._replace(ranks=(gone, second))))
    assert not_drawn == {IS_LOST: 2}
    assert len({a.frame for a in drawn if a.kind == FRAME}) == NUM_START_FRAMES + NUM_STEPS - 2
    whole = run._replace(ranks=(first._replace(num_lost=0), second._replace(num_lost=0)))
    with pytest.raises(ValueError, match=r"rank 1: frame 1 was never sent, though no span is lost"):
        arrows_of(whole, lanes_of(whole._replace(ranks=(gone, second))))


def without(table: SpanTable, name: int, number: int) -> SpanTable:
    """Return a table without the first few spans of a name."""
    keep = np.ones(len(table.name), bool)
    keep[np.flatnonzero(table.name == name)[:number]] = False
    return SpanTable(*(column[keep] for column in table))


@pytest.mark.parametrize("kind", ["v1 on a GPU", "v2 on a GPU"])
def test_bubbles_are_those_of_the_step_times(tmp_path: Path, kind: str) -> None:
    spans = write_synthetic(tmp_path, kind[:2], tp=2, num_steps=NUM_STEPS, rest_after=[5])
    lanes = lanes_of(read_run(tmp_path))[0]
    lengths_us = [(bubble.end - bubble.begin) / 1000 for bubble in lanes.bubbles]
    expected = step_times(spans[0])["parts"]["bubble"]
    assert sum(lengths_us) == pytest.approx(expected["mean_us"] * NUM_STEPS)
    # each lies between two spans, and none in a rest
    busy = sorted((s.begin, s.end) for s in lanes.spans[GPU_LANE] if not s.depth)
    gaps = [(left[1], right[0]) for left, right in pairwise(busy)]
    rests = [(s.begin, s.end) for s in lanes.spans[CPU_LANE] if s.name == IDLE]
    assert len(rests) == 1
    for bubble in lanes.bubbles:
        assert any(begin <= bubble.begin < bubble.end <= end for begin, end in gaps)
        assert all(bubble.end <= begin or bubble.begin >= end for begin, end in rests)
    # the textbook's GPU waits in every step, the other one for its next launch alone
    assert np.median(lengths_us) == pytest.approx(493 if kind[:2] == "v1" else 3)


def test_a_cpu_has_no_bubble(tmp_path: Path) -> None:
    run = read(tmp_path, "v2 on a CPU")
    assert all(lanes.bubbles == [] for lanes in lanes_of(run))
