"""A trace's folder is made ready: what an earlier run left there is not taken for this run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanorunner.config import Config
from nanorunner.trace import open_trace


def test_an_earlier_runs_files_go_and_others_stay(tmp_path: Path) -> None:
    for name in ("rank-0.jsonl", "rank-7.jsonl", "trace.json", "timeline.html", "notes.txt"):
        (tmp_path / name).write_text("of the day before")
    trace = open_trace(Config(model="tiny-llama", trace=str(tmp_path)))
    assert trace.folder == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_its_place_is_refused_by_name(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    with pytest.raises(ValueError, match=f"trace {taken}: .*; name a folder"):
        open_trace(Config(model="tiny-llama", trace=str(taken)))
