"""The tap says every frame once, in order, with the ranks' own times, and changes nothing else."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dummy_runner
import pytest
from rank_harness import make_config, state, wait_until

from nanorunner.cli import run_parser
from nanorunner.config import make_config as make_settings
from nanorunner.errors import RankDied
from nanorunner.flags import engine_settings
from nanorunner.launch import Ranks
from nanorunner.tap import NO_FRAMES, Tap, open_tap
from nanorunner.tap_file import TapFile
from nanorunner.workers.ack_stamps import LOST, MAX_TP, AckStamps
from nanorunner.workers.channel import (
    FRAGMENT_BYTES,
    HEADER_BYTES,
    RANK_BYTES,
    SEGMENT_BYTES,
    Channel,
)
from nanorunner.workers.messages import METHODS

ALL = METHODS | {"echo"}
PATIENCE_S = 100.0  # of a wait for another thread, which a busy machine may stop for seconds
SAME_BATCH = (7, b"", (), (), None, b"")


class Wire:
    """A wire in this process, with a tap on it when a file is named."""

    def __init__(self, path: Path | None = None, tp: int = 3, level: int = 0) -> None:
        self.path = path
        self.memory = bytearray(SEGMENT_BYTES)
        view = memoryview(self.memory)
        self.writer = Channel(view, 0, tp, ALL, spin_s=0.0)
        self.readers = [Channel(view, rank, tp, ALL, spin_s=0.0) for rank in range(1, tp)]
        self.tap: Tap | None = None
        if path is not None:
            self.tap = Tap(tp, level, TapFile(str(path)))
            self.tap.attach(view, self.writer)
            self.stamps = AckStamps(view, tp)
            for reader in self.readers:
                reader.add_on_ack(partial(self.stamps.write, reader.rank))

    def read(self, *ranks: int) -> None:
        """Let these ranks read one frame each, all if none is named."""
        for reader in self.readers:
            if not ranks or reader.rank in ranks:
                reader.read_shm(PATIENCE_S)

    def rows(self) -> list[dict[str, Any]]:
        assert self.path is not None
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        if self.tap is not None:
            self.tap.close()
            self.stamps.close()
        for end in (self.writer, *self.readers):
            end.close()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path / "frames.jsonl")
    yield wire
    wire.close()


def look(wire: Wire) -> list[int]:
    """Let the tap look; return the numbers of the frames that it has said so far."""
    assert wire.tap is not None
    wire.tap.look()
    return [row["frame"] for row in wire.rows()]


def test_a_frame_is_said_when_every_rank_has_acked_it_and_in_order(wire: Wire) -> None:
    calls: list[tuple[Any, ...]] = [("load_model",), ("allocate_kv", 64), ("counters",)]
    for call in calls:
        wire.writer.write_shm(*call)
    assert look(wire) == []
    wire.read(1)
    wire.read(1)
    assert look(wire) == []
    wire.read(2)
    assert look(wire) == [1]
    wire.read(2)
    assert look(wire) == [1, 2]
    wire.read()
    assert look(wire) == [1, 2, 3]
    rows = wire.rows()
    assert [row["method"] for row in rows] == [call[0] for call in calls]
    assert rows[1]["what"] == "64 KV blocks of 256 tokens on every rank"
    assert all(set(row["acked_ns"]) == {"1", "2"} for row in rows)
    # the pickles' lengths, as they stand in the frames' heads
    lengths, place = [], HEADER_BYTES
    for _ in rows:
        lengths.append(int.from_bytes(wire.memory[place + 4 : place + 8], "little"))
        place += 8 + (lengths[-1] + 7) // 8 * 8
    assert [row["bytes"] for row in rows] == lengths


def test_the_times_are_the_ranks_own_however_late_rank_0_looks(wire: Wire) -> None:
    def slow_rank() -> None:
        time.sleep(0.05)
        wire.read(2)

    before = time.perf_counter_ns()
    wire.writer.write_shm("step", SAME_BATCH)
    sent_by = time.perf_counter_ns()
    thread = threading.Thread(target=slow_rank)
    thread.start()
    wire.read(1)
    acked_1_by = time.perf_counter_ns()
    thread.join(PATIENCE_S)
    acked_2_by = time.perf_counter_ns()
    time.sleep(0.2)
    look(wire)
    (row,) = wire.rows()
    assert before <= row["sent_ns"] <= row["acked_ns"]["1"] <= acked_1_by
    assert row["sent_ns"] <= sent_by
    assert sent_by + 0.05e9 <= row["acked_ns"]["2"] <= acked_2_by


def test_more_frames_than_there_are_places_for_times_lose_none(wire: Wire) -> None:
    places = wire.stamps.num_places
    for _ in range(2 * places + 5):  # rank 0 sends; nobody looks
        wire.writer.write_shm("step", SAME_BATCH)
        wire.read()
    assert look(wire) == list(range(1, 2 * places + 6))
    assert all(None not in row["acked_ns"].values() for row in wire.rows())


def test_a_time_that_was_overwritten_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = Wire(tmp_path / "frames.jsonl", tp=2, level=1)
    wire.writer.write_shm("capture")
    wire.read()
    wire.stamps.write(1, 1 + wire.stamps.num_places)  # a much later frame's, in the same place
    wire.close()
    assert wire.rows()[0]["acked_ns"] == {"1": None}
    assert "  r1 ? " in capsys.readouterr().err


def test_a_rank_that_never_acks_is_shown_so_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = Wire(tmp_path / "frames.jsonl", level=1)
    wire.writer.write_shm("profile")
    wire.writer.write_shm("close")
    wire.read(1)
    wire.close()
    assert [sorted(row["acked_ns"]) for row in wire.rows()] == [["1"], []]
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert "r2 none" in first
    assert "r1 none" not in first
    assert "r1 none r2 none" in second


def test_a_time_of_another_clock_is_reported_and_not_shown(
    wire: Wire, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the command line cuts our logger off from the others, and a test may have left it a handler
    monkeypatch.setattr(logging.getLogger("nanorunner"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("nanorunner"), "handlers", [])
    for frame in (1, 2):
        wire.stamps.write(1, frame)  # before it is sent
        wire.writer.write_shm("profile")
        wire.stamps.write(2, frame)
        assert look(wire)[-1] == frame
    assert [row["acked_ns"]["1"] for row in wire.rows()] == [None, None]
    assert all(row["acked_ns"]["2"] > row["sent_ns"] for row in wire.rows())
    (record,) = caplog.records
    assert "rank 1 acked frame 1 at " in record.getMessage()
    assert "their clocks are not one" in record.getMessage()


def test_each_frame_of_a_large_call_has_its_line(wire: Wire) -> None:
    data = os.urandom(3 * FRAGMENT_BYTES)
    threads = [
        threading.Thread(target=reader.read_shm, args=(PATIENCE_S,), daemon=True)
        for reader in wire.readers
    ]
    for thread in threads:
        thread.start()
    last = wire.writer.write_shm("echo", data, timeout_s=PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    wire.writer.write_shm("profile")
    wire.read()
    assert look(wire) == list(range(1, last + 2))
    *parts, after = wire.rows()
    assert [(row["part"], row["parts"]) for row in parts] == [
        (number, last) for number in range(1, last + 1)
    ]
    total = sum(row["bytes"] for row in parts)
    assert total > len(data)
    assert parts[0]["what"].startswith(f"part 1 of {last} of a call of {total:,} bytes: echo(b")
    assert parts[-1]["what"] == f"part {last} of {last}"
    assert "part" not in after


def test_the_bytes_on_the_wire_are_the_same_with_a_tap_and_without(tmp_path: Path) -> None:
    memories = []
    for path in (None, tmp_path / "frames.jsonl"):
        wire = Wire(path)
        for number in range(3):
            wire.writer.write_shm("step", (number, *SAME_BATCH[1:]))
            wire.read()
        wire.close()
        memories.append(wire.memory)
    first = 64 + 2 * RANK_BYTES  # behind the last rank's event
    assert memories[0][:first] == memories[1][:first]
    assert memories[0][HEADER_BYTES:] == memories[1][HEADER_BYTES:]
    assert not any(memories[0][first:HEADER_BYTES]), "without a tap nobody writes there"
    assert any(memories[1][first:HEADER_BYTES])


@pytest.mark.parametrize("tp", [2, 3, 8, MAX_TP])
def test_every_rank_has_places_of_its_own(tp: int) -> None:
    memory = bytearray(SEGMENT_BYTES)
    stamps = AckStamps(memoryview(memory), tp)
    assert stamps.num_places >= 8
    frames = range(5, 5 + stamps.num_places)
    before = time.perf_counter_ns()
    for frame in frames:
        for rank in range(1, tp):
            assert stamps.read(rank, frame) is None
            stamps.write(rank, frame)
    found = [stamps.read(rank, frame) or 0 for frame in frames for rank in range(1, tp)]
    assert found == sorted(found), "in the order in which they were written"
    assert before <= found[0]
    assert len(set(found)) == len(found)
    assert not any(memory[: 64 + (tp - 1) * RANK_BYTES]), "the wire's own words"
    assert not any(memory[HEADER_BYTES:])
    stamps.write(1, frames[0] + stamps.num_places)
    assert stamps.read(1, frames[0]) == LOST
    stamps.close()


def test_more_ranks_than_the_header_has_room_for_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=f"tap: .* use tp {MAX_TP} or fewer"):
        AckStamps(memoryview(bytearray(SEGMENT_BYTES)), MAX_TP + 1)


def test_a_rank_that_dies_leaves_its_last_frame_without_an_ack(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    ranks = Ranks(
        make_config(3),
        "dummy_runner:make_runner",
        with_group=False,
        methods=dummy_runner.METHODS,
        methods_with_reply=dummy_runner.WITH_REPLY,
        tap=Tap(3, 0, TapFile(str(path))),
    )
    try:
        pids = ranks.call_all("pid")
        assert len(path.read_text().splitlines()) == 1, "said as soon as the replies are there"
        os.kill(pids[2], signal.SIGSTOP)
        wait_until(lambda: state(pids[2]) == "T")  # from here on it cannot ack
        ranks.call("sleep", 0.0)
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(RankDied):
            ranks.call_all("echo", 1)
    finally:
        ranks.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["method"] for row in rows[:2]] == ["pid", "sleep"]
    assert [row["frame"] for row in rows] == list(range(1, len(rows) + 1))
    assert sorted(rows[0]["acked_ns"]) == ["1", "2"]
    assert "2" not in rows[1]["acked_ns"]


@pytest.mark.parametrize(
    ("words", "tap"), [([], 0), (["--tap"], 1), (["--tap", "2"], 2), (["--tap=1", "--json"], 1)]
)
def test_the_flag_alone_means_a_line_a_frame(words: list[str], tap: int) -> None:
    assert make_settings(engine_settings(run_parser().parse(words))).tap == tap


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tap": 3}, "tap 3: use 1 (a line a frame), 2 (with arguments) or 0 (off)"),
        ({"tap": -1}, "tap -1: use 1"),
        ({"tap": True}, "tap True: is bool, use int"),
        ({"tap_json": ""}, "tap_json '': name a file, or leave it out"),
        ({"tap_jso": "x"}, "did you mean tap_json?"),
    ],
)
def test_what_no_tap_can_do_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_settings(wrong)


def test_one_rank_has_no_frames_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frames.jsonl"
    assert open_tap(make_settings({"tap": 1, "tap_json": path})) is None
    assert capsys.readouterr().err == NO_FRAMES + "\n"
    assert path.read_text() == ""
    assert open_tap(make_settings({})) is None
    assert capsys.readouterr().err == ""
