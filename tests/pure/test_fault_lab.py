"""Each fault of the wire and of processes is as the lab says, and the lab sees when it is not.

Those that need a model are in tests/cpu/test_fault_lab_model.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanorunner.cli import main
from nanorunner.workshop import fault_lab, fault_processes, leftovers
from nanorunner.workshop.fault_lab import MARK, Lab
from nanorunner.workshop.fault_report import FaultReport
from nanorunner.workshop.faults import FAULTS, Fault, play
from nanorunner.workshop.leftovers import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
# fault -> words that its report must hold
WITHOUT_A_MODEL = {
    "kill-idle": ["was killed by SIGKILL", "no call on the wire"],
    "stop": ["is stopped, by a signal or a debugger", "goes on; the call returned"],
    "too-big": ["33 frames", "put 8,388,608 bytes together"],
    "skip": ["ChannelError: rank 1: frame", "instead of"],
    "oom": ["MemoryError: the lab took rank 1's memory away", "exit code 3"],
    "orphan": ["every rank has left"],
    "leftover": ["doctor: ", "which a crashed start had left"],
    "no-ack": ["overwrite after every ack: rank 1 lost 0 (0 torn), rank 2 lost 0 (0 torn)"],
}


@pytest.mark.parametrize("name", WITHOUT_A_MODEL)
def test_a_fault_is_as_it_must_be(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", name]) == 0
    text = capsys.readouterr().out
    for words in [*WITHOUT_A_MODEL[name], f"{name}: ", "\n  took  ", "\n  so    as it must be"]:
        assert words in text
    assert "left  no process, nothing in /dev/shm" in text


def test_without_a_name_the_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults"]) == 0
    text = capsys.readouterr().out
    for name, fault in FAULTS.items():
        assert f"  {name} " in text
        assert fault.must in text


def test_an_unknown_fault_is_refused_by_the_closest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["faults", "kill-idel"]) == 2
    assert "unknown fault 'kill-idel'; did you mean kill-idle?" in capsys.readouterr().err


def test_what_is_not_as_it_must_be_is_said_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(lab: Lab) -> None:
        lab.report.took(2.0, 1.0, "to see it")
        raise TimeoutError("waited 1 s for nothing")

    monkeypatch.setitem(FAULTS, "late", Fault("nothing", "nothing", late))
    assert main(["faults", "late", "no-ack"]) == 1
    text = capsys.readouterr().out
    assert "WRONG it took more than 1 s" in text
    assert "WRONG waited 1 s for nothing" in text
    assert "so    NOT as it must be" in text
    assert text.endswith("1 of 2 as they must be; not late\n")
    assert main(["faults", "late", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["fault"], said["good"], len(said["wrong"])) == ("late", False, 2)


def test_a_process_and_a_name_that_are_left_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_lab, "SETTLE_S", 0.2)
    name = SHARED_MEMORY / f"nanorunner-test-{os.getpid()}"
    report = FaultReport("left", say=lambda text: None)
    sleeper = None
    try:
        with Lab(report) as lab:
            sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            name.touch()
            assert lab.pids() == {sleeper.pid}
        assert report.wrong == ["something is left"]
    finally:
        name.unlink()
        if sleeper is not None:
            sleeper.kill()
            sleeper.wait(100)
    assert MARK not in os.environ


def test_names_of_others_are_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    for name in ("nanorunner-1", "torch_1", "sem.mp-1", "psm_1", "sem.other", "chrome"):
        (tmp_path / name).touch()
    mine = {"nanorunner-1", "torch_1", "sem.mp-1", "psm_1"}
    assert leftovers.shared_names() == mine
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    assert leftovers.shared_names() == set()


def test_a_death_that_nobody_reports_in_time_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_processes, "DETECTION_S", 0.0)
    report = play("kill-idle", as_json=True)
    # the second: this process stood still until the rank had been reported
    late = ["waited 0 s for the report of a dead rank"], ["it took more than 0 s"]
    assert report.wrong in late


def test_play_returns_the_report_that_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    report = play("no-ack", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["fault"], said["good"], said["seen"]) == ("no-ack", True, report.seen)
