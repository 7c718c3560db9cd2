"""A profiler sees the recorder's names: marks where laps end, ranges where something is begun."""

from __future__ import annotations

import pytest

from nanorunner.workers.spans import (
    ALL_REDUCE,
    APPLY,
    CPU,
    EXCHANGE,
    FORWARD,
    NAMES,
    SAMPLE,
    SCHEDULE,
    SPAN_WORDS,
    UPDATE,
    WAIT,
    SpanRecorder,
    WordRing,
)


class FakeNvtx:
    """As torch.cuda.nvtx, but it keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.open: list[str] = []

    def mark(self, message: str) -> None:
        self.told.append(f"{'  ' * len(self.open)}{message}")

    def range_push(self, message: str) -> None:
        self.told.append(f"{'  ' * len(self.open)}{message} {{")
        self.open.append(message)

    def range_pop(self) -> None:
        self.open.pop()
        self.told.append(f"{'  ' * len(self.open)}}}")


def step(recorder: SpanRecorder) -> None:
    """Make rank 0's calls of one step at tp 2."""
    recorder.begin_round()
    recorder.lap_of(SCHEDULE, 7)
    recorder.sent(3, recorder.now())
    recorder.begin_run()
    recorder.begin_step(7)
    recorder.lap(APPLY)
    for name in (ALL_REDUCE, EXCHANGE):
        begun = recorder.begin_inner(name)
        if begun is not None:
            recorder.end_inner(name, begun)
        recorder.lap(FORWARD if name == ALL_REDUCE else SAMPLE)
    recorder.end_step()
    recorder.end_run()
    recorder.lap_of(WAIT, 7)
    recorder.lap_of(UPDATE, 7)


STEP = """\
schedule
send
wire
run {
  step 7 {
    wire
    apply
    all_reduce {
    }
    all_reduce
    forward
    exchange {
    }
    exchange
    sample
  }
}
run
wait
update"""


def test_marks_and_ranges_have_the_names_of_the_spans() -> None:
    nvtx = FakeNvtx()
    recorder = SpanRecorder(0, nvtx=nvtx)
    step(recorder)
    assert "\n".join(nvtx.told) == STEP
    assert nvtx.open == []
    table = recorder.collect(1.0).table()
    marks = [line.strip() for line in nvtx.told if line.strip() in NAMES]
    assert marks == [NAMES[name] for name in table.name[table.kind == CPU].tolist()]


def test_a_rank_marks_its_frames_and_leaves_no_range_open() -> None:
    nvtx = FakeNvtx()
    recorder = SpanRecorder(1, nvtx=nvtx)
    recorder.acked(5)
    recorder.received(5, recorder.now())
    recorder.begin_step(2)
    recorder.end_step()
    recorder.end_run()
    assert nvtx.told == ["ack", "receive", "run {", "  step 2 {", "    wire", "  }", "}", "run"]


class UntimedGpu:
    """As GpuSpans when it times no all-reduce of this step, and nothing is captured."""

    def __init__(self) -> None:
        self.ring = WordRing(64, SPAN_WORDS)

    def begin_step(self) -> None: ...

    def end_step(self, step: int, frame: int) -> None: ...

    def begin_inner(self, name: int) -> None: ...


def test_what_is_not_timed_has_no_range() -> None:
    nvtx = FakeNvtx()
    recorder = SpanRecorder(0, UntimedGpu(), nvtx=nvtx)  # type: ignore[arg-type]
    step(recorder)
    assert "all_reduce {" not in {line.strip() for line in nvtx.told}
    assert nvtx.open == []


@pytest.mark.parametrize("is_traced", [True, False])
def test_warm_up_tells_nothing(is_traced: bool) -> None:
    nvtx = FakeNvtx()
    recorder = SpanRecorder(0, nvtx=nvtx if is_traced else None)
    recorder.lap(FORWARD, on_gpu=True)
    assert recorder.begin_inner(ALL_REDUCE) is None
    assert nvtx.told == []
    step(recorder)
    assert bool(nvtx.told) is is_traced
