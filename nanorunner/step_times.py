"""Where the steps' time went, from what rank 0 recorded: the parts' medians, tails and shares.

    RankSpans -> step_times() -> {"parts": {name: ...}, ...} -> step_lines()

A CPU step lies between two outputs: from the end of one `update` to the end of the next. Its parts
and `other` (the caller, and what nothing names) make it up wholly. Beside it the GPU's parts and
its `bubble` make up the same time: with two steps in flight the GPU works on one while the CPU is
at the next. Time in which no request was there is in neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nanorunner.workers.spans import (
    ALL_REDUCE,
    APPLY,
    BUBBLE,
    CPU,
    DOWNLOAD,
    DRAFT,
    EXCHANGE,
    FORWARD,
    GPU,
    GRAPH,
    IDLE,
    KINDS,
    NAMES,
    NO_STEP,
    PREPARE,
    SAMPLE,
    SCHEDULE,
    STAGE,
    UPDATE,
    WAIT,
    WIRE,
    Int64,
    RankSpans,
    SpanTable,
)

Nanoseconds = npt.NDArray[np.float64]  # [num_steps]

OTHER = "other"
LAUNCH = " launch"  # of the CPU's part of that name, where the GPU has one as well
# In the order in which they are stacked: as they come in a step, what lies inside behind its lap.
STACKED = (
    *(SCHEDULE, WIRE, APPLY, STAGE, PREPARE, FORWARD, ALL_REDUCE, SAMPLE, EXCHANGE, GRAPH),
    *(DRAFT, DOWNLOAD, WAIT, UPDATE),
)
INSIDE = {ALL_REDUCE: FORWARD, EXCHANGE: SAMPLE}
ROW = "{:<18} {:<4} {:>11} {:>11} {:>11} {:>8}"


def step_times(spans: RankSpans, begin_ns: int = 0, end_ns: int | None = None) -> dict[str, Any]:
    """Return rank 0's parts of the steps that began and ended within a time, as a result has them.

    {"rank", "num_steps", "step_us": {"median", "p95", "mean"}, "parts": {name: {"kind": "cpu" |
    "gpu", "median_us", "p95_us", "mean_us", "share": of the steps' time}}, "gpu_idle_share": of the
    GPU's time or None, "num_lost", "note"}. Raises ValueError when there is no such step.
    """
    table = spans.table()
    steps = whole_steps(spans, begin_ns, end_ns)
    if not steps.size:
        raise ValueError("no step was recorded from its schedule to its update")
    is_cpu, is_gpu = table.kind == CPU, table.kind == GPU
    start, ends = _turns(table, steps)
    idle = _select(table, (table.name == IDLE) & (table.begin >= start) & (table.end <= ends[-1]))
    periods = np.diff(ends, prepend=start) - _by_turn(idle, ends)

    cpu = _select(table, is_cpu & (table.begin >= start) & (table.end <= ends[-1]))
    cpu_parts = {name: _by_turn(_select(cpu, cpu.name == name), ends) for name in STACKED}
    gpu = _select(table, is_gpu & np.isin(table.step, steps))
    gpu_parts = {name: _by_step(_select(gpu, gpu.name == name), steps) for name in STACKED}
    _scale_all_reduces(gpu_parts, gpu, spans, steps)
    for parts in (cpu_parts, gpu_parts):
        for inner, outer in INSIDE.items():
            parts[outer] = np.maximum(parts[outer] - parts[inner], 0)

    other = np.maximum(periods - np.sum(list(cpu_parts.values()), axis=0), 0)
    found = {}
    for name in STACKED:
        has_both = cpu_parts[name].any() and gpu_parts[name].any()
        found[NAMES[name] + (LAUNCH if has_both else "")] = CPU, cpu_parts[name]
    found[OTHER] = CPU, other
    idle_share = None
    if gpu.name.size:
        found |= {NAMES[name]: (GPU, gpu_parts[name]) for name in STACKED if gpu_parts[name].any()}
        bubbles, busy_ns = _bubbles(gpu, idle, steps)
        found[NAMES[BUBBLE]] = GPU, bubbles
        idle_share = float(bubbles.sum() / (bubbles.sum() + busy_ns))
    return {
        "rank": spans.rank,
        "num_steps": len(steps),
        "step_us": _figures(periods),
        "parts": {
            name: {
                "kind": KINDS[kind],
                **{f"{figure}_us": value for figure, value in _figures(values).items()},
                "share": float(values.sum() / periods.sum()),
            }
            for name, (kind, values) in found.items()
            if values.any()
        },
        "gpu_idle_share": idle_share,
        "num_lost": spans.num_lost,
        "note": _note(spans, has_gpu=bool(gpu.name.size)),
    }


def whole_steps(spans: RankSpans, begin_ns: int = 0, end_ns: int | None = None) -> Int64:
    """Return, ascending, the steps whose schedule and update are there and within the time."""
    table = spans.table()
    end = table.end.max(initial=0) if end_ns is None else end_ns
    is_within = (table.step != NO_STEP) & (table.begin >= begin_ns) & (table.end <= end)
    begun, ended = (table.step[is_within & (table.name == name)] for name in (SCHEDULE, UPDATE))
    return np.intersect1d(begun, ended)


def step_lines(steps: Mapping[str, Any]) -> list[str]:
    """Return step_times()'s dict as a person reads it."""
    whole = steps["step_us"]
    lines = [
        f"where a step's time goes: {steps['num_steps']:,} steps on rank {steps['rank']}, "
        f"{whole['mean']:,.1f} us each (median {whole['median']:,.1f}, p95 {whole['p95']:,.1f})",
        ROW.format("part", "on", "median us", "p95 us", "mean us", "share"),
    ]
    for name, part in steps["parts"].items():
        figures = (f"{part[key]:,.1f}" for key in ("median_us", "p95_us", "mean_us"))
        lines.append(ROW.format(name, part["kind"], *figures, f"{part['share']:.1%}"))
    if steps["gpu_idle_share"] is not None:
        lines.append(f"GPU idle {steps['gpu_idle_share']:.1%} of the time")
    return [*lines, steps["note"]]


def _turns(table: SpanTable, steps: Int64) -> tuple[int, Int64]:
    """Return when the first step began and when each one's output was taken in."""
    is_first = (table.name == SCHEDULE) & (table.step == steps[0])
    is_update = (table.name == UPDATE) & np.isin(table.step, steps)
    return int(table.begin[is_first].min()), np.sort(table.end[is_update])


def _select(table: SpanTable, mask: npt.NDArray[np.bool_]) -> SpanTable:
    return SpanTable(*(column[mask] for column in table))


def _by_turn(table: SpanTable, ends: Int64) -> Nanoseconds:
    """Return the spans' ns in each turn, the one that they end in."""
    turns = np.searchsorted(ends, table.end)
    return np.bincount(turns, table.end - table.begin, len(ends)).astype(np.float64)


def _by_step(table: SpanTable, steps: Int64) -> Nanoseconds:
    """Return the spans' ns of each step."""
    places = np.searchsorted(steps, table.step)
    return np.bincount(places, table.end - table.begin, len(steps)).astype(np.float64)


def _scale_all_reduces(
    parts: dict[int, Nanoseconds], gpu: SpanTable, spans: RankSpans, steps: Int64
) -> None:
    """Let the all-reduces that were timed stand for all that the step called."""
    facts = spans.facts()
    is_ours = np.isin(facts.step, steps)
    called = np.zeros(len(steps))
    called[np.searchsorted(steps, facts.step[is_ours])] = facts.num_all_reduces[is_ours]
    timed = np.bincount(
        np.searchsorted(steps, gpu.step[gpu.name == ALL_REDUCE]), minlength=len(steps)
    )
    parts[ALL_REDUCE] = parts[ALL_REDUCE] * np.maximum(called / np.maximum(timed, 1), 1)


def _bubbles(gpu: SpanTable, idle: SpanTable, steps: Int64) -> tuple[Nanoseconds, float]:
    """Return the ns before each step, or within it, in which the GPU had nothing to do while there
    were requests; and the ns in which it had.
    """
    order = np.argsort(gpu.begin, kind="stable")
    begin, step = gpu.begin[order], gpu.step[order]
    reached = np.maximum.accumulate(gpu.end[order])
    gap_begin, gap_end = reached[:-1], np.maximum(begin[1:], reached[:-1])
    gaps = gap_end - gap_begin
    busy_ns = float(reached[-1] - begin[0] - gaps.sum())
    for idle_begin, idle_end in zip(idle.begin, idle.end, strict=True):
        overlap = np.minimum(gap_end, idle_end) - np.maximum(gap_begin, idle_begin)
        gaps = gaps - np.maximum(overlap, 0)
    places = np.searchsorted(steps, step[1:])
    return np.bincount(places, gaps, len(steps)).astype(np.float64), busy_ns


def _figures(values: Nanoseconds) -> dict[str, float]:
    microseconds = values / 1000
    return {
        "median": float(np.median(microseconds)),
        "p95": float(np.percentile(microseconds, 95)),
        "mean": float(microseconds.mean()),
    }


def _note(spans: RankSpans, *, has_gpu: bool) -> str:
    notes = ["the recorder ran in every measured pass"]
    if not has_gpu:
        notes.append("no GPU: the CPU's parts are the work itself")
    if spans.num_lost:
        notes.append(f"{spans.num_lost:,} spans were lost, the oldest first")
    return "; ".join([*notes, *spans.notes])
