"""Cut at any byte, a sweep's file still gives every whole row, and the next writer goes on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorunner.bench.journal import FILE_NAME, Journal, latest, read_rows

ROWS = st.lists(
    st.dictionaries(st.text(max_size=3), st.one_of(st.text(max_size=9), st.integers())).map(
        lambda row: {**row, "key": json.dumps(row)}
    ),
    max_size=4,
)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@given(rows=ROWS, cut=st.integers(0, 200), more=ROWS)
@settings(max_examples=40)
def test_a_cut_anywhere_loses_one_row_at_most(
    rows: list[dict[str, Any]], cut: int, more: list[dict[str, Any]]
) -> None:
    content = lines(rows)[:cut]
    num_whole = content.count(b"\n")
    torn = len(content) - (content.rfind(b"\n") + 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:  # every row is synced: no disk
        folder = Path(name)
        (folder / FILE_NAME).write_bytes(content)
        assert read_rows(folder / FILE_NAME) == (rows[:num_whole], torn)
        with Journal(folder) as journal:
            assert (journal.rows, journal.num_torn_bytes) == (rows[:num_whole], torn)
            for row in more:
                journal.append(row)
        assert (folder / FILE_NAME).read_bytes() == lines(rows[:num_whole] + more)
        assert read_rows(folder / FILE_NAME) == (rows[:num_whole] + more, 0)


def test_a_damaged_line_in_the_middle_is_no_torn_one(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b'{"key": \n' + lines([{"key": "a"}]))
    with pytest.raises(ValueError, match="line 1: is no row"):
        read_rows(path)
    path.write_bytes(b"[]\n")
    with pytest.raises(ValueError, match="line 1"), Journal(tmp_path):
        pass


def test_two_writers_never_share_a_folder(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(BlockingIOError):
        Journal(tmp_path)
    with Journal(tmp_path) as journal:  # free again
        assert journal.rows == []


def test_the_newest_row_of_a_key_counts() -> None:
    rows = [{"key": "a", "status": "failed"}, {"key": "b"}, {"key": "a", "status": "ok"}]
    assert latest(rows) == {"a": rows[2], "b": rows[1]}


def test_a_row_that_is_no_json_is_never_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal, pytest.raises(ValueError, match="JSON"):
        journal.append({"key": "a", "value": float("nan")})
    assert (tmp_path / FILE_NAME).read_bytes() == b""
