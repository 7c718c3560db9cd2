"""Both READMEs say what is so: their table, files, links and flags; and they say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_text import TEXT, fences, pair_problem

from nanorunner.bench.cli import COMMANDS, parser_of
from nanorunner.cli import run_parser

ROOT = Path(__file__).resolve().parents[2]
READMES = ["README.md", "README.zh.md"]
PAGES = [*READMES, "docs/architecture.md"]
FILE = re.compile(r"\w[\w./-]*\.(?:py|md)\b", re.ASCII)  # Chinese may stand right beside a name
NAMES = re.compile(rf"{FILE.pattern}|\b[A-Z][a-z]+[A-Z]\w*|\b\w+/(?=\s)", re.ASCII)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def files_of_the_project() -> Iterator[str]:
    """Yield every file below the root; not in hidden folders, where others write meanwhile."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield from (Path(folder, name).relative_to(ROOT).as_posix() for name in files)


def test_the_table_is_what_the_result_files_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "readme_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{readme} is up to date" for readme in READMES]


def test_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) < 200


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    names = set(FILE.findall(text(page)))
    everywhere = set(files_of_the_project())
    missing = [n for n in names if not any(f == n or f.endswith("/" + n) for f in everywhere)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)", text(page)):
        assert link.startswith("https://") or ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text(page), re.ASCII))
    script_flags = {"--model", "--tp", "--loads"}  # of scripts/bench_engine.py
    known = set(run_parser().long_flags()) | script_flags
    for name in COMMANDS:
        known |= set(parser_of(name).long_flags())
    assert flags <= known, flags - known


def test_both_readmes_have_the_same_sections_commands_and_code() -> None:
    english, chinese = map(comparable, READMES)
    assert pair_problem(english, chinese) == ""


def test_both_readmes_list_the_same_files_and_parts_in_their_drawings() -> None:
    ours, theirs = ([f for f in fences(comparable(page)) if f.kind == TEXT] for page in READMES)
    for own, other in zip(ours, theirs, strict=True):
        assert NAMES.findall("\n".join(own.lines)) == NAMES.findall("\n".join(other.lines))


@pytest.mark.parametrize(
    ("old", "new"),
    [("--tp 2", "--tp 3"), ("\n## ", "\n### "), ("temperature=0,", "temperature=1,")],
)
def test_a_readme_with_another_command_heading_or_line_of_code_is_found(old: str, new: str) -> None:
    english, chinese = map(comparable, READMES)
    assert old in chinese
    assert pair_problem(english, chinese.replace(old, new, 1)) != ""


def comparable(page: str) -> str:
    """Return a README whose comments are empty, and whose blocks that name no language are `text`.

    So the words in comments and drawings may be in another language; all else is compared.
    """
    lines = text(page).splitlines()
    for fence in fences(text(page)):
        if not fence.kind:
            lines[fence.line - 1] += TEXT
    return "\n".join(re.sub(r" {2,}# .*$", "  #", line) for line in lines)


def test_no_page_names_a_path_of_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|home)/", text(page))
