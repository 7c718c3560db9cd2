"""Measured points as the figures and tables see them, whatever file they came from.

    result_files.py -> [Record] -> together() -> label() -> figures.py, report.py, tables.py

A Record is one point: its settings by name, and for each metric the values of all repeats, of
however many processes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nanorunner.bench.environment import ENVIRONMENT_NAMES, environment_of
from nanorunner.workers.model_config import ModelConfig

# A label always holds these where they differ; others only where they tell two points apart.
FIRST_NAMES = ("model", "tp", "runner", "side", "workload", "batch")
# What never tells points apart for a reader: it follows from the others, or is no setting.
NEVER_NAMES = ("seed", "step_timeout_s", "start_timeout_s", "num_kv_blocks", "max_num_reqs")

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Values:
    """One figure of a point: every repeat's value."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        """The middle value, which is what a plot shows."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    @property
    def spread(self) -> float:
        """How far the values lie apart, as a share of the median; 0 for a single one."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0


class Shape(NamedTuple):
    """A batch of equal requests that all run at once: what a limit can be computed for."""

    batch: int
    input_len: int
    output_len: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured point."""

    source: str  # the file's name
    kind: str  # latency | throughput | load | compare | engine (scripts/bench_engine.py)
    settings: Settings
    varied: tuple[str, ...] | None  # what its sweep varied; None: it belongs to no sweep
    metrics: dict[str, Values]
    machine: dict[str, Any]
    commit: str
    command: str = ""
    time: str = ""
    device: str = ""  # the GPU's name, "" on a CPU
    shape: Shape | None = None
    model: ModelConfig | None = None
    # "cpu" and "gpu" -> stage -> milliseconds a step
    step_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)


def together(records: Sequence[Record]) -> list[Record]:
    """Return the records with those of one point (its repeats in several processes) made one.

    Those of another commit, device, torch or triton are another point.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        environment = environment_of(record.machine, record.device)
        identity = [record.source, record.kind, record.commit, environment, record.settings]
        groups.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(record)
    return [_merged(group) for group in groups.values()]


def _merged(group: list[Record]) -> Record:
    first = group[0]
    if len(group) == 1:
        return first
    names = [name for name in first.metrics if all(name in each.metrics for each in group)]
    metrics = {
        name: Values(
            values=tuple(value for each in group for value in each.metrics[name].values),
            unit=first.metrics[name].unit,
        )
        for name in names
    }
    return replace(first, metrics=metrics)


def telling_names(records: Sequence[Record], without: Iterable[str] = ()) -> list[str]:
    """Return the settings that tell the records apart, in the order in which a label has them.

    Those in FIRST_NAMES are in whenever they differ; another only when it splits what the ones
    before leave together, so that what merely follows from them (v2's two steps in flight) is out.
    """
    left_out = {*without, *NEVER_NAMES}
    names = [name for name in _candidates(records) if name not in left_out]
    first = [name for name in FIRST_NAMES if name in names]
    chosen = [name for name in first if len({text_of(r, name) for r in records}) > 1]
    num_groups = _num_groups(records, chosen)
    for name in names:
        if name not in FIRST_NAMES and _num_groups(records, [*chosen, name]) > num_groups:
            chosen.append(name)
            num_groups = _num_groups(records, chosen)
    return chosen


def _candidates(records: Sequence[Record]) -> list[str]:
    names: dict[str, None] = {}
    for record in records:
        names.update(dict.fromkeys(record.settings if record.varied is None else record.varied))
    return [*names, "commit", *ENVIRONMENT_NAMES]


def _num_groups(records: Sequence[Record], names: Sequence[str]) -> int:
    return len({tuple(text_of(record, name) for name in names) for record in records})


def value_of(record: Record, name: str) -> Any:
    """Return a setting, or what a label treats as one: the commit, the machine, a version.

    None when the point has none.
    """
    if name in ENVIRONMENT_NAMES:
        return environment_of(record.machine, record.device)[name] or None
    return record.commit if name == "commit" else record.settings.get(name)


def text_of(record: Record, name: str) -> str:
    """Return a setting as a label shows it; "" when the point has no such setting."""
    value = value_of(record, name)
    if value is None:
        return "default" if name in record.settings else ""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def label(record: Record, names: Sequence[str]) -> str:
    """Return the words that name a point: "qwen3-0.6b, tp 2, v2, batch 8"."""
    plain = ("model", "runner", "side", "workload")  # their values speak for themselves
    words = []
    for name in names:
        if text := text_of(record, name):
            words.append(text if name in plain else f"{name.replace('_', ' ')} {text}")
    return ", ".join(words)


def series(records: Sequence[Record], names: Sequence[str]) -> dict[str, list[Record]]:
    """Return the records by label over `names`, in the order in which the labels first come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(label(record, names), []).append(record)
    return found
