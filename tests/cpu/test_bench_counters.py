"""What a result says was counted is the measured passes' alone: neither start nor warm-up."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from nanorunner.bench.counters import Reading, count
from nanorunner.bench.metrics import RequestRecord
from nanorunner.bench.resources import ResourceMeter, host_peak_gib
from nanorunner.bench.result import check_writable, write_result
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.workers.rank_counters import RankCounters

GIB = 1 << 30


def reading(scale: int, graph_steps: dict[str, int], padded_rows: int) -> Reading:
    stats = SchedulerStats(
        prefill_tokens=30 * scale,
        cached_tokens=10 * scale,
        peak_used_blocks=7,
        verified_rows=50 * scale,
    )
    ranks = [
        RankCounters(graph_steps, padded_rows, 2 * GIB, GIB),
        RankCounters(graph_steps, padded_rows, 3 * GIB, GIB),
    ]
    meant, accepted = [40 * scale, 20 * scale], [30 * scale, 5 * scale]
    return Reading(asdict(stats), ranks, meant, accepted)


def test_counts_are_the_difference_of_two_readings_and_peaks_are_not() -> None:
    done = RequestRecord(5, token_ids=[1, 2], finish_reason="length")
    failed = RequestRecord(9, finish_reason="error: no room")
    before = reading(1, {"plain 8": 100, "eager": 3}, padded_rows=50)
    after = reading(
        3,
        {"plain 8": 110, "plain 16": 5, "plain 4 x 5": 6, "layers 192": 2, "eager": 3},
        padded_rows=90,
    )
    counts = count(before, after, [[done, failed], [done]], skipped_idle_s=0.0, num_gpus=2)
    assert (counts["requests"], counts["finished"], counts["failed"]) == (3, 2, 1)
    assert (counts["input_tokens"], counts["output_tokens"]) == (10, 4)
    assert counts["scheduler"]["prefill_tokens"] == 60
    assert counts["scheduler"]["peak_used_blocks"] == 7
    assert counts["prefix_hit_share"] == 20 / 80
    graphs = counts["graphs"]
    steps = {"layers 192": 2, "plain 16": 5, "plain 4 x 5": 6, "plain 8": 10}
    assert graphs["dispatched"] == steps
    assert graphs["padded_rows"] == 40
    assert graphs["padded_share"] == 40 / (10 * 8 + 5 * 16 + 6 * 4 * 5 + 2 * 192)
    drafts = counts["drafts"]
    assert drafts["acceptance"] == [60 / 80, 10 / 40]
    assert drafts["mean_accepted_length"] == 1 + 70 / 100
    assert counts["memory"]["gpu_peak_gib"] == [2.0, 3.0]
    assert counts["memory"]["pinned_peak_gib"] == [1.0, 1.0]


def test_the_meter_sees_a_busy_core_and_an_idle_one() -> None:
    """Bounds from outside, which hold however much of the time other programs have the core."""
    begin_s = time.perf_counter()
    with ResourceMeter(num_gpus=0) as meter:
        end_s = time.process_time() + 0.2
        while time.process_time() < end_s:
            pass
    at_least = 0.2 / (time.perf_counter() - begin_s)
    assert meter.read().values["cpu_cores"] >= at_least
    begin_s = time.process_time()
    with ResourceMeter(num_gpus=0) as meter:
        time.sleep(0.2)
    at_most = (time.process_time() - begin_s) / 0.2
    assert meter.read().values["cpu_cores"] <= at_most
    assert host_peak_gib() > 0.01


def test_gpus_that_cannot_be_read_are_a_gap_and_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # on a machine without a GPU each reading fails, as it does where the driver is broken
    monkeypatch.setattr("nanorunner.bench.resources.has_nvml", lambda: True)
    monkeypatch.setattr("nanorunner.bench.resources.SAMPLE_EVERY_S", 0.01)
    with ResourceMeter(num_gpus=99) as meter:
        for thread in threading.enumerate():
            if thread.name == "gpu sampler":
                thread.join(60)  # its first reading ends it
    used = meter.read()
    assert list(used.values) == ["cpu_cores"]
    assert used.gaps["GPU use"].startswith("NVML could not be read: ")


def test_a_result_file_is_replaced_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    write_result(path, {"a": 1})
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_is_no_file_is_written_to_and_a_link_stays_one(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "a.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    check_writable(link)
    write_result(link, {"a": 1})
    assert link.is_symlink()
    assert target.read_text() == '{\n "a": 1\n}\n'
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_result(pipe, {"b": 2})
        assert os.read(reader, 100) == b'{\n "b": 2\n}\n'
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    check_writable(Path(os.devnull))
    write_result(Path(os.devnull), {"c": 3})
    assert Path(os.devnull).is_char_device()
