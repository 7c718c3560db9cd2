"""README says what is so: its table, its files, its links and its flags exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanorunner.bench.cli import COMMANDS, parser_of
from nanorunner.cli import run_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/architecture.md"]


def text(page: str) -> str:
    return (ROOT / page).read_text()


def test_the_table_is_what_the_result_files_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "readme_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) < 200


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    names = set(re.findall(r"[\w/]+\.(?:py|md)\b", text(page)))
    everywhere = {
        p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.*") if ".venv" not in p.parts
    }
    missing = [n for n in names if not any(f == n or f.endswith("/" + n) for f in everywhere)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text(page)))
    script_flags = {"--model", "--tp", "--loads"}  # of scripts/bench_engine.py
    known = set(run_parser().long_flags()) | script_flags
    for name in COMMANDS:
        known |= set(parser_of(name).long_flags())
    assert flags <= known, flags - known


def test_no_page_names_a_path_of_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|home)/", text(page))
