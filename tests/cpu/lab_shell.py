"""Works through a workshop page as a learner does: one shell, one folder, command by command.

    lab_shell(folder) -> LabShell -> work_through(page's text, shell)

The folder looks like a clone after `bash scripts/demo`: links to all that the repository has, and
a .venv that leads to the Python that runs this test. All of a page's commands go to one bash, so
`cd`, `source` and `$?` do what they do for a learner, with nothing to read on stdin.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab_text import APPEND, CONSOLE, ROOT, Command, commands, fences, mismatch

COMMAND_LIMIT_S = 300.0  # most take a second or two, the start of the embedded model some more
END_LIMIT_S = 60.0  # of what takes milliseconds
SHOW_CODE = "echo $?"  # a page's way to say that the command before is meant to fail
WRONG_ANSWER, WRONG_CODE = "not yet", 1  # `check` says so, and ends with that exit code
# cpu/conftest.py sets it for the tests' own process; a learner's shell does not have it
DROPPED = {"TRITON_INTERPRET"}
NOT_LINKED = {".git", ".venv", "lab", "build", "dist"}
SETUP_FILES = "setup.py pyproject.toml scripts/setup.sh"  # as scripts/setup.sh has them


class LabShell:
    """One bash; run() gives it a command and returns what was seen, and the exit code."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,  # so that a command that hangs is ended with all it started
        )

    def run(self, command: str, timeout_s: float = COMMAND_LIMIT_S) -> tuple[list[str], int]:
        """Return the lines that a command wrote, stderr among them, and its exit code.

        Raises TimeoutError after timeout_s, and RuntimeError when the shell itself has ended, both
        with what was seen so far; the shell is over then.
        """
        mark = secrets.token_hex(16)
        assert self._process.stdin is not None, "Popen was asked for a pipe"
        # in this very shell, for `cd`; the last part makes the command's code the next one's $?
        script = f"{{ {command}\n}} </dev/null\ncode=$?\necho {mark} $code\n(exit $code)\n"
        self._process.stdin.write(script.encode())
        self._process.stdin.flush()
        text = self._read_until(mark, command, timeout_s)
        seen, _, code = text.rpartition(mark)
        return seen.splitlines(), int(code)

    def close(self) -> None:
        """End the shell and all that still runs in it. A second call does nothing."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_LIMIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "Popen was asked for pipes"
            pipe.close()

    def _read_until(self, mark: str, command: str, timeout_s: float) -> str:
        assert self._process.stdout is not None, "Popen was asked for a pipe"
        fd, data, deadline = self._process.stdout.fileno(), b"", time.monotonic() + timeout_s
        while not (mark.encode() in data and data.endswith(b"\n")):
            left_s = deadline - time.monotonic()
            if not select.select([fd], [], [], max(0.0, left_s))[0]:
                self.close()
                said = data.decode(errors="replace")
                raise TimeoutError(f"{command}: not done within {timeout_s:g} s; seen:\n{said}")
            if not (more := os.read(fd, 1 << 16)):
                said = data.decode(errors="replace")
                raise RuntimeError(f"{command}: the shell has ended; seen:\n{said}")
            data += more
        return data.decode(errors="replace")


@contextmanager
def lab_shell(folder: Path, *, with_gpu: bool = False) -> Iterator[LabShell]:
    """Make the folder look like a clone, open a shell in it, and close that at the end."""
    _make_clone(folder)
    environment = {name: value for name, value in os.environ.items() if name not in DROPPED}
    environment |= {
        "PYTHONPATH": str(ROOT),  # stands for `pip install -e .`
        "PYTHONUNBUFFERED": "1",  # as on a terminal: stdout and stderr in the order of writing
        "PIP_NO_INDEX": "1",  # nothing is to be installed; if something is, fail at once
        "COLUMNS": "100",
    }
    if not with_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    shell = LabShell(folder, environment)
    try:
        yield shell
    finally:
        shell.close()


def work_through(
    page: str,
    shell: LabShell,
    kinds: tuple[str, ...] = (CONSOLE,),
    timeout_s: float = COMMAND_LIMIT_S,
) -> int:
    """Do all that a page says in blocks of these kinds, in order; return the number of commands.

    timeout_s is of one command.
    Raises AssertionError for the first command whose output or exit code is not the page's.
    """
    num_run = 0
    for fence in fences(page):
        if fence.kind.startswith(APPEND):
            _append(shell, fence.kind[len(APPEND) :], fence.lines)
        elif fence.kind in kinds:
            todo = commands(fence)
            for command, after in zip(todo, [*todo[1:], None], strict=True):
                may_fail = after is not None and after.text == SHOW_CODE
                _do(shell, command, timeout_s, may_fail=may_fail)
                num_run += 1
    return num_run


def _do(shell: LabShell, command: Command, timeout_s: float, *, may_fail: bool) -> None:
    seen, code = shell.run(command.text, timeout_s)
    problem = mismatch(command.expected, seen)
    is_wrong_answer = any(WRONG_ANSWER in line for line in command.expected)
    wanted = WRONG_CODE if is_wrong_answer else 0
    if not problem and code != wanted and not may_fail:
        problem = f"exit code {code}, not {wanted}; a page says so by `$ {SHOW_CODE}`"
    if problem:
        told = "\n".join(seen)
        raise AssertionError(f"line {command.line}: $ {command.text}\n{problem}\nall seen:\n{told}")


def _append(shell: LabShell, name: str, lines: tuple[str, ...]) -> None:
    """Add lines at the end of a file in the folder that the shell is in."""
    (where,), _ = shell.run("pwd")
    with (Path(where) / name).open("a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(lines) + "\n")


def _make_clone(folder: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name not in NOT_LINKED:
            (folder / entry.name).symlink_to(entry)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    # what scripts/setup.sh leaves behind an installation, so that it finds nothing to do
    stamp = f"printf '%s \\n' \"$(cat {SETUP_FILES} | cksum)\" > .venv/nanorunner-installed"
    subprocess.run(["bash", "-c", stamp], cwd=folder, check=True, timeout=END_LIMIT_S)
