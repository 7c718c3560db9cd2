"""A trace folder is read whole, or refused by the name of what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_trace import write_synthetic

from nanorunner.cli import main
from nanorunner.workers.trace_file import file_name
from nanorunner.workshop.timeline_read import read_run

Change = Callable[[list[str]], list[str]]


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("tp", [1, 3])
def test_what_a_rank_wrote_is_what_is_read(tmp_path: Path, tp: int, has_gpu: bool) -> None:
    written = write_synthetic(tmp_path, tp=tp, has_gpu=has_gpu, num_steps=5)
    (tmp_path / "notes.txt").write_text("not a trace")
    run = read_run(tmp_path)
    assert (run.tp, run.has_gpu, run.num_lost) == (tp, has_gpu, 0)
    for found, expected in zip(run.ranks, written, strict=True):
        for columns in zip(found.spans, expected.table(), strict=True):
            assert np.array_equal(*columns)
        for columns in zip(found.facts, expected.facts(), strict=True):
            assert np.array_equal(*columns)
        assert found.clock_error_ns == (4000 if has_gpu else None)
    first, last = run.limits_ns()
    assert all((each.spans.begin >= first).all() for each in run.ranks)
    assert all((each.spans.end <= last).all() for each in run.ranks)


def of_head(**changes: Any) -> Change:
    """Return a change of the first line; a value of None takes the field out."""

    def change(lines: list[str]) -> list[str]:
        head = json.loads(lines[0]) | changes
        head = {key: value for key, value in head.items() if value is not None}
        return [json.dumps(head) + "\n", *lines[1:]]

    return change


def of_last(**changes: Any) -> Change:
    """Return a change of the last line."""
    return lambda lines: [*lines[:-1], json.dumps(json.loads(lines[-1]) | changes) + "\n"]


def cut_off(lines: list[str]) -> list[str]:
    """Return a file whose writer was killed."""
    return [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]


BROKEN = {
    "cut off": (cut_off, "is no JSON"),
    "empty": (lambda lines: [], "holds no span"),
    "a head alone": (lambda lines: lines[:1], "holds no span"),
    "a list": (lambda lines: [*lines, "[]\n"], "is no JSON object"),
    "neither": (lambda lines: [*lines, '{"what": 1}\n'], "neither a span nor a step's figures"),
    "no head": (lambda lines: lines[1:], "line 1: names no schema"),
    "another schema": (of_head(schema=2), "line 1: has schema 2; this nanorunner reads schema 1"),
    "no tp": (of_head(tp=None), "line 1: tp is null"),
    "tp as a word": (of_head(tp="2"), 'line 1: tp is "2"'),
    "no anchors": (of_head(clock={}), "gpu_anchors is null"),
    "another rank": (of_head(rank=0), "is rank 0's"),
    "a name nobody knows": (of_last(name="sleep"), "'sleep' is no span's name"),
    "another kind": (of_last(kind="tpu"), "kind 'tpu'; it is cpu or gpu"),
    "a float": (of_last(begin=1.5), "are whole numbers"),
    "backwards": (of_last(begin=8_000, end=7_000), "ends 1000 ns before it begins"),
    "another time": (of_head(time="2020"), 'is of another run than rank-0.jsonl: time is "2020"'),
    "another machine": (of_head(machine={"cpu": "x"}), "of another run than rank-0.jsonl: machine"),
    "another tp": (of_head(tp=3), "tp is 3, not 2"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_its_name(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic(tmp_path, num_steps=2)
    path = tmp_path / file_name(1)
    change, words = BROKEN[what]
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    assert main(["timeline", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"nanorunner: {path}")
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert {each.name for each in tmp_path.iterdir()} == {file_name(0), file_name(1)}


def test_a_folder_that_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*words: str) -> str:
        assert main(["timeline", *words]) == 2
        return capsys.readouterr().err

    assert f"{tmp_path / 'x'}: no such folder" in refusal(str(tmp_path / "x"))
    assert f"{tmp_path}: no rank-N.jsonl in it" in refusal(str(tmp_path))
    write_synthetic(tmp_path, tp=3, num_steps=2)
    (tmp_path / file_name(1)).unlink()
    assert f"{tmp_path / 'rank-1.jsonl'}: is missing; the run had tp 3" in refusal(str(tmp_path))
    (tmp_path / file_name(0)).unlink()
    assert f"{tmp_path / 'rank-0.jsonl'}: is missing" in refusal(str(tmp_path))
    (tmp_path / file_name(2)).write_bytes(b"\xff\xfe")
    assert "is missing" in refusal(str(tmp_path))


def test_two_runs_in_one_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic(tmp_path / "two", tp=2, num_steps=2)
    write_synthetic(tmp_path / "three", tp=3, num_steps=2)
    shutil.copy(tmp_path / "three" / file_name(2), tmp_path / "two")
    assert main(["timeline", str(tmp_path / "two")]) == 2
    expected = "rank-2.jsonl: is of another run than rank-0.jsonl: tp is 3, not 2"
    assert expected in capsys.readouterr().err
    # a later run of the same shape, whose clocks do not tell it
    write_synthetic(tmp_path / "two", tp=2, num_steps=2)
    write_synthetic(tmp_path / "later", tp=2, num_steps=3)
    (tmp_path / "two" / file_name(2)).unlink()
    shutil.copy(tmp_path / "later" / file_name(1), tmp_path / "two")
    assert main(["timeline", str(tmp_path / "two")]) == 2
    assert "rank 1: frame 7 was never sent, though no span is lost" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic(tmp_path, num_steps=2)
    (tmp_path / file_name(0)).write_bytes(b"\xff\xfe{}")
    assert main(["timeline", str(tmp_path)]) == 2
    assert f"{tmp_path / 'rank-0.jsonl'}: is no text" in capsys.readouterr().err
