"""The tap's file is refused before the start, and later loses lines aloud, never the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nanorunner import tap_file
from nanorunner.config import make_config
from nanorunner.tap import open_tap
from nanorunner.tap_file import TapFile

PATIENCE_S = 100.0  # of a wait for another thread, which a busy machine may stop for seconds
PROMPT_S = 20.0  # of what takes milliseconds; to wait for each line would take 50 s


def row(frame: int) -> dict[str, Any]:
    return {"frame": frame, "what": "nothing " * 100}


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog hear our logger, which the command line cuts off from the others."""
    monkeypatch.setattr(logging.getLogger("nanorunner"), "propagate", True)


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    path.write_text("an earlier run's\n")
    file = TapFile(str(path))
    for frame in (1, 2):
        file.write(row(frame))
        assert [json.loads(line) for line in path.read_text().splitlines()][-1] == row(frame)
    file.close()
    file.close()
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path, tp: int) -> None:
    path = tmp_path / "missing" / "frames.jsonl"
    with pytest.raises(ValueError, match=r"tap_json .*missing/frames\.jsonl: No such file"):
        open_tap(make_config({"tp": tp, "tap_json": str(path)}))
    assert not path.parent.exists()


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Is a directory; name a file"):
        TapFile(str(tmp_path))


def test_a_pipe_that_nobody_reads_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_file, "READER_WAIT_S", PATIENCE_S)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"tap_json .*pipe: nobody reads this pipe; start its"):
        TapFile(str(path))
    assert time.monotonic() - start < PROMPT_S


def test_a_slow_reader_of_a_pipe_gets_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_file, "READER_WAIT_S", PATIENCE_S)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = TapFile(str(path))
    os.set_blocking(reader, True)
    found = bytearray()

    def read_slowly() -> None:
        while data := os.read(reader, 8192):
            found.extend(data)
            time.sleep(0.001)

    thread = threading.Thread(target=read_slowly, daemon=True)
    thread.start()
    for frame in range(300):  # four times what a pipe holds
        file.write(row(frame))
    file.close()
    thread.join(PATIENCE_S)
    os.close(reader)
    assert [json.loads(line)["frame"] for line in found.splitlines()] == list(range(300))


def test_who_reads_while_the_engine_stands_still_is_not_taken_for_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = TapFile(str(path))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(file._fd, bytes(4096))
    looks = 0

    def monotonic() -> float:
        """Have the second look at the clock come late, and after the reader has read."""
        nonlocal looks
        looks += 1
        if looks == 2:
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.read(reader, 4096)
        return looks * 2 * tap_file.READER_WAIT_S

    monkeypatch.setattr(time, "monotonic", monotonic)
    file.write(row(1))
    monkeypatch.undo()
    file.close()
    assert json.loads(os.read(reader, 8192)) == row(1)
    os.close(reader)
    assert caplog.records == []


def test_a_reader_that_leaves_is_reported_once_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = TapFile(str(path))
    file.write(row(1))
    os.close(reader)
    file.write(row(2))
    file.write(row(3))
    file.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"tap_json {path}: Broken pipe; from frame 2 on nothing is written there"
    )


def test_a_reader_that_reads_nothing_does_not_hold_up_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_file, "READER_WAIT_S", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = TapFile(str(path))
    start = time.monotonic()
    for frame in range(1, 300):
        file.write(row(frame))
    assert 0.2 <= time.monotonic() - start < PROMPT_S, "it has waited more than once"
    file.close()
    os.close(reader)
    (record,) = caplog.records
    assert "read by nobody for 0.2 s; from frame " in record.getMessage()
