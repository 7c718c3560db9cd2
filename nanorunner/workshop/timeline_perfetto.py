"""A run in the trace-event format, which https://ui.perfetto.dev and chrome://tracing open.

M      names: a process a rank, a thread a lane
X      a span, its begin and length in us, from the run's first span on
i      an ack, a moment
s, f   an arrow: in the span that it leaves, in the one that it comes to
X      a step, on as many threads as are in flight at once: spans of one must not overlap
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from nanorunner.workers.spans import ACK, BUBBLE, NAMES, NO_FRAME, NO_STEP
from nanorunner.workshop.timeline_arrows import FRAME, LAUNCH, OUTPUT, Arrow
from nanorunner.workshop.timeline_lanes import (
    COPY_LANE,
    CPU_LANE,
    GPU_LANE,
    LANES,
    WIRE_LANE,
    Lanes,
    Span,
)
from nanorunner.workshop.timeline_read import Run
from nanorunner.workshop.timeline_steps import Step

NS_A_US = 1000
STEPS_TID = len(LANES) + 1
MOST_ROWS = 1000  # more than steps in flight
LANE_TITLES = {CPU_LANE: "CPU", WIRE_LANE: "wire", GPU_LANE: "GPU", COPY_LANE: "GPU copies"}
ABSENT = {
    WIRE_LANE: "no wire at tp 1",
    GPU_LANE: "no GPU in this run: the CPU did the work itself",
}
ARROW_TITLES = {FRAME: "frame", LAUNCH: "launch", OUTPUT: "output read"}

Event = dict[str, Any]


def write_events(
    file: TextIO,
    run: Run,
    ranks: Sequence[Lanes],
    arrows: Sequence[Arrow],
    steps: Sequence[Step],
) -> None:
    """Write the whole run as one JSON object, an event a line."""
    origin = run.limits_ns()[0]
    other = {
        "origin_ns": origin,  # of the clock that rank-N.jsonl has
        **{name: run.head[name] for name in ("runner", "tp", "device", "time", "commit")},
        "absent": absent_lanes(run),
        "num_lost": run.num_lost,
    }
    file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(other)},"traceEvents":[')
    separator = "\n"
    for event in _events(run, ranks, arrows, steps, origin):
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]}\n")


def absent_lanes(run: Run) -> dict[str, str]:
    """Return the lanes that this run cannot have, and why, in words."""
    is_absent = {WIRE_LANE: run.tp == 1, GPU_LANE: not run.has_gpu}
    return {lane: why for lane, why in ABSENT.items() if is_absent[lane]}


def _events(
    run: Run,
    ranks: Sequence[Lanes],
    arrows: Sequence[Arrow],
    steps: Sequence[Step],
    origin: int,
) -> Iterator[Event]:
    """Yield the names, then everything else of a lane in the order of time."""
    names: Mapping[str, str] = run.head["names"]
    for lanes in ranks:
        yield from _titles(run, lanes)
    for lanes in ranks:
        for lane in LANES:
            for span in lanes.ordered(lane):
                yield _span_event(span, names, _place(lanes.rank, lane), origin)
    for number, arrow in enumerate(arrows, 1):
        yield from _arrow_events(number, arrow, origin)
    yield from _step_events(steps, origin)


def _titles(run: Run, lanes: Lanes) -> Iterator[Event]:
    place = {"pid": _pid(lanes.rank), "tid": 0}
    trace = run.ranks[lanes.rank]

    def title(kind: str, place: Mapping[str, int], **args: Any) -> Event:
        return {"ph": "M", "name": kind, **place, "args": args}

    yield title("process_name", place, name=f"rank {lanes.rank} (pid {trace.pid})")
    labels = [f"{run.head['runner']}, {run.head['device']}", *absent_lanes(run).values()]
    yield title("process_labels", place, labels="; ".join(labels))
    yield title("process_sort_index", place, sort_index=lanes.rank)
    for index, lane in enumerate(LANES):
        if lanes.spans[lane]:
            thread = _place(lanes.rank, lane)
            yield title("thread_name", thread, name=LANE_TITLES[lane])
            yield title("thread_sort_index", thread, sort_index=index)


def _span_event(
    span: Span, names: Mapping[str, str], place: Mapping[str, int], origin: int
) -> Event:
    name = NAMES[span.name]
    args: dict[str, Any] = {"meaning": names[name]}
    if span.step != NO_STEP:
        args["step"] = span.step
    if span.frame != NO_FRAME:
        args["frame"] = span.frame
    event: Event = {"name": name, "cat": "bubble" if span.name == BUBBLE else "span"}
    if span.name == ACK:
        return {**event, "ph": "i", "s": "t", "ts": _us(span.begin - origin), **place, "args": args}
    times = {"ts": _us(span.begin - origin), "dur": _us(span.end - span.begin)}
    return {**event, "ph": "X", **times, **place, "args": args}


def _arrow_events(number: int, arrow: Arrow, origin: int) -> Iterator[Event]:
    common = {"name": ARROW_TITLES[arrow.kind], "cat": arrow.kind, "id": number}
    tail, head = arrow.tail, arrow.head
    times = _us(tail.at - origin), _us(head.at - origin)
    yield {**common, "ph": "s", "ts": times[0], **_place(tail.rank, tail.lane)}
    # e: it is bound to the span around it, not to the next one
    yield {**common, "ph": "f", "bp": "e", "ts": times[1], **_place(head.rank, head.lane)}


def _step_events(steps: Sequence[Step], origin: int) -> Iterator[Event]:
    """Yield the steps, each on the first thread on which the last one has ended."""
    ends: list[int] = []
    for step in steps:
        free = (row for row, end in enumerate(ends) if end <= step.begin)
        row = next(free, len(ends))
        place = {"pid": _pid(0), "tid": STEPS_TID + row}
        if row == len(ends):
            ends.append(step.end)
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": "steps"}}
            sort_index = {"sort_index": row - MOST_ROWS}  # above the lanes
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": sort_index}
        ends[row] = step.end
        times = {"ts": _us(step.begin - origin), "dur": _us(step.end - step.begin)}
        args = {"step": step.number, "what": step.in_words()}
        name = {"name": f"step {step.number}", "cat": "step"}
        yield {**name, "ph": "X", **times, **place, "args": args}


def _place(rank: int, lane: str) -> dict[str, int]:
    return {"pid": _pid(rank), "tid": LANES.index(lane) + 1}


def _pid(rank: int) -> int:
    """Return a process number for a rank. 0 would be the kernel's in a viewer."""
    return rank + 1


def _us(ns: int) -> float:
    return ns / NS_A_US
