"""One HTML page of one run or several, above one another: it holds all it needs.

    Shown, a run and the page's steps of it -> page_html() -> timeline_parts/page.html, filled in

The script draws what it is given and measures nothing. The page's own policy forbids every request,
so a mistake shows as something missing, not as a page that works only with a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from nanorunner.workers.spans import NAMES
from nanorunner.workshop.timeline_arrows import Arrow, Arrows
from nanorunner.workshop.timeline_lanes import CPU_LANE, LANES, Lanes
from nanorunner.workshop.timeline_perfetto import ARROW_TITLES, LANE_TITLES, absent_lanes
from nanorunner.workshop.timeline_read import Run
from nanorunner.workshop.timeline_steps import Step

PARTS = Path(__file__).parent / "timeline_parts"
SCRIPTS = ("view", "layout", "draw", "arrows", "hover", "main", "input")  # in this order
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
MOST_SPANS = 20_000  # of a page: it is drawn anew at each move of the mouse
NS_A_US = 1000


class Shown(NamedTuple):
    """A run, and what of it a page shows."""

    run: Run
    ranks: Sequence[Lanes]
    arrows: Arrows
    all_steps: Sequence[Step]
    steps: Sequence[Step]  # those of the page

    def window_ns(self) -> tuple[int, int]:
        """Return the time that the page has of this run."""
        numbers = {step.number for step in self.steps}
        ends = [step.end for step in self.steps]
        for lanes in self.ranks:
            spans = (span for lane in LANES for span in lanes.spans[lane])
            ends.append(max((span.end for span in spans if span.step in numbers), default=0))
        return self.steps[0].begin, max(ends)


def page_html(runs: Sequence[Shown], *, shows_all: bool) -> str:
    """Return the page; shows_all: it begins with all its steps in view, not with the first few.

    Raises ValueError when it would hold too much to be drawn.
    """
    in_data = [_run_data(shown) for shown in runs]
    num_spans = sum(
        len(lane["spans"]) for run in in_data for rank in run["ranks"] for lane in rank["lanes"]
    )
    if num_spans > MOST_SPANS:
        raise ValueError(
            f"--steps: they have {num_spans:,} spans, and a page holds {MOST_SPANS:,}; name fewer "
            f"steps"
        )
    data = {
        "names": NAMES,
        "meanings": runs[0].run.head["names"],
        "arrow_titles": ARROW_TITLES,
        "shows_all": shows_all,
        "runs": in_data,
    }
    title = _title(runs[0].run)
    if len(runs) > 1:
        title = " above ".join(shown.run.folder.resolve().name for shown in runs)
    scripts = (_part(f"{name}.js") for name in SCRIPTS)
    return Template(_part("page.html")).substitute(
        title=escape(f"Timeline: {title}"),
        policy=POLICY,
        style=_part("page.css"),
        # so that no name in it can end the element it stands in
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        script="\n".join(['(() => {\n"use strict";', *scripts, "})();"]),
    )


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _title(run: Run) -> str:
    model = Path(str(run.head["config"].get("model") or "the embedded model")).name
    gpus = run.head["machine"].get("gpus") or []
    place = str(gpus[0]) if run.has_gpu and gpus else str(run.head["device"]).upper()
    return f"runner {run.head['runner']}, tp {run.tp}, {model}, {place}"


def _run_data(shown: Shown) -> dict[str, Any]:
    """Return a run as the script takes it; all times from its first shown step's begin on."""
    begin, end = shown.window_ns()
    first, last = shown.steps[0].number, shown.steps[-1].number
    return {
        "title": f"{_title(shown.run)}: steps {first} to {last}",
        "begin": 0,
        "end": end - begin,
        "steps": [
            [step.number, step.begin - begin, step.end - begin, step.in_words()]
            for step in shown.steps
        ],
        "ranks": [
            {"rank": lanes.rank, "lanes": list(_lanes_data(shown.run, lanes, begin, end))}
            for lanes in shown.ranks
        ],
        "arrows": [
            _arrow_data(arrow, begin)
            for arrow in shown.arrows.drawn
            if arrow.head.at >= begin and arrow.tail.at <= end
        ],
        "notes": list(notes(shown)),
    }


def _lanes_data(run: Run, lanes: Lanes, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the lanes of a rank that have something to show or to say."""
    absent = absent_lanes(run)
    for lane in LANES:
        spans = [
            [span.name, span.begin - begin, span.end - begin, span.step, span.frame, span.depth]
            for span in lanes.ordered(lane)
            if span.end >= begin and span.begin <= end
        ]
        if spans or lane in absent or lane == CPU_LANE:
            title = LANE_TITLES[lane]
            yield {"lane": lane, "title": title, "absent": absent.get(lane, ""), "spans": spans}


def _arrow_data(arrow: Arrow, begin: int) -> list[str | int]:
    tail, head = arrow.tail, arrow.head
    ends = (tail.rank, tail.lane, tail.at - begin, head.rank, head.lane, head.at - begin)
    return [arrow.kind, arrow.step, arrow.frame, *ends]


def notes(shown: Shown) -> Iterator[str]:
    """Yield what a reader must know of a run, a sentence each."""
    run, steps, shown_steps = shown.run, shown.all_steps, shown.steps
    yield (
        f"Steps {shown_steps[0].number} to {shown_steps[-1].number} of {steps[0].number} to "
        f"{steps[-1].number}: {_kinds(shown_steps)}."
    )
    if num_left_out := len(steps) - len(shown_steps):
        yield (
            f"{num_left_out:,} of {len(steps):,} steps are left out here; trace.json has them all, "
            f"and --steps FROM:TO chooses."
        )
    for lane, why in absent_lanes(run).items():
        yield f"{LANE_TITLES[lane]}: {why}; nothing is drawn there."
    errors = [each.clock_error_ns for each in run.ranks if each.clock_error_ns is not None]
    if errors:
        yield (
            f"Where the clocks were compared, the GPUs' times lie on the CPU's clock to within "
            f"{max(errors) / NS_A_US:.1f} us."
        )
    elif run.has_gpu:
        yield "No GPU's clock was ever compared with the CPU's, so the GPUs' spans are lost."
    if run.num_lost:
        yield f"Spans that are lost, the oldest first: {run.num_lost:,}."
    if num_cut := sum(lanes.num_cut for lanes in shown.ranks):
        most_us = max(lanes.most_cut_ns for lanes in shown.ranks) / NS_A_US
        yield (
            f"Spans that overlapped the one before them and were cut: {num_cut:,}, by "
            f"{most_us:.1f} us at most."
        )
    for reason, number in shown.arrows.not_drawn.items():
        yield f"Arrows that are not drawn, as {reason}: {number:,}."
    for note in dict.fromkeys(note for each in run.ranks for note in each.notes):
        yield f"{note[:1].upper()}{note[1:]}."


def _kinds(steps: Iterable[Step]) -> str:
    """Return what the steps computed, those that are alike together."""
    kinds: dict[str, int] = {}
    for step in steps:
        kinds[step.in_words()] = kinds.get(step.in_words(), 0) + 1
    return "; ".join(words if len(kinds) == 1 else f"{n} x {words}" for words, n in kinds.items())
