"""GPU spans by timing events: in eager steps on the stream, in captured ones inside the graph.

    begin, mark(name), mark(name), ...     events on the main stream; a span lies between two
    replay(copies)                         the events that the graph recorded at capture are passed
                                           anew in every replay
    end_step                               one event more: once it is passed, so are all of a step's

Nothing waits, but for the clock's anchors: a step's events are read when a later step begins. A
graph's events hold one replay's times only until its next one, so each graph is captured as often
as steps can be unread, and the copies take turns. A copy whose events were not read in time costs
its measurement, never a wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanorunner.workers.gpu_clock import NS_A_MS, GpuClock, TimingEvent
from nanorunner.workers.spans import ALL_REDUCE, DOWNLOAD, GPU, GRAPH, WordRing

BEGIN = -1  # in place of a name: the next span begins here, and none ends
POLL_S = 20e-6
ANCHOR_AFTER_NS = 1_000_000_000  # a GPU's clock and a CPU's part by up to some 10 us in a second
# All-reduces of a step that are timed, spread over its layers. An event in a graph costs the GPU
# time of its own, and a forward has two all-reduces a layer: to time all would slow it down.
NUM_TIMED_ALL_REDUCES = 2


class Inner(NamedTuple):
    """A span inside another one, by its two events."""

    name: int
    begin: TimingEvent
    end: TimingEvent


@dataclass
class GraphMarks:
    """The events inside one captured graph. They live as long as the graph."""

    marks: list[tuple[int, TimingEvent]] = field(default_factory=list)
    inner: list[Inner] = field(default_factory=list)
    num_all_reduces: int = 0  # called in the body, timed or not


@dataclass
class Pending:
    """A step whose events the GPU may not have passed yet."""

    step: int
    frame: int
    marks: list[tuple[int, TimingEvent]]
    inner: list[Inner]
    graphs: list[GraphMarks]  # whose events are among them
    own: list[TimingEvent]  # the others, which are used again
    done: TimingEvent

    def is_passed(self) -> bool:
        """Return whether the GPU has passed all events, those of the copy stream too."""
        side_ends = (each.end for each in self.inner if each.name == DOWNLOAD)
        return self.done.query() and all(end.query() for end in side_ends)


class GpuSpans:
    """The GPU spans of one rank, all of one stream but for those inside a side stream's copies.

    new_event: makes a timing event; new_graph_event: one that can be recorded inside a graph, None
    when this PyTorch has none, for the reason graph_problem. graph_copies: how often to capture
    each graph. all_reduces: how many a forward has.
    """

    def __init__(
        self,
        ring: WordRing,
        new_event: Callable[[], TimingEvent],
        new_graph_event: Callable[[], TimingEvent] | None,
        *,
        graph_problem: str = "",
        graph_copies: int = 1,
        all_reduces: int = 0,
        clock: GpuClock | None = None,
    ) -> None:
        self.ring = ring
        self.clock = GpuClock(new_event) if clock is None else clock
        self.graph_copies = 1 if new_graph_event is None else graph_copies
        self.num_lost = 0
        self._new_event = new_event
        self._new_graph_event = new_graph_event
        self._graph_problem = graph_problem
        self._num_replays = 0
        self._num_steps = 0  # whose turn it is among a graph's copies
        self._capturing: GraphMarks | None = None
        # odd: attention's and the MLP's are timed in turns
        self._stride = all_reduces // NUM_TIMED_ALL_REDUCES | 1
        self._num_all_reduces = 0  # of the step or graph in progress
        self._free: list[TimingEvent] = []
        self._pending: deque[Pending] = deque()
        self._begin_anew()

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the spans must know."""
        notes = []
        if self._graph_problem and self._num_replays:
            notes.append(f"a graph is one span, as {self._graph_problem}")
        if self._stride > 1:
            notes.append(
                f"of a forward's all-reduces on the GPU every {self._stride}th is timed, and "
                f"stands for the others"
            )
        return tuple(notes)

    # A step.

    def begin_step(self) -> None:
        """Read what has been passed meanwhile, and begin a step."""
        self._num_steps += 1
        self._read_passed()
        if not self._pending and self._is_anchor_old():
            self.clock.anchor()  # nothing is enqueued: the last step has been read, or never was
        self._begin_anew()

    def begin(self) -> None:
        """Begin the step's first span, unless there is one."""
        if not self._marks:
            self._marks.append((BEGIN, self._record()))

    def mark(self, name: int) -> None:
        """End a span that began at the mark before; before begin() there is nothing to end."""
        if self._marks:
            self._marks.append((name, self._record()))

    def begin_inner(self, name: int) -> TimingEvent | None:
        """Begin a span inside another one, or on a side stream; None: this one is not timed."""
        return self._record() if self._is_timed(name) else None

    def end_inner(self, name: int, begin: TimingEvent) -> None:
        """End it."""
        if self._capturing is not None:
            self._capturing.inner.append(Inner(name, begin, self._record_in_graph()))
        else:
            self._inner.append(Inner(name, begin, self._record()))

    def replay(self, copies: Sequence[Any]) -> Any:
        """Replay the copy (cuda_graphs.CapturedGraph) whose turn it is, and return it."""
        captured = copies[self._num_steps % len(copies)]
        self._num_replays += 1
        if self._new_graph_event is None:
            self._marks.append((BEGIN, self._record()))
            captured.graph.replay()
            self.mark(GRAPH)
            return captured
        self._give_up(captured.marks)
        captured.graph.replay()
        self._graphs.append(captured.marks)
        self._marks += captured.marks.marks
        self._inner += captured.marks.inner
        return captured

    def end_step(self, step: int, frame: int) -> None:
        """Note that all of the step is enqueued."""
        if not self._marks:
            self._free += self._own
            return
        done = self._record()
        self._pending.append(
            Pending(step, frame, self._marks, self._inner, self._graphs, self._own, done)
        )

    # A capture.

    def begin_capture(self) -> None:
        """Begin a graph: called first inside the capture."""
        self._capturing = GraphMarks()
        self._num_all_reduces = 0
        self.mark_in_graph(BEGIN)

    def mark_in_graph(self, name: int) -> None:
        """Put the end of a span into the graph that is being captured, if one is."""
        if self._capturing is not None and self._new_graph_event is not None:
            self._capturing.marks.append((name, self._record_in_graph()))

    def begin_inner_in_graph(self, name: int) -> TimingEvent | None:
        """Begin a span inside another one in a graph; None: not timed, or nothing is captured."""
        if self._capturing is None or not self._is_timed(name):
            return None
        return None if self._new_graph_event is None else self._record_in_graph()

    def end_capture(self) -> GraphMarks:
        """Return the events inside the graph that was captured."""
        marks, self._capturing = self._capturing, None
        assert marks is not None, "begin_capture() comes first"
        marks.num_all_reduces = self._num_all_reduces
        return marks

    # Afterwards.

    def settle(self, timeout_s: float) -> None:
        """Read all events, waiting at most timeout_s; what is not passed by then is lost.

        If all are, nothing is enqueued, and the clocks are compared once more.
        """
        deadline = time.monotonic() + timeout_s
        self._read_passed()
        while self._pending and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._read_passed()
        if not self._pending:
            self.clock.anchor()
        while self._pending:
            self._lose(self._pending.pop())

    def _begin_anew(self) -> None:
        self._marks: list[tuple[int, TimingEvent]] = []
        self._inner: list[Inner] = []
        self._graphs: list[GraphMarks] = []
        self._own: list[TimingEvent] = []
        self._num_all_reduces = 0

    def _is_anchor_old(self) -> bool:
        anchors = self.clock.anchors
        return not anchors or self.clock.now() - anchors[-1].host_ns > ANCHOR_AFTER_NS

    def _is_timed(self, name: int) -> bool:
        """Count an all-reduce; return whether this one is among those that are timed."""
        if name != ALL_REDUCE:
            return True
        self._num_all_reduces += 1
        return (self._num_all_reduces - 1) % self._stride == self._stride // 2

    def _record(self) -> TimingEvent:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._own.append(event)
        return event

    def _record_in_graph(self) -> TimingEvent:
        assert self._new_graph_event is not None, "the callers have asked"
        event = self._new_graph_event()
        event.record()
        return event

    def _read_passed(self) -> None:
        while self._pending and self._pending[0].is_passed():
            self._read(self._pending.popleft())

    def _read(self, pending: Pending) -> None:
        """Push a step's spans, on the GPU's clock until collect() puts them on the CPU's."""
        if not self.clock.anchors:
            self._lose(pending)  # the GPU did not answer when it was asked for the time
            return
        first = pending.marks[0][1]
        first_ns = self.clock.ns_of(first)

        def ns_of(event: TimingEvent) -> int:
            return round(first_ns + first.elapsed_time(event) * NS_A_MS)

        push, begin = self.ring.push, round(first_ns)
        for name, event in pending.marks[1:]:
            end = ns_of(event)
            if name != BEGIN:
                push(name, GPU, begin, end, pending.step, pending.frame)
            begin = end
        for name, first_event, last_event in pending.inner:
            push(name, GPU, ns_of(first_event), ns_of(last_event), pending.step, pending.frame)
        is_kept = self.clock.follow(pending.done)
        self._free += [each for each in pending.own if not (is_kept and each is pending.done)]

    def _give_up(self, marks: GraphMarks) -> None:
        """Drop an unread step whose graph is about to run again."""
        for pending in list(self._pending):
            if any(graph is marks for graph in pending.graphs):
                self._pending.remove(pending)
                self._lose(pending)

    def _lose(self, pending: Pending) -> None:
        num_marks = sum(name != BEGIN for name, _ in pending.marks)
        self.num_lost += num_marks + len(pending.inner)
        self._free += pending.own
