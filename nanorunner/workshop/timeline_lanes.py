"""A rank's spans in lanes, in each of which they nest, and the bubbles of its GPU.

    cpu    laps, and inside them what the ranks do together
    wire   send, receive with its ack, run: the life of a frame on this rank
    gpu    the main stream, and in its gaps the bubbles
    copy   the copy stream, beside it

A GPU's times are measured step by step and put on the CPU's clock, so two steps may seem to overlap
by less than that is exact. Such a span is cut, and how many were is told, never hidden.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from nanorunner.workers.spans import (
    ACK,
    BUBBLE,
    CPU,
    DOWNLOAD,
    IDLE,
    NO_FRAME,
    RECEIVE,
    RUN,
    SEND,
    Int64,
    SpanTable,
)
from nanorunner.workshop.timeline_read import RankTrace, Run

CPU_LANE, WIRE_LANE, GPU_LANE, COPY_LANE = LANES = ("cpu", "wire", "gpu", "copy")
WIRE_NAMES = (SEND, RECEIVE, ACK, RUN)


class Span(NamedTuple):
    """One span, as it stands in a lane."""

    name: int  # index into NAMES
    begin: int  # ns
    end: int
    step: int
    frame: int
    depth: int  # 0: inside no other span of its lane


class Lanes(NamedTuple):
    """A rank's lanes; an empty one has nothing to show."""

    rank: int
    spans: dict[str, list[Span]]  # by lane, ordered by begin, the outer ones first
    bubbles: list[Span]  # of the GPU's lane, between its spans
    num_cut: int  # spans that were cut to nest
    most_cut_ns: int

    def ordered(self, lane: str) -> list[Span]:
        """Return a lane's spans and bubbles by begin, the outer ones first."""
        bubbles = self.bubbles if lane == GPU_LANE else []
        return sorted([*self.spans[lane], *bubbles], key=_place)


def lanes_of(run: Run) -> list[Lanes]:
    """Return every rank's lanes."""
    idle = _rows(run.ranks[0].spans, run.ranks[0].spans.name == IDLE)
    return [_lanes(trace, run.head["runner"], idle) for trace in run.ranks]


def _lanes(trace: RankTrace, runner: str, idle: list[tuple[int, ...]]) -> Lanes:
    table = trace.spans
    is_cpu, is_wire = table.kind == CPU, np.isin(table.name, WIRE_NAMES)
    # runner v1 copies its results on the main stream
    is_copy = ~is_cpu & (table.name == DOWNLOAD) & (runner != "v1")
    masks = {
        CPU_LANE: is_cpu & ~is_wire,
        WIRE_LANE: is_wire,
        GPU_LANE: ~is_cpu & ~is_copy,
        COPY_LANE: is_copy,
    }
    spans, cuts = {}, []
    for lane, mask in masks.items():
        spans[lane], cut = _nested(_rows(table, mask))
        cuts += cut
    busy = [span for lane in (GPU_LANE, COPY_LANE) for span in spans[lane]]
    return Lanes(trace.rank, spans, list(_bubbles(busy, idle)), len(cuts), max(cuts, default=0))


def _rows(table: SpanTable, mask: Int64) -> list[tuple[int, ...]]:
    """Return (name, begin, end, step, frame) of the chosen spans, the outer ones first."""
    columns = (table.name, table.begin, table.end, table.step, table.frame)
    rows = zip(*(column[mask].tolist() for column in columns), strict=True)
    return sorted(rows, key=lambda row: (row[1], -row[2]))


def _nested(rows: list[tuple[int, ...]]) -> tuple[list[Span], list[int]]:
    """Return the spans with their depths, and by how much each was cut that stuck out."""
    spans: list[Span] = []
    cuts = []
    around: list[Span] = []  # the spans that the present one may lie in
    for name, begin, end, step, frame in rows:
        begun = begin
        if spans and begin < spans[-1].begin:
            begin = spans[-1].begin  # it lies in one that was cut
            end = max(begin, end)
        while around and around[-1].end <= begin:
            around.pop()
        while around and end > around[-1].end:
            begin = max(begin, around.pop().end)  # the next step's: it begins behind this one
        if begin != begun:
            cuts.append(begin - begun)
        span = Span(name, begin, end, step, frame, len(around))
        around.append(span)
        spans.append(span)
    return sorted(spans, key=_place), cuts


def _bubbles(busy: Iterable[Span], idle: list[tuple[int, ...]]) -> Iterator[Span]:
    """Yield the times in which a GPU had nothing to do though there were requests.

    A bubble belongs to the step that ends it.
    """
    reached: int | None = None
    for span in sorted(busy, key=_place):
        if reached is not None and span.begin > reached:
            for begin, end in _without(reached, span.begin, idle):
                yield Span(BUBBLE, begin, end, span.step, NO_FRAME, 0)
        reached = max(reached or span.end, span.end)


def _without(begin: int, end: int, idle: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of a time in which rank 0 had requests. idle: in order, none overlap."""
    for _, idle_begin, idle_end, _, _ in idle[bisect_right(idle, begin, key=itemgetter(2)) :]:
        if idle_begin >= end:
            break
        if idle_begin > begin:
            yield begin, idle_begin
        begin = idle_end
    if begin < end:
        yield begin, end


def _place(span: Span) -> tuple[int, int, int]:
    """Return by what a lane is ordered: what is around a span comes before it."""
    return span.begin, span.depth, span.end
