"""Rank 0 itself is killed, interrupted or stopped: its ranks follow it, and no name is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_harness import TIMEOUT_S, rank_pids, state, tagged_pids, wait_until, with_tag

PROGRAM = Path(__file__).with_name("rank0_program.py")
# How long ranks may outlive rank 0: the kernel ends them with it, but for one that has still to ask
# it for that. To find them all takes a busy machine seconds; no timeout of a rank is as short.
LEAVE_S = 20.0
PHASES = ["spawn", "load", "step", "burn", "idle"]
SIGNS = {  # of dummy_runner.py: which files are there once the program is in a phase
    "load": ["load-1", "load-2"],
    "step": ["sleep-0"],
    "burn": ["burn-1"],
    "interrupt": ["stay-0"],
}


class Program:
    """The program as a child in its own process group."""

    def __init__(self, phase: str, folder: Path) -> None:
        self.tag = uuid.uuid4().hex
        self.signs, hold, self.stay = folder / "signs", folder / "hold", folder / "stay"
        self.signs.mkdir()
        self.stay.touch()
        if phase in ("spawn", "load"):
            hold.touch()  # or the start would be over before a slow test has seen it
        files = {"SIGNS": self.signs, "HOLD": hold, "STAY": self.stay}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), phase],
            env=with_tag(self.tag, **{f"DUMMY_{name}": str(path) for name, path in files.items()}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def wait_for(self, what: str) -> dict[str, Any]:
        """Read the program's lines up to the one that says `what`, and return that."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["what"] == what:
                return said
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        raise AssertionError(f"the program ended before {what!r}: {errors}")

    def reach(self, phase: str) -> None:
        """Wait until the program is in the phase that it was started for."""
        self.wait_for({"spawn": "spawn", "load": "starting"}.get(phase, "ready"))
        wait_until(lambda: all((self.signs / name).exists() for name in SIGNS.get(phase, [])))

    def end(self) -> str:
        """Wait for the end; return stderr (lines of stdout may lie in wait_for()'s buffer)."""
        return self.process.communicate(timeout=TIMEOUT_S)[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    programs: list[Program] = []

    def start_program(phase: str) -> Program:
        programs.append(Program(phase, tmp_path))
        return programs[-1]

    yield start_program
    for program in programs:
        for pid in tagged_pids(program.tag):
            with contextlib.suppress(ProcessLookupError):  # it went with the one before it
                os.kill(pid, signal.SIGKILL)
        program.process.kill()
        program.process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("phase", PHASES)
def test_ranks_leave_by_themselves_when_rank_0_is_killed(start: Any, phase: str) -> None:
    program = start(phase)
    program.reach(phase)
    os.kill(program.pid, signal.SIGKILL)
    wait_until(lambda: not tagged_pids(program.tag), LEAVE_S)


@pytest.mark.parametrize("phase", PHASES)
def test_killing_the_whole_group_leaves_no_name_in_shared_memory(start: Any, phase: str) -> None:
    before = set(os.listdir("/dev/shm"))
    program = start(phase)
    program.reach(phase)
    os.killpg(program.pid, signal.SIGKILL)
    wait_until(lambda: not tagged_pids(program.tag), LEAVE_S)

    def left() -> list[str]:
        new = set(os.listdir("/dev/shm")) - before
        return [name for name in new if "nanorunner" in name or name.startswith("sem.")]

    # another program's engine has its name for some milliseconds; what this one has left stays
    wait_until(lambda: not left(), LEAVE_S)


@pytest.mark.parametrize("phase", ["load", "burn"])
def test_a_killed_rank_ends_the_program_with_an_error_that_names_it(start: Any, phase: str) -> None:
    program = start(phase)
    program.reach(phase)
    victim = max(rank_pids(program.tag))
    os.kill(victim, signal.SIGKILL)
    errors = program.end()
    assert f"(pid {victim}) was killed by SIGKILL" in errors
    assert not tagged_pids(program.tag)


def test_ctrl_c_waits_for_the_end_of_the_call_and_the_ranks_stay_in_step(start: Any) -> None:
    program = start("interrupt")
    program.reach("interrupt")
    os.killpg(program.pid, signal.SIGINT)
    program.stay.unlink()  # only now does the call end, so Ctrl-C came inside it
    assert program.wait_for("interrupted")["echo"] == [[0, 2], [1, 2], [2, 2]]
    program.wait_for("end")
    errors = program.end()
    assert errors == "", "a clean end says nothing"
    assert program.process.returncode == 0


@pytest.mark.parametrize("phase", ["spawn", "load"])
def test_ctrl_c_during_the_start_ends_every_rank_without_their_tracebacks(
    start: Any, phase: str
) -> None:
    program = start(phase)
    program.reach(phase)
    os.killpg(program.pid, signal.SIGINT)
    errors = program.end()
    assert errors.count("Traceback") == 1, "rank 0's own KeyboardInterrupt alone"
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not tagged_pids(program.tag)


def test_a_whole_job_stopped_by_ctrl_z_goes_on(start: Any) -> None:
    program = start("step")
    program.reach("step")
    os.killpg(program.pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.killpg(program.pid, signal.SIGCONT)
    time.sleep(1.5)
    assert program.process.poll() is None
    assert len(rank_pids(program.tag)) == 2
    os.killpg(program.pid, signal.SIGINT)
    errors = program.end()
    assert "RankDied" not in errors
    assert "is stopped" not in errors


def test_no_rank_holds_what_is_not_its_own_or_spins_when_idle(start: Any) -> None:
    program = start("idle")
    pids = program.wait_for("ready")["pids"]
    for pid in pids[1:]:
        links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in _fds(pid)}
        assert len({link for link in links if link.startswith("socket:")}) == 1
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2")
    wait_until(lambda: all(state(pid) == "S" for pid in pids[1:]))  # an idle rank sleeps


def test_the_segment_has_the_size_and_the_privacy_it_should_have(start: Any) -> None:
    program = start("idle")
    pids = program.wait_for("ready")["pids"]
    with open(f"/proc/{pids[1]}/maps") as maps:
        lines = [line for line in maps if "/dev/shm/nanorunner-" in line]
    first, last = (int(part, 16) for part in lines[0].split()[0].split("-"))
    assert last - first == 1 << 20
    fd = next(
        fd for fd in _fds(pids[1]) if "nanorunner-" in os.readlink(f"/proc/{pids[1]}/fd/{fd}")
    )
    assert os.stat(f"/proc/{pids[1]}/fd/{fd}").st_mode & 0o777 == 0o600


def _fds(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")
