"""Where a step's time goes: named spans of the CPU and of the GPU, in memory allocated beforehand.

    engine.py, launch.py, loop.py, the runners -> SpanRecorder -> WordRing
    CUDA events -> gpu_spans.py -------------------------------------^
    `spans` on the wire -> RankSpans -> step_times.py      trace_file.py -> DIR/rank-N.jsonl

    span, words of 8 bytes:  | name | kind | begin ns | end ns | step | frame |

Every time is of time.perf_counter_ns. On Linux that is CLOCK_MONOTONIC, one clock for all processes
of a machine; clock_problem() checks it. A rank has one recorder, or None: then nothing is recorded
and each place that would costs one branch. One thread uses it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from nanorunner.workers.gpu_spans import GpuSpans

Int64 = npt.NDArray[np.int64]

# Every name that a span may have, and what happens in it. A GPU span has the name of the CPU span
# that enqueued it; on a CPU that one is the work itself.
MEANINGS = {
    "schedule": "rank 0: the scheduler plans the step",
    "wire": "the plan is packed, sent to the other ranks and unpacked",
    "apply": "requests come and go in the runner's books",
    "stage": "what changed and who is in the batch is copied to the device",
    "prepare": "the inputs of the forward are made",
    "forward": "the layers, from ids to the last hidden states",
    "sample": "the head's logits, the sampled ids, the rows' advance",
    "graph": "CPU: a captured graph is launched; GPU: a graph whose parts cannot be told apart",
    "draft": "with speculation: drafts for the next step are made",
    "all_reduce": "in forward: a sum over the ranks",
    "exchange": "in sample: a maximum, or logits gathered, over the ranks",
    "download": "results are copied to the host, or the event behind them is recorded",
    "wait": "rank 0: the CPU waits for the output",
    "update": "rank 0: the scheduler takes the ids in",
    "bubble": "the GPU waits for the CPU, between steps or within one; derived, never recorded",
    "idle": "rank 0: no request waits or runs",
    "send": "rank 0: a frame is pickled and put on the wire",
    "receive": "a frame is copied out of the ring, acked and unpickled",
    "ack": "the moment of a frame's ack, within receive",
    "run": "a call is made on this rank",
}
NAMES = tuple(MEANINGS)
SCHEDULE, WIRE, APPLY, STAGE, PREPARE, FORWARD, SAMPLE, GRAPH, DRAFT = range(9)
ALL_REDUCE, EXCHANGE, DOWNLOAD, WAIT, UPDATE, BUBBLE, IDLE = range(9, 16)
SEND, RECEIVE, ACK, RUN = range(16, 20)
KINDS = ("cpu", "gpu")
CPU, GPU = range(2)
NO_STEP = -1
NO_FRAME = 0  # at tp 1 nothing is sent

SPAN_WORDS = 6
WORD_BYTES = 8
# At the 12 to 20 spans of a step these are 13,000 steps and more; 12 MiB.
MAX_SPANS = 1 << 18
MAX_STEPS = 1 << 16


class SpanTable(NamedTuple):
    """Spans in the order of their ends' recording, a column each, all [n] int64."""

    name: Int64  # index into NAMES
    kind: Int64  # index into KINDS
    begin: Int64
    end: Int64
    step: Int64  # NO_STEP: of no step
    frame: Int64  # NO_FRAME: of no frame


class StepFacts(NamedTuple):
    """What each step computed, a column each, all [m] int64; rank 0's alone."""

    step: Int64
    num_requests: Int64
    num_tokens: Int64
    kv_positions: Int64  # cached positions that it touches
    attended: Int64  # (query, key) pairs
    num_logits: Int64  # rows that go through the head
    num_all_reduces: Int64  # called, whether or not they were timed


class RankSpans(NamedTuple):
    """What one rank has recorded, as it crosses the wire; every time is of the CPU's clock."""

    rank: int
    words: bytes  # [n, SPAN_WORDS] int64
    fact_words: bytes  # [m, fields of StepFacts] int64
    num_lost: int  # spans that the ring has overwritten, or whose events never came
    taken_ns: int  # when it was put together
    anchors: tuple[tuple[int, int, int], ...]  # GPU ns, host ns, +- ns; () on a CPU
    notes: tuple[str, ...]  # what a reader of the figures must know

    def table(self) -> SpanTable:
        """Return the spans."""
        return SpanTable(*np.frombuffer(self.words, np.int64).reshape(-1, SPAN_WORDS).T)

    def facts(self) -> StepFacts:
        """Return what the steps computed."""
        width = len(StepFacts._fields)
        return StepFacts(*np.frombuffer(self.fact_words, np.int64).reshape(-1, width).T)


class WordRing:
    """Records of `words` int64 each; a full ring forgets its oldest.

    Owner: a recorder. Place: host memory, taken at the start; pages come as it fills. Lifetime: the
    recorder's. Last writer: push().
    """

    def __init__(self, capacity: int, words: int) -> None:
        self.num_pushed = 0
        self._capacity = capacity
        self._words = words
        self._bytes = words * WORD_BYTES
        self._memory = bytearray(capacity * self._bytes)
        self._pack_into = struct.Struct(f"={words}q").pack_into

    @property
    def num_lost(self) -> int:
        """How many records were overwritten."""
        return max(0, self.num_pushed - self._capacity)

    def push(self, *words: int) -> None:
        """Add a record."""
        self._pack_into(self._memory, self.num_pushed % self._capacity * self._bytes, *words)
        self.num_pushed += 1

    def rows(self) -> Int64:
        """Return a copy [n, words] of the records that are there, the oldest first."""
        rows = np.frombuffer(self._memory, np.int64).reshape(-1, self._words)
        rows = rows[: self.num_pushed]
        return np.roll(rows, -(self.num_pushed % self._capacity) if self.num_lost else 0, axis=0)


class Nvtx(Protocol):
    """What is asked of torch.cuda.nvtx, whose marks and ranges a profiler such as Nsight shows."""

    def mark(self, message: str) -> object:
        """Note that something is now."""

    def range_push(self, message: str) -> object:
        """Begin a range inside the one that is open."""

    def range_pop(self) -> object:
        """End the range that was begun last."""


class SpanRecorder:
    """Records the spans of one rank.

    Laps: each ends where it is called and begins where the last one ended, so the laps of a rank
    follow one another and leave nothing out. Frames and what lies inside a lap have a begin of
    their own.

    nvtx: is told the same names, None where nobody is. A range there is named when it begins, and
    what a lap was is known when it ends: so a CPU span is a mark at its end, and a range only what
    is begun by name: a run, a step, what lies inside a lap.
    """

    now = staticmethod(time.perf_counter_ns)

    def __init__(
        self,
        rank: int,
        gpu: GpuSpans | None = None,
        max_spans: int = MAX_SPANS,
        nvtx: Nvtx | None = None,
    ) -> None:
        self.rank = rank
        self.gpu = gpu
        self._nvtx = nvtx
        self.ring = WordRing(max_spans, SPAN_WORDS) if gpu is None else gpu.ring
        self._facts = WordRing(MAX_STEPS, len(StepFacts._fields))
        self._batch: tuple[int, ...] | None = None  # of the step in progress
        self._num_all_reduces = 0
        self._step, self._frame = NO_STEP, NO_FRAME
        self._is_in_step = False  # else warm-up, which nobody wants to see, or a capture
        self._planned = NO_STEP  # scheduled and not yet sent
        self._mark = self._run_begin = self.now()
        self._resting_since: int | None = None

    # Rank 0's engine.

    def begin_round(self) -> None:
        """Begin the laps of one turn of the engine."""
        now = self.now()
        if self._resting_since is not None:
            self._push(IDLE, self._resting_since, now, NO_STEP, NO_FRAME)
            self._resting_since = None
        self._mark = now

    def lap_of(self, name: int, step: int) -> None:
        """End a lap of the engine, which may be about another step than the one last enqueued."""
        now = self.now()
        self._push(name, self._mark, now, step, NO_FRAME)
        self._mark = now
        if name == SCHEDULE:
            self._planned = step

    def rest(self) -> None:
        """Note that the engine has nothing left to do, until the next begin_round()."""
        self._resting_since = self.now()

    # Frames. `begin` is now() before the work.

    def sent(self, frame: int, begin: int) -> None:
        """Note that rank 0 has put a frame on the wire."""
        self._frame = frame
        self._step, self._planned = self._planned, NO_STEP
        self._push(SEND, begin, self.now(), self._step, frame)

    def acked(self, frame: int) -> None:
        """Note that this rank has just acked a frame."""
        now = self.now()
        self._push(ACK, now, now, NO_STEP, frame)

    def received(self, frame: int, begin: int) -> None:
        """Note that this rank has a call, and begin its run."""
        self._frame, self._step = frame, NO_STEP
        self._mark = self._run_begin = self.now()
        self._push(RECEIVE, begin, self._mark, NO_STEP, frame)
        self._push_range(NAMES[RUN])

    def begin_run(self) -> None:
        """Rank 0: end the wire's lap if a step is on it, and begin the call's run."""
        now = self.now()
        if self._step != NO_STEP:
            self._push(WIRE, self._mark, now, self._step, self._frame)
        self._push_range(NAMES[RUN])
        self._mark = self._run_begin = now

    def end_run(self) -> None:
        """Note that the call has been made."""
        self._mark = self.now()
        self._pop_range()
        self._push(RUN, self._run_begin, self._mark, self._step, self._frame)

    # A runner's step.

    def begin_step(self, step: int) -> None:
        """Begin a step; what has led to it since the last lap was the wire's."""
        self._step = step
        self._is_in_step = True
        self._batch, self._num_all_reduces = None, 0
        self._push_range(f"step {step}")
        self.lap(WIRE)
        if self.gpu is not None:
            self.gpu.begin_step()
            self._mark = self.now()  # reading the last steps' events is no part of this one

    def lap(self, name: int, *, on_gpu: bool = False) -> None:
        """End a lap of the step. on_gpu: what it enqueued on the main stream is a GPU span, too.

        During a capture only the event is recorded, into the graph; outside of a step nothing is.
        """
        gpu = self.gpu if on_gpu else None
        if not self._is_in_step:
            if gpu is not None:
                gpu.mark_in_graph(name)
            return
        now = self.now()
        self._push(name, self._mark, now, self._step, self._frame)
        self._mark = now
        if gpu is not None:
            gpu.mark(name)

    def begin_gpu(self) -> None:
        """Note that what is enqueued from here on is the step's first work on the GPU.

        Does nothing on a CPU, outside of a step, and when there is earlier work.
        """
        if self.gpu is not None and self._is_in_step:
            self.gpu.begin()

    def note_batch(self, counts: Int64, computed: Int64, num_logits: int) -> None:
        """Keep what the step computes: counts [n] tokens behind computed [n] cached ones."""
        if self.rank != 0 or not len(counts):
            return
        num_tokens, ends = int(counts.sum()), computed + counts
        kv_positions = attended = int(ends.sum())
        if num_tokens != len(counts):  # else one token each, which attends all positions once
            attended = int((counts * (computed + ends + 1)).sum()) // 2
        self._batch = (len(counts), num_tokens, kv_positions, attended, num_logits)

    def replay(self, copies: Sequence[Any]) -> Any:
        """Replay one of the equal graphs (cuda_graphs.CapturedGraph) and return it."""
        gpu = self.gpu
        if gpu is None or not self._is_in_step:
            copies[0].graph.replay()
            return copies[0]
        captured = gpu.replay(copies)
        self._num_all_reduces += captured.marks.num_all_reduces
        self.lap(GRAPH)
        return captured

    def begin_inner(self, name: int) -> Any:
        """Begin a span inside a lap; return what end_inner() takes, None if it is not timed."""
        if not self._is_in_step:
            return None if self.gpu is None else self.gpu.begin_inner_in_graph(name)
        self._num_all_reduces += name == ALL_REDUCE
        begun = self.now() if self.gpu is None else self.gpu.begin_inner(name)
        if begun is not None:
            self._push_range(NAMES[name])
        return begun

    def end_inner(self, name: int, begun: Any) -> None:
        """End a span inside a lap."""
        if self._is_in_step:
            self._pop_range()
        if self.gpu is not None:
            self.gpu.end_inner(name, begun)
        else:
            self._push(name, begun, self.now(), self._step, self._frame)

    def end_step(self) -> None:
        """End the step: all its work is enqueued."""
        self._is_in_step = False
        self._pop_range()
        if self._batch is not None:
            self._facts.push(self._step, *self._batch, self._num_all_reduces)
        if self.gpu is not None:
            self.gpu.end_step(self._step, self._frame)

    # Afterwards.

    def collect(self, timeout_s: float) -> RankSpans:
        """Return all that is recorded, between two steps; it stays recorded.

        Waits for the GPU's last events, at most timeout_s; those that do not come are lost.
        """
        gpu = self.gpu
        if gpu is not None:
            gpu.settle(timeout_s)
        rows = self.ring.rows()
        if gpu is not None:
            is_gpu = rows[:, 1] == GPU
            rows[is_gpu, 2:4] = gpu.clock.to_host(rows[is_gpu, 2:4])
        return RankSpans(
            rank=self.rank,
            words=rows.tobytes(),
            fact_words=self._facts.rows().tobytes(),
            num_lost=self.ring.num_lost + (0 if gpu is None else gpu.num_lost),
            taken_ns=self.now(),
            anchors=() if gpu is None else tuple(gpu.clock.anchors),
            notes=() if gpu is None else gpu.notes(),
        )

    def _push(self, name: int, begin: int, end: int, step: int, frame: int) -> None:
        """Record a span of the CPU that has just ended."""
        self.ring.push(name, CPU, begin, end, step, frame)
        if self._nvtx is not None:
            self._nvtx.mark(NAMES[name])

    def _push_range(self, name: str) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(name)

    def _pop_range(self) -> None:
        if self._nvtx is not None:
            self._nvtx.range_pop()


def clock_problem(asked_ns: int, spans: Sequence[RankSpans], answered_ns: int) -> str:
    """Return why the ranks' clocks are not one, "" when they are.

    Every rank put its spans together after rank 0 had asked and before it had all the answers.
    """
    for rank in spans:
        if not asked_ns <= rank.taken_ns <= answered_ns:
            return (
                f"rank {rank.rank} answered at {rank.taken_ns} ns by its own clock, but was asked "
                f"at {asked_ns} and heard by {answered_ns}: their spans cannot be put on one clock"
            )
    return ""
