"""A workshop page as data: its fenced blocks, the commands in them, and when an output fits.

    docs/workshop/*.md -> fences() -> commands() -> (what is typed, what must be seen)

The kinds of fences, by the words behind the three backticks:

    console                what is typed, behind "$ ", and below it what is seen
    console gpu            the same, on a machine with a GPU
    python append=FILE     lines that the learner adds at the end of FILE, in the lab's folder
    text                   a drawing; nothing is run

What changes from run to run stands in the page itself: `…` for any text within a line, a line of
`...` for any lines, both for none as well. Everything else must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORKSHOP = ROOT / "docs" / "workshop"
CHINESE = ".zh.md"
CONSOLE, GPU, TEXT, APPEND = "console", "console gpu", "text", "python append="
PROMPT = "$ "
ANY_TEXT, ANY_LINES = "…", "..."


class Fence(NamedTuple):
    """One fenced block of a page."""

    kind: str  # the words behind the backticks
    lines: tuple[str, ...]
    line: int  # of its first backticks in the page, from 1


class Command(NamedTuple):
    """One command of a console block."""

    text: str
    expected: tuple[str, ...]  # the lines that must be seen
    line: int  # in the page


def english_pages() -> list[Path]:
    """Return the workshop's pages in the order of their names, translations left out."""
    return sorted(p for p in WORKSHOP.glob("*.md") if not p.name.endswith(CHINESE))


def chinese_pages() -> list[Path]:
    """Return the workshop's Chinese pages in the order of their names."""
    return sorted(WORKSHOP.glob(f"*{CHINESE}"))


def fences(page: str) -> list[Fence]:
    """Return the fenced blocks of a page's text; ValueError for one that never ends."""
    found: list[Fence] = []
    kind, begin, inside = "", 0, False
    lines: list[str] = []
    for number, line in enumerate(page.splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif inside:
            found.append(Fence(kind, tuple(lines), begin))
            inside = False
        else:
            kind, begin, lines, inside = line[3:].strip(), number, [], True
    if inside:
        raise ValueError(f"line {begin}: a block that never ends")
    return found


def commands(fence: Fence) -> list[Command]:
    """Return a console block's commands; ValueError when it does not begin with one."""
    found: list[Command] = []
    for number, line in enumerate(fence.lines, start=fence.line + 1):
        if line.startswith(PROMPT):
            found.append(Command(line[len(PROMPT) :], (), number))
        elif found:
            last = found[-1]
            found[-1] = last._replace(expected=(*last.expected, line))
        else:
            raise ValueError(f"line {number}: a console block begins with {PROMPT!r}")
    return found


def pair_problem(english: str, translated: str) -> str:
    """Return how a translated page differs from the English one where it must not; "" if it agrees.

    Commands, outputs and code must be the same, and the headings' levels and numbers; a drawing's
    words and the headings' may differ. What is code or a number in the English text is in the
    translated one as well, so that a change of the one page is noticed in the other.
    """
    ours, theirs = fences(english), fences(translated)
    if len(ours) != len(theirs):
        return f"the English page has {len(ours)} blocks, but {len(theirs)} here"
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        if own.kind != other.kind or (own.kind != TEXT and own.lines != other.lines):
            return f"line {other.line}: block {number} is not the English one of line {own.line}"
    levels = [_headings(page) for page in (english, translated)]
    if levels[0] != levels[1]:
        return f"the headings' levels and numbers are {levels[1]}, in English {levels[0]}"
    if missing := _code_and_numbers(english) - _code_and_numbers(translated):
        return f"in the English text, but not here: {', '.join(sorted(missing))}"
    return ""


def prose(page: str) -> str:
    """Return a page's text without its blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def _headings(page: str) -> list[tuple[int, list[str]]]:
    """Return each heading's level and numbers, sorted, for languages order them differently."""
    found = re.findall(r"^(#+) (.*)$", prose(page), re.MULTILINE)
    return [(len(signs), sorted(re.findall(r"\d+", words))) for signs, words in found]


def _code_and_numbers(page: str) -> set[str]:
    """Return what stands in backticks in a page's text, and the numbers of what does not."""
    said = prose(page)
    code = {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", said)}
    said = re.sub(r"`[^`]+`|\]\([^)]*\)", "", said)
    return code | set(re.findall(r"\d+(?:[.,]\d+)*", said))


def mismatch(expected: Sequence[str], seen: Sequence[str]) -> str:
    """Return what in an output does not fit the page's lines; "" when all of it does."""
    first, *others = _between_any_lines(_trimmed(expected))
    got = _trimmed(seen)
    if problem := _problem_at(first, got, 0):
        return problem
    place = len(first)
    if not others:
        return f"the page ends, but then comes {got[place]!r}" if place < len(got) else ""
    *middles, last = others
    for run in middles:
        fitting = (p for p in range(place, len(got)) if not _problem_at(run, got, p))
        found = next(fitting, None)
        if found is None:
            return f"nowhere from line {place + 1} of the output on: {run}"
        place = found + len(run)
    if len(got) - len(last) < place:
        return f"too few lines were seen for the last ones, {last}"
    return _problem_at(last, got, len(got) - len(last))


def line_fits(expected: str, seen: str) -> bool:
    """Return whether one line is as the page has it."""
    return re.fullmatch(".*".join(map(re.escape, expected.split(ANY_TEXT))), seen) is not None


def _between_any_lines(lines: list[str]) -> list[list[str]]:
    """Return the lines before, between and after those that stand for any lines."""
    runs: list[list[str]] = [[]]
    for line in lines:
        if line == ANY_LINES:
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


def _problem_at(run: list[str], got: list[str], place: int) -> str:
    """Return the first of a run's lines that does not fit at its place; "" when all do."""
    for number, line in enumerate(run, start=place):
        if number >= len(got):
            return f"{line!r} was expected, but the output has ended"
        if not line_fits(line, got[number]):
            return f"{line!r} was expected; seen: {got[number]!r}"
    return ""


def _trimmed(lines: Sequence[str]) -> list[str]:
    """Return the lines without blanks at their ends and without blank ones at the end."""
    found = [line.rstrip() for line in lines]
    while found and not found[-1]:
        found.pop()
    return found
