"""A rank's trace: DIR/rank-N.jsonl, written when the rank closes, whole or not at all.

    line 1   {"schema": 1, "rank", "tp", "runner", "device", "pid", "names": {name: meaning},
              "clock": {"name", "taken_ns", "gpu_anchors": [[gpu ns, host ns, +- ns]]},
              "num_lost", "notes": [...], and what rank 0 said of all: "time", "commit", "machine",
              "config"}
    others   {"name", "kind": "cpu" | "gpu", "begin": ns, "end": ns, "step"?, "frame"?}
             {"step", "num_requests", "num_tokens", ...}      what a step computed; rank 0 alone

All times are of the CPU's clock, the same in every rank. A span without "step" or "frame" belongs
to none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.spans import KINDS, MEANINGS, NAMES, NO_FRAME, NO_STEP, RankSpans

SCHEMA = 1


def file_name(rank: int | str) -> str:
    """Return the name of a rank's file; of "*" the pattern of all."""
    return f"rank-{rank}.jsonl"


def write_trace(config: RunnerConfig, spans: RankSpans) -> Path:
    """Write a rank's file and return its path; OSError, with no file, when that fails."""
    assert config.trace is not None, "only an engine with a trace folder writes one"
    path = Path(config.trace.folder, file_name(spans.rank))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            for line in (_head(config, spans), *_facts(spans)):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.writelines(_spans(spans))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _head(config: RunnerConfig, spans: RankSpans) -> dict[str, Any]:
    assert config.trace is not None, "see write_trace()"
    return {
        "schema": SCHEMA,
        "rank": spans.rank,
        "tp": config.tp,
        "runner": config.runner,
        "device": config.device,
        "pid": os.getpid(),
        "names": MEANINGS,
        "clock": {
            "name": time.get_clock_info("perf_counter").implementation,
            "taken_ns": spans.taken_ns,
            "gpu_anchors": spans.anchors,
        },
        "num_lost": spans.num_lost,
        "notes": spans.notes,
        **config.trace.head,
    }


def _facts(spans: RankSpans) -> Iterator[dict[str, int]]:
    facts = spans.facts()
    for values in zip(*(column.tolist() for column in facts), strict=True):
        yield dict(zip(facts._fields, values, strict=True))


def _spans(spans: RankSpans) -> Iterator[str]:
    """Yield the lines; put together by hand, for a full ring must not keep a closing rank."""
    columns = (column.tolist() for column in spans.table())
    for name, kind, begin, end, step, frame in zip(*columns, strict=True):
        of_step = "" if step == NO_STEP else f',"step":{step}'
        of_frame = "" if frame == NO_FRAME else f',"frame":{frame}'
        yield (
            f'{{"name":"{NAMES[name]}","kind":"{KINDS[kind]}","begin":{begin},"end":{end}'
            f"{of_step}{of_frame}}}\n"
        )
