"""The workshop's pages are whole: commands, flags, files, links and minutes, in every language.

What the commands show is tested in tests/cpu/test_workshop_labs.py. A page NAME.zh.md has exactly
the blocks of NAME.md, so a command that was tested in one language is tested in both.
"""

from __future__ import annotations

import importlib
import re
import shlex
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from lab_text import (
    ANY_LINES,
    ANY_TEXT,
    APPEND,
    CHINESE,
    CONSOLE,
    GPU,
    ROOT,
    TEXT,
    WORKSHOP,
    Command,
    chinese_pages,
    commands,
    english_pages,
    fences,
    mismatch,
    pair_problem,
    prose,
)

from nanorunner import cli
from nanorunner.bench import cli as bench
from nanorunner.flags import Parser
from nanorunner.workshop import cli as workshop
from nanorunner.workshop.code_exercises import EXERCISES
from nanorunner.workshop.questions import QUESTIONS

PAGES = english_pages() + chinese_pages()
LABS = [page for page in PAGES if page.name[0].isdigit()]
HEADINGS = {
    ".md": ["Goal", "Before you start", "Questions", "What was learnt", "Presenter's notes"],
    CHINESE: ["目标", "准备", "小测", "小结", "讲师备注"],
}
MINUTES = r"(\d+) (?:minutes?|分钟)"
TIME_TABLES = ["README.md", f"README{CHINESE}"]
TOTAL_MINUTES = 180
PROGRAM = ["python", "-m", "nanorunner"]
SCRIPTS = "../scripts/"  # from the folder lab
SHELL_SIGN = re.compile(r"\||&|;|\d?>")  # what stands behind it is another command, or a file
for_each_page = pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
for_each_lab = pytest.mark.parametrize("page", LABS, ids=[page.stem for page in LABS])


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands_of(page: Path, *kinds: str) -> list[Command]:
    """Return the commands of a page's blocks of these kinds."""
    return [c for fence in fences(text(page)) if fence.kind in kinds for c in commands(fence)]


@for_each_page
def test_every_block_is_of_a_kind_that_a_test_knows(page: Path) -> None:
    for fence in fences(text(page)):
        assert fence.kind in (CONSOLE, GPU, TEXT) or fence.kind.startswith(APPEND), fence


@for_each_page
def test_the_reader_is_told_what_needs_a_gpu_and_where_code_goes(page: Path) -> None:
    """What stands behind the backticks is not seen on a rendered page."""
    lines = text(page).splitlines()
    for fence in fences(text(page)):
        before = [line for line in lines[: fence.line - 1] if line][-1]
        if fence.kind == GPU:
            assert before.startswith("**GPU**"), f"line {fence.line}: {before}"
        if fence.kind.startswith(APPEND):
            assert fence.kind.removeprefix(APPEND) in before, f"line {fence.line}: {before}"


@for_each_page
def test_an_output_that_is_shown_has_a_line_that_could_be_wrong(page: Path) -> None:
    for command in commands_of(page, CONSOLE, GPU):
        firm = [line for line in command.expected if line.replace(ANY_TEXT, "").strip(" .")]
        assert firm or not any(command.expected), f"line {command.line}: nothing can differ"


@for_each_page
def test_every_command_of_ours_parses(page: Path) -> None:
    """Commands that need a GPU are run in tests/gpu alone; a wrong flag must not wait for one."""
    for command in commands_of(page, CONSOLE, GPU):
        words = list(takewhile(lambda word: not SHELL_SIGN.match(word), shlex.split(command.text)))
        if words[:3] == PROGRAM:
            _parse(words[3:])
        elif words[0] == "python" and words[1].startswith(SCRIPTS):
            source = text(ROOT / words[1].removeprefix("../"))
            assert all(word in source for word in words[2:] if word.startswith("--")), words


@for_each_page
def test_every_file_flag_and_link_that_a_page_names_exists(page: Path) -> None:
    said = prose(text(page))
    for link in re.findall(r"\]\(([^)#]+)", said):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    made = "\n".join(line for c in commands_of(page, CONSOLE) for line in c.expected)
    for name in re.findall(r"`([\w./-]+/[\w.-]+)`", said):
        assert (ROOT / name).exists() or name in made, name
    known = {flag for parser in _parsers() for flag in parser.long_flags()}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", said, re.ASCII)) <= known


@for_each_page
def test_no_page_names_a_path_of_one_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(work|root|home|tmp)/", text(page))


@for_each_lab
def test_a_lab_has_its_parts_and_its_minutes_are_those_of_the_time_table(page: Path) -> None:
    said = prose(text(page))
    suffix = CHINESE if page.name.endswith(CHINESE) else ".md"
    wanted = HEADINGS[suffix]
    headings = re.findall(rf"^## (.*?)(?:\W+{MINUTES}\W)?$", said, re.MULTILINE)
    assert [heading for heading, _ in headings if heading in wanted] == wanted
    told = re.search(rf"^{MINUTES}", said, re.MULTILINE)
    assert told is not None
    table = text(WORKSHOP / f"README{suffix}")
    in_table = re.search(rf"\]\({re.escape(page.name)}\) \| (\d+) \|", table)
    assert in_table is not None
    assert told[1] == in_table[1]
    parts = sum(int(minutes) for _, minutes in headings if minutes)
    assert parts <= int(told[1]) <= parts + 5


@pytest.mark.parametrize("table", TIME_TABLES)
def test_the_time_table_adds_up_to_three_hours(table: str) -> None:
    rows = re.findall(r"^\| [^|]* \| (\d+) \|", text(WORKSHOP / table), re.MULTILINE)
    *parts, together = map(int, rows)
    assert sum(parts) == together == TOTAL_MINUTES


def test_every_question_and_every_code_exercise_is_in_a_lab() -> None:
    said = [command.text for page in LABS for command in commands_of(page, CONSOLE)]
    asked = {m[1] for line in said if (m := re.search(r"nanorunner check (\d+) [^-|]", line))}
    assert {int(number) for number in asked} == set(QUESTIONS)
    solved = {m[1] for line in said if (m := re.search(r"nanorunner check (\S+) my_", line))}
    assert solved == set(EXERCISES)


def test_every_page_has_a_translation() -> None:
    names = [page.name.removesuffix(".md") + CHINESE for page in english_pages()]
    assert names == [page.name for page in chinese_pages()]


@pytest.mark.parametrize("page", chinese_pages(), ids=[page.stem for page in chinese_pages()])
def test_a_translated_page_has_the_blocks_of_the_english_one(page: Path) -> None:
    english = page.with_name(page.name.removesuffix(CHINESE) + ".md")
    assert pair_problem(text(english), text(page)) == ""


ENGLISH = "# Lab 1\n\n## Goal\n\n3 of `a/b`\n\n```console\n$ echo a\na\n```\n\n```text\nbox\n```\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("## Goal", "## Ziel"), ""),
        (("box", "Kasten"), ""),
        (("echo a\na", "echo b\nb"), "line 7: block 1"),
        (("```text\nbox\n```\n", ""), "2 blocks, but 1 here"),
        (("```console", "```console gpu"), "line 7: block 1"),
        (("## Goal", "Goal"), "headings"),
        (("# Lab 1", "# Lab 2"), "headings"),
        (("3 of `a/b`", "`a/b`, 3"), ""),
        (("3 of", "4 of"), "not here: 3"),
        (("`a/b`", "`a/c`"), "not here: a/b"),
    ],
)
def test_a_translation_whose_blocks_or_headings_differ_is_found(
    change: tuple[str, str], problem: str
) -> None:
    found = pair_problem(ENGLISH, ENGLISH.replace(*change))
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("expected", "seen", "problem"),
    [
        (["a", "b"], ["a", "b", ""], ""),
        (["a", "b"], ["a", "c"], "'b' was expected; seen: 'c'"),
        (["a", "b"], ["a"], "'b' was expected, but the output has ended"),
        (["a"], ["a", "b"], "the page ends, but then comes 'b'"),
        ([], ["a"], "the page ends"),
        ([f"pid {ANY_TEXT} of {ANY_TEXT}"], ["pid 17 of 2"], ""),
        ([f"pid {ANY_TEXT} of 2"], ["pid 17 of 3"], "was expected"),
        ([f"a.c{ANY_TEXT}"], ["abc"], "was expected"),
        (["a", ANY_LINES, "z"], ["a", "z"], ""),
        (["a", ANY_LINES, "z"], ["a", "b", "z"], ""),
        (["a", ANY_LINES, "z"], ["a", "z", "b"], "'z' was expected; seen: 'b'"),
        (["a", ANY_LINES], ["a", "b", "c"], ""),
        ([ANY_LINES, "m", "n", ANY_LINES, "z"], ["m", "x", "m", "n", "z"], ""),
        ([ANY_LINES, "m", "n", ANY_LINES, "z"], ["m", "x", "n", "z"], "nowhere from line 1"),
        (["a", ANY_LINES, "a"], ["a"], "too few lines"),
    ],
)
def test_what_fits_a_shown_output(expected: list[str], seen: list[str], problem: str) -> None:
    found = mismatch(expected, seen)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_block_without_an_end_or_without_a_command_is_found() -> None:
    with pytest.raises(ValueError, match="line 3: a block that never ends"):
        fences("# Lab\n\n```console\n$ echo a\n")
    (fence,) = fences("```console\na\n$ echo a\n```\n")
    with pytest.raises(ValueError, match="line 2: a console block begins with"):
        commands(fence)


def _parse(words: list[str]) -> None:
    """Parse the words behind `python -m nanorunner`; fails the test for one that is unknown."""
    try:
        if words and words[0] == "bench":
            bench.parser_of(words[1]).parse(words[2:])
        elif words and words[0] in workshop.COMMANDS:
            parser = _workshop_parser(words[0])
            assert not parser.parse_known_intermixed_args(words[1:])[1], words
        elif words and words[0] == "doctor":
            assert set(words[1:]) <= {"--tp", "2"}, words
        else:
            cli.run_parser().parse(words)
    except SystemExit:
        pytest.fail(f"this does not parse: {shlex.join(words)}")


def _workshop_parser(name: str) -> Parser:
    return workshop.parser_of(name, importlib.import_module(workshop.COMMANDS[name][0]))


@cache
def _parsers() -> list[Parser]:
    return [
        cli.run_parser(),
        *map(_workshop_parser, workshop.COMMANDS),
        *map(bench.parser_of, bench.MEASURING),  # the others import torch
    ]
