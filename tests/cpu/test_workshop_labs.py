"""Every command of the workshop's labs shows what the page says, in the order of the page.

The pages are the test: lab_text.py says how they are read, lab_shell.py how they are worked
through. Blocks that need a GPU are left to tests/gpu/test_workshop_gpu_lab.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lab_shell import lab_shell, work_through
from lab_text import english_pages

LABS = [page for page in english_pages() if page.name[0].isdigit()]
FEWEST_COMMANDS = 8  # so that a page whose blocks are not found cannot pass


@pytest.mark.limit(600)  # 5 to 30 s each on two quiet cores
@pytest.mark.parametrize("page", LABS, ids=[page.stem for page in LABS])
def test_a_lab_shows_what_its_page_says(page: Path, tmp_path: Path) -> None:
    with lab_shell(tmp_path) as shell:
        assert work_through(page.read_text(encoding="utf-8"), shell) >= FEWEST_COMMANDS


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("$ echo a\na", ""),
        ("$ echo a\nb", "line 2: [$] echo a\n'b' was expected; seen: 'a'"),
        ("$ echo a >&2\na", ""),
        ("$ printf a\na\n$ cat\n$ echo b\nb", ""),
        ("$ mkdir -p lab && cd lab\n$ pwd\n…/lab", ""),
        ("$ false", "exit code 1, not 0"),
        ("$ false\n$ echo $?\n1", ""),
        ("$ false\n$ echo $?\n2", "'2' was expected; seen: '1'"),
        ("$ echo not yet; (exit 1)\nnot yet", ""),
        ("$ echo not yet\nnot yet", "exit code 0, not 1"),
    ],
)
def test_a_page_that_says_something_else_fails(block: str, problem: str, tmp_path: Path) -> None:
    page = f"```console\n{block}\n```\n"
    with lab_shell(tmp_path) as shell:
        if problem:
            with pytest.raises(AssertionError, match=problem):
                work_through(page, shell)
        else:
            assert work_through(page, shell) == block.count("$ ")


def test_code_of_a_page_goes_to_the_end_of_its_file(tmp_path: Path) -> None:
    page = (
        "```console\n$ mkdir -p lab && cd lab\n$ echo 'a = 1' > my.py\n```\n"
        "```python append=my.py\nprint(a + 1)\n```\n"
        "```console\n$ source ../.venv/bin/activate\n$ python my.py\n2\n```\n"
    )
    with lab_shell(tmp_path) as shell:
        assert work_through(page, shell) == 4


def test_a_command_that_hangs_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    """That no `sleep` is left is seen to by conftest.py, after every test."""
    page = "```console\n$ echo begun; sleep 600 & sleep 600\nbegun\n```\n"
    with lab_shell(tmp_path) as shell:
        shell.run("true")  # bash is there, so an `echo` takes no time
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"not done within 5 s; seen:\nbegun"):
            work_through(page, shell, timeout_s=5)
    assert time.monotonic() - begin < 100
