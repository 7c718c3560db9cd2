"""Read a trace folder: every rank's file checked, all ranks on one clock, nothing guessed.

    DIR/rank-0.jsonl ... DIR/rank-N.jsonl -> read_run() -> Run: a head, and a RankTrace a rank

workers/trace_file.py says what the files hold. What is broken, missing or of another run is refused
with the file's name, and where there is one the line's number.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nanorunner.workers.spans import (
    KINDS,
    NAMES,
    NO_FRAME,
    NO_STEP,
    SPAN_WORDS,
    SpanTable,
    StepFacts,
)
from nanorunner.workers.trace_file import SCHEMA, file_name

NAME_PATTERN = re.compile(re.escape(file_name("N")).replace("N", r"(\d+)"))
# What rank 0 told all ranks, or what holds for all: a file that differs is of another run.
COMMON = ("tp", "runner", "device", "time", "commit", "machine", "config", "names")
HEAD_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("rank", "pid", "num_lost", "tp"), int),
    **dict.fromkeys(("runner", "device", "time"), str),
    **dict.fromkeys(("clock", "machine", "config", "names"), dict),
    "notes": list,
    "commit": (str, type(None)),
}
NAME_NUMBERS = {name: number for number, name in enumerate(NAMES)}
KIND_NUMBERS = {name: number for number, name in enumerate(KINDS)}
HOW_TO = "a run with --trace DIR writes one"


class RankTrace(NamedTuple):
    """What one rank's file holds."""

    rank: int
    pid: int
    num_lost: int  # spans that are not in the file: overwritten, or never read from the GPU
    notes: tuple[str, ...]
    clock_error_ns: int | None  # how exactly the GPU's times lie on the CPU's clock; None: no GPU
    spans: SpanTable  # [n], as recorded
    facts: StepFacts  # [m]; rank 0 alone has any


class Run(NamedTuple):
    """One traced run."""

    folder: Path
    head: Mapping[str, Any]  # rank 0's first line
    ranks: tuple[RankTrace, ...]  # by rank

    @property
    def tp(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def has_gpu(self) -> bool:
        """Whether the ranks worked on GPUs."""
        return bool(self.head["device"] != "cpu")

    @property
    def num_lost(self) -> int:
        """How many spans are missing, of all ranks."""
        return sum(each.num_lost for each in self.ranks)

    def limits_ns(self) -> tuple[int, int]:
        """Return when the first span began and the last one ended."""
        tables = [each.spans for each in self.ranks]
        return min(int(t.begin.min()) for t in tables), max(int(t.end.max()) for t in tables)


def read_run(folder: Path) -> Run:
    """Return the run of a folder; ValueError for one that holds no whole trace of one run."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; {HOW_TO}")
    found = {}
    for path in folder.iterdir():
        if match := NAME_PATTERN.fullmatch(path.name):
            found[int(match[1])] = path
    if not found:
        raise ValueError(f"{folder}: no {file_name('N')} in it; {HOW_TO}")
    if 0 not in found:
        raise ValueError(f"{folder / file_name(0)}: is missing; the trace is not whole")
    first, head = _read_rank(found.pop(0), 0)
    for rank in range(1, head["tp"]):
        if rank not in found:
            raise ValueError(f"{folder / file_name(rank)}: is missing; the run had tp {head['tp']}")
    ranks = [first]
    for rank, path in sorted(found.items()):
        trace, other = _read_rank(path, rank)
        for field in COMMON:
            if other[field] != head[field]:
                raise ValueError(
                    f"{path}: is of another run than {file_name(0)}: {field} is "
                    f"{_short(other[field])}, not {_short(head[field])}"
                )
        if rank >= head["tp"]:
            raise ValueError(f"{path}: is one too many; the run had tp {head['tp']}")
        ranks.append(trace)
    return Run(folder, head, tuple(ranks))


def _read_rank(path: Path, rank: int) -> tuple[RankTrace, dict[str, Any]]:
    """Return a rank's trace and its file's first line."""
    words = array("q")
    fact_words = array("q")
    head: dict[str, Any] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = _parse(path, number, text)
                if number == 1:
                    head = _checked_head(path, rank, line)
                elif "name" in line:
                    words.extend(_span(path, number, line))
                else:
                    fact_words.extend(_fact(path, number, line))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text: {error.reason}") from error
    if not words:
        raise ValueError(f"{path}: holds no span; the run was ended before it had begun")
    spans = SpanTable(*np.array(words, np.int64).reshape(-1, SPAN_WORDS).T)
    facts = StepFacts(*np.array(fact_words, np.int64).reshape(-1, len(StepFacts._fields)).T)
    anchors = head["clock"]["gpu_anchors"]
    error_ns = max((plus_minus for _, _, plus_minus in anchors), default=None)
    trace = RankTrace(
        rank, head["pid"], head["num_lost"], tuple(head["notes"]), error_ns, spans, facts
    )
    return trace, head


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        _refuse(path, number, f"is no JSON ({error.msg}); the file is cut off or broken")
    if not isinstance(line, dict):
        _refuse(path, number, "is no JSON object")
    return line


def _checked_head(path: Path, rank: int, head: dict[str, Any]) -> dict[str, Any]:
    """Return a first line that this reader understands."""
    if head.get("schema") != SCHEMA:
        what = f"has schema {head['schema']}" if "schema" in head else "names no schema"
        _refuse(path, 1, f"{what}; this nanorunner reads schema {SCHEMA}")
    for field, kind in HEAD_TYPES.items():
        if field not in head or not isinstance(head[field], kind):
            _refuse(path, 1, f"{field} is {_short(head.get(field))}, which no run writes")
    anchors = head["clock"].get("gpu_anchors")
    if not isinstance(anchors, list) or any(len(anchor) != 3 for anchor in anchors):
        _refuse(path, 1, f"gpu_anchors is {_short(anchors)}, which no run writes")
    if head["rank"] != rank:
        _refuse(path, 1, f"is rank {head['rank']}'s; the file has another rank's name")
    return head


def _span(path: Path, number: int, line: dict[str, Any]) -> tuple[int, ...]:
    """Return a span's words."""
    name, kind = NAME_NUMBERS.get(line["name"]), KIND_NUMBERS.get(line.get("kind", ""))
    if name is None:
        _refuse(path, number, f"{line['name']!r} is no span's name")
    if kind is None:
        _refuse(path, number, f"kind {line.get('kind')!r}; it is {' or '.join(KINDS)}")
    numbers: list[Any] = [
        line.get("begin"),
        line.get("end"),
        line.get("step", NO_STEP),
        line.get("frame", NO_FRAME),
    ]
    if not all(type(value) is int for value in numbers):
        _refuse(path, number, "begin, end, step and frame are whole numbers")
    begin, end, step, frame = numbers
    if begin > end:
        _refuse(path, number, f"{line['name']} ends {begin - end} ns before it begins")
    return name, kind, begin, end, step, frame


def _fact(path: Path, number: int, line: dict[str, Any]) -> tuple[int, ...]:
    """Return what a step computed."""
    values: tuple[Any, ...] = tuple(line.get(field) for field in StepFacts._fields)
    if not all(type(value) is int for value in values) or len(line) != len(values):
        _refuse(path, number, "is neither a span nor a step's figures")
    return values


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(path: Path, number: int, what: str) -> NoReturn:
    raise ValueError(f"{path} line {number}: {what}")
