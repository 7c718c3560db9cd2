"""The timeline: which rank's CPU, wire and GPU did what when, and who waited for whom.

A run with --trace DIR leaves DIR/rank-N.jsonl. From them this command writes two files into DIR:

    trace.json      every step, for https://ui.perfetto.dev or chrome://tracing
    timeline.html   some steps, as a page that needs no network and nothing beside it

With several folders each gets its trace.json, and the last one the page, with all runs above one
another from the begin of their first step on.

    nanorunner --trace /tmp/v2 --tp 2 --prompt "One, two," --max-tokens 64
    nanorunner timeline /tmp/v2
    nanorunner timeline /tmp/v1 /tmp/v2 --steps 20:25
"""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from nanorunner.exit_codes import OK
from nanorunner.workshop.timeline_arrows import arrows_of
from nanorunner.workshop.timeline_lanes import lanes_of
from nanorunner.workshop.timeline_page import Shown, notes, page_html
from nanorunner.workshop.timeline_perfetto import write_events
from nanorunner.workshop.timeline_read import read_run
from nanorunner.workshop.timeline_steps import NUM_SHOWN, choose, named, steps_of

TRACE_NAME = "trace.json"
PAGE_NAME = "timeline.html"


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="what --trace wrote; the page goes into the last",
    )
    parser.add_argument(
        "--steps",
        type=parse_steps,
        metavar="FROM:TO",
        help=f"the page's steps, both included (default: {NUM_SHOWN} steady ones near the middle)",
    )


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of "40:47"; argparse's error otherwise."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} names no steps; write FROM:TO, as 40:47")
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ArgumentTypeError(f"{text!r} ends before it begins; write {last}:{first}")
    return first, last


def run(arguments: Namespace) -> int:
    """Write the files and say where they are; nothing is written when a folder is refused."""
    folders: list[Path] = arguments.folders
    for number, folder in enumerate(folders):
        if folder.resolve() in {other.resolve() for other in folders[:number]}:
            raise ValueError(f"{folder}: is given twice")
    runs = [_read(folder, arguments.steps) for folder in folders]
    page = page_html(runs, shows_all=arguments.steps is not None)
    traces = [_write_trace(shown) for shown in runs]
    page_path = folders[-1] / PAGE_NAME
    with _draft(page_path) as file:
        file.write(page)
    for shown, trace in zip(runs, traces, strict=True):
        print(f"{shown.run.folder}: {len(shown.all_steps):,} steps on {shown.run.tp} rank(s)")
        print("\n".join(f"  {note}" for note in notes(shown)))
        print(f"  {trace}: open it in https://ui.perfetto.dev")
    print(f"{page_path}: open it in a browser")
    print(json.dumps(_summary(runs, traces, page_path)))
    return OK


def _read(folder: Path, steps: tuple[int, int] | None) -> Shown:
    """Return a folder's run with its lanes, arrows and steps."""
    found = read_run(folder)
    ranks = lanes_of(found)
    arrows = arrows_of(found, ranks)
    all_steps = steps_of(found)
    shown = choose(all_steps) if steps is None else named(found, all_steps, *steps)
    return Shown(found, ranks, arrows, all_steps, shown)


def _write_trace(shown: Shown) -> Path:
    path = shown.run.folder / TRACE_NAME
    with _draft(path) as file:
        write_events(file, shown.run, shown.ranks, shown.arrows.drawn, shown.all_steps)
    return path


@contextmanager
def _draft(path: Path) -> Iterator[TextIO]:
    """Give a file that takes its name when it is whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _summary(runs: Sequence[Shown], traces: Sequence[Path], page: Path) -> dict[str, object]:
    return {
        "kind": "timeline",
        "page": str(page),
        "traces": [str(trace) for trace in traces],
        "steps": [[shown.steps[0].number, shown.steps[-1].number] for shown in runs],
        "steps_left_out": [len(shown.all_steps) - len(shown.steps) for shown in runs],
        "bubbles": [sum(len(lanes.bubbles) for lanes in shown.ranks) for shown in runs],
        "arrows": [len(shown.arrows.drawn) for shown in runs],
    }
