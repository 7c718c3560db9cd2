"""A sweep killed at any moment loses one point at most; a bad point never stops the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rank_harness import wait_until

from nanorunner.bench.cli import main
from nanorunner.bench.fresh_process import run_fresh
from nanorunner.bench.journal import FILE_NAME, read_rows
from nanorunner.bench.progress import Progress

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "sweep_stub.py"
LIMIT_S = 100.0  # of what takes a second


def write_spec(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.yaml"
    spec = {"program": ["python", str(STUB)], "repeat": 1, "timeout_s": LIMIT_S, **changes}
    path.write_text(yaml.safe_dump(spec))
    return path


def words(spec: Path, out: Path, *flags: str) -> list[str]:
    return ["sweep", str(spec), "--out", str(out), *flags]


def rows_of(out: Path) -> list[dict[str, Any]]:
    return read_rows(out / FILE_NAME)[0]


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits for init to take its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_killed_and_resumed_it_has_every_row_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    spec = write_spec(tmp_path, base={"pids": str(pids), "hang_as": 2}, vary={"value": [1, 2, 3]})
    first = subprocess.Popen(
        [sys.executable, "-m", "nanorunner", "bench", *words(spec, out)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: len(list(pids.iterdir())) == 2)
    os.kill(first.pid, signal.SIGKILL)  # while the second point runs
    first.wait(LIMIT_S)
    # the kernel ends the point with the sweep: nobody else is left to do it
    wait_until(lambda: not any(lives(int(each.name)) for each in pids.iterdir()))
    before = rows_of(out)
    assert len(before) == 1

    assert main(words(spec, out)) == 2
    assert "holds 1 row(s) already; add --resume" in capsys.readouterr().err

    with (out / FILE_NAME).open("ab") as file:
        file.write(b'{"key": "torn')  # as if the kill had come while a row was written
    assert main(words(spec, out, "--resume")) == 0
    printed = capsys.readouterr()
    assert "cut a torn line of 13 bytes" in printed.err
    assert "about 0 s left" in printed.err
    summary = json.loads(printed.out.splitlines()[-1])
    assert (summary["ok"], summary["failed"], summary["there_before"]) == (3, 0, 1)
    rows = rows_of(out)
    assert rows[0] == before[0]
    assert len({row["key"] for row in rows}) == len(rows) == 3
    values = {row["settings"]["value"]: row["result"]["repeats"] for row in rows}
    assert values == {value: [{"output_tokens_per_s": value}] for value in (1, 2, 3)}

    assert main(words(spec, out, "--resume")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["there_before"] == 3
    assert rows_of(out) == rows


def test_a_bad_point_is_a_row_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    spec = write_spec(
        tmp_path,
        base={"pids": str(pids)},
        vary={"mode": ["good", "fail", "silent", "nan", "empty"]},
    )
    assert main(words(spec, out)) == 1
    rows = {row["settings"]["mode"]: row for row in rows_of(out)}
    assert {mode: row["status"] for mode, row in rows.items()} == {
        "good": "ok",
        "fail": "failed",
        "silent": "failed",
        "nan": "failed",
        "empty": "failed",
    }
    assert rows["fail"]["exit_code"] == 3
    assert rows["fail"]["error"] == ["exit code 3", "a first line", "ValueError: planted"]
    assert "no result" in rows["silent"]["error"][0]
    assert "NaN" in rows["nan"]["error"][0]
    assert "is no result of" in rows["empty"]["error"][0]
    assert "ValueError: planted" in capsys.readouterr().out
    assert len(list(pids.iterdir())) == 5
    assert not any(lives(int(each.name)) for each in pids.iterdir())


def test_a_point_that_hangs_is_killed_with_its_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()

    def tick(progress: Progress) -> None:
        """Hold the sweep up, before it looks at the clock, until the point has its child."""
        wait_until(lambda: len(list(pids.iterdir())) == 2)

    monkeypatch.setattr(Progress, "tick", tick)
    spec = write_spec(tmp_path, base={"pids": str(pids), "mode": "hang"}, timeout_s=1)
    assert main(words(spec, out)) == 1
    (row,) = rows_of(out)
    assert row["status"] == "timeout"
    assert row["error"][0] == "not done after 1 s: killed"
    assert row["exit_code"] == -signal.SIGKILL
    assert len(list(pids.iterdir())) == 2  # it had a child
    assert not any(lives(int(each.name)) for each in pids.iterdir())


def test_a_point_that_has_ended_in_time_is_not_late_because_the_sweep_is(tmp_path: Path) -> None:
    before = psutil.Process().children()

    def tick() -> None:
        """Hold the sweep up until the point has ended; by then its time is over."""
        wait_until(
            lambda: any(
                child.status() == psutil.STATUS_ZOMBIE
                for child in psutil.Process().children()
                if child not in before
            )
        )

    outcome = run_fresh(["python", "-c", "pass"], tmp_path / "log", 0.0, tick)
    assert (outcome.exit_code, outcome.timed_out) == (0, False)


def test_rows_of_another_machine_are_named_and_measured_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, spec = tmp_path / "out", write_spec(tmp_path)
    with monkeypatch.context() as there:
        there.setattr("nanorunner.bench.sweep.environment", lambda: {"torch": "0.1"})
        assert main(words(spec, out)) == 0
    monkeypatch.setattr("nanorunner.bench.sweep.environment", lambda: {"torch": "0.2"})
    capsys.readouterr()
    assert main(words(spec, out, "--resume")) == 0
    printed = capsys.readouterr()
    assert "1 row(s) there are another origin's, and measured anew: torch 0.1 -> 0.2" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["there_before"] == 0
    assert [row["origin"]["torch"] for row in rows_of(out)] == ["0.1", "0.2"]


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(tmp_path)
    assert main(words(spec, spec / "out")) == 2  # below a file
    assert "Not a directory" in capsys.readouterr().err


def test_a_dry_run_prints_every_command_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    points = {
        "command": "latency",
        "base": {"model": "tiny-qwen3", "load_format": "dummy", "enforce_eager": True},
        "vary": {"tp": [1, 2], "batch": [1, 8]},
        "repeat": 2,
    }
    spec.write_text(yaml.safe_dump(points, sort_keys=False))
    out = tmp_path / "out"
    assert main(words(spec, out, "--dry-run", "--set", "runner=[v1, v2]")) == 0
    *commands, total, last = capsys.readouterr().out.splitlines()
    assert len(commands) == len(set(commands)) == 16
    start = "python -m nanorunner bench latency --model tiny-qwen3 --load-format dummy"
    assert all(line.startswith(f"{start} --enforce-eager --tp ") for line in commands)
    assert all(f"--out {out}/logs/" in line for line in commands)
    assert "8 point(s) x 2 repeat(s) = 16 processes" in total
    assert json.loads(last) == {"kind": "dry run", "points": 8, "processes": 16}
    assert not out.exists()


def test_a_setting_that_the_command_refuses_is_refused_before_the_first_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "bath": ([1], "unknown setting 'bath'; did you mean batch?"),
        "batch": ([1, "two"], "point {'batch': 'two'}"),
        "runner": (["v1", "v3"], "point {'runner': 'v3'}: runner 'v3': use v1 or v2"),
        "trace": (["a", "b"], "trace a: every process would write there"),
    }
    for name, (values, reason) in cases.items():
        spec = tmp_path / f"{name}.yaml"
        spec.write_text(yaml.safe_dump({"command": "latency", "vary": {name: values}}))
        assert main(words(spec, tmp_path / "out")) == 2
        printed = capsys.readouterr()
        assert reason in printed.err
        assert printed.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["tp=", "help=true", "definitions=true", "out=x.json"])
def test_a_change_that_would_measure_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """A script's empty variable, and flags that are no settings."""
    out = tmp_path / "out"
    assert main(["sweep", "smoke", "--out", str(out), "--dry-run", "--set", change]) == 2
    error = capsys.readouterr().err
    assert "no value" in error or "unknown setting" in error
    assert not out.exists()
