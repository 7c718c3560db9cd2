"""What led to what: arrows from a span to another one, on whichever rank.

    frame    rank 0's send    ->  each other rank's receive
    launch   a CPU's lap      ->  the step's first work on that rank's GPU
    output   the step's last work on rank 0  ->  rank 0's wait for it

An arrow leaves and arrives inside its spans and never points back in time. What would have to,
because the clocks of CPU and GPU differ by more than a span's length, is not drawn but counted; so
is an arrow of which a full ring has lost one end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nanorunner.workers.spans import DOWNLOAD, FORWARD, GRAPH, RECEIVE, SAMPLE, SEND, WAIT
from nanorunner.workshop.timeline_lanes import (
    COPY_LANE,
    CPU_LANE,
    GPU_LANE,
    WIRE_LANE,
    Lanes,
    Span,
)
from nanorunner.workshop.timeline_read import Run

FRAME, LAUNCH, OUTPUT = ARROWS = ("frame", "launch", "output")
# what a step's output waits for; drafts for the next step come behind it
OUTPUT_NAMES = (FORWARD, SAMPLE, GRAPH, DOWNLOAD)
# why an arrow is not drawn
IS_LOST = "one of their spans was lost"
IS_BACKWARDS = "the clocks of CPU and GPU are not that exact"


class End(NamedTuple):
    """One end of an arrow."""

    rank: int
    lane: str
    at: int  # ns, inside a span of that lane


class Arrow(NamedTuple):
    """From one span to another."""

    kind: str  # of ARROWS
    step: int
    frame: int
    tail: End
    head: End


class Arrows(NamedTuple):
    """All arrows of a run, and how many could not be drawn, by the reason."""

    drawn: list[Arrow]
    not_drawn: dict[str, int]


def arrows_of(run: Run, ranks: Sequence[Lanes]) -> Arrows:
    """Return the arrows; ValueError when a frame was not received though no span is lost."""
    found = [*_frames(run, ranks), *_launches(ranks), *_outputs(run, ranks[0])]
    drawn = [arrow for arrow in found if isinstance(arrow, Arrow)]
    return Arrows(drawn, dict(Counter(reason for reason in found if isinstance(reason, str))))


def _frames(run: Run, ranks: Sequence[Lanes]) -> Iterator[Arrow | str]:
    """Yield an arrow a frame and rank, or why there is none."""
    sends = {span.frame: span for span in ranks[0].spans[WIRE_LANE] if span.name == SEND}
    for lanes in ranks[1:]:
        receives = {span.frame: span for span in lanes.spans[WIRE_LANE] if span.name == RECEIVE}
        for frame in sorted(sends.keys() | receives.keys()):
            send, receive = sends.get(frame), receives.get(frame)
            if send is None or receive is None:
                if not run.num_lost:
                    what = "was never sent" if send is None else "never came to it"
                    raise ValueError(
                        f"{run.folder}: rank {lanes.rank}: frame {frame} {what}, though no span is "
                        f"lost; the files are not of one run"
                    )
                yield IS_LOST
                continue
            # the ranks are woken before send() returns: one may receive while it still runs
            leaves = min(send.end, max(send.begin, receive.begin))
            yield _arrow(
                FRAME, send.step, (0, WIRE_LANE, send, leaves), (lanes.rank, WIRE_LANE, receive)
            )


def _launches(ranks: Sequence[Lanes]) -> Iterator[Arrow | str]:
    """Yield an arrow a step and GPU, from the lap that enqueued the first of its work."""
    for lanes in ranks:
        laps = {(span.step, span.name): span for span in reversed(lanes.spans[CPU_LANE])}
        seen = set()
        for work in lanes.spans[GPU_LANE]:
            if work.step in seen:
                continue
            seen.add(work.step)
            # what lies inside a graph has no lap of its own
            lap = laps.get((work.step, work.name), laps.get((work.step, GRAPH)))
            if lap is None:
                yield IS_LOST
                continue
            leaves = min(lap.end, max(lap.begin, work.begin))  # an eager lap goes on enqueueing
            yield _arrow(
                LAUNCH, work.step, (lanes.rank, CPU_LANE, lap, leaves), (lanes.rank, GPU_LANE, work)
            )


def _outputs(run: Run, lanes: Lanes) -> Iterator[Arrow | str]:
    """Yield an arrow a step whose output rank 0 has waited for."""
    waits = {span.step: span for span in reversed(lanes.spans[CPU_LANE]) if span.name == WAIT}
    last: dict[int, tuple[str, Span]] = {}
    for lane in (GPU_LANE, COPY_LANE) if run.has_gpu else (CPU_LANE,):  # who did the work
        for span in lanes.spans[lane]:
            if span.name not in OUTPUT_NAMES:
                continue
            if span.step not in last or span.end > last[span.step][1].end:
                last[span.step] = lane, span
    for step, wait in sorted(waits.items()):
        if step not in last:
            continue  # it computed nothing
        lane, work = last[step]
        yield _arrow(OUTPUT, step, (0, lane, work, work.end), (0, CPU_LANE, wait))


def _arrow(
    kind: str, step: int, tail: tuple[int, str, Span, int], head: tuple[int, str, Span]
) -> Arrow | str:
    """Return an arrow that arrives as soon as it can, or why there is none."""
    tail_rank, tail_lane, from_span, leaves = tail
    head_rank, head_lane, to_span = head
    leaves = _inside(from_span, min(leaves, to_span.end))
    arrives = _inside(to_span, leaves)
    if arrives < leaves:
        return IS_BACKWARDS
    return Arrow(
        kind,
        step,
        from_span.frame or to_span.frame,
        End(tail_rank, tail_lane, leaves),
        End(head_rank, head_lane, arrives),
    )


def _inside(span: Span, at: int) -> int:
    """Return the moment of a span that is the nearest to `at`.

    Not its very end or begin, where it meets its neighbours: a viewer must not take one of them.
    """
    margin = min(1, (span.end - span.begin) // 2)
    return max(span.begin + margin, min(at, span.end - margin))
