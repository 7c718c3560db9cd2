"""Results of every schema become points, repeats together, told apart by few words."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_stub import result

from nanorunner.bench.journal import Journal
from nanorunner.bench.pareto import front
from nanorunner.bench.records import Record, label, telling_names
from nanorunner.bench.result_files import read_folder
from nanorunner.bench.tables import points_table

ROOT = Path(__file__).parents[2]


def row(point: int, repeat: int, value: float, **settings: Any) -> dict[str, Any]:
    batch = settings.get("batch_size", 1)
    return {
        "key": f"{point}-{repeat}",
        "point": point,
        "repeat": repeat,
        "settings": settings,
        "varied": list(settings),
        "status": "ok",
        "result": result(value, batch),
    }


def record(**settings: Any) -> Record:
    return Record(
        source="x",
        kind="latency",
        settings=settings,
        varied=None,
        metrics={},
        machine={},
        commit="abc",
    )


def test_repeats_of_a_point_are_one_record_with_every_value(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for repeat, value in enumerate((30.0, 10.0, 20.0)):
            journal.append(row(1, repeat, value, batch_size=4))
            journal.append(row(0, repeat, 2 * value, batch_size=2))
        journal.append({**row(2, 0, 1.0), "status": "failed", "error": ["exit code 3"]})
    found = read_folder(tmp_path)
    assert [each.settings["batch"] for each in found.records] == [2, 4]
    rate = found.records[1].metrics["output_tokens_per_s"]
    assert (sorted(rate.values), rate.median, rate.low, rate.high) == ([10, 20, 30], 20, 10, 30)
    assert rate.spread == 1.0
    assert found.records[1].shape == (4, 8, 8)
    assert [each["point"] for each in found.failures] == [2]
    assert points_table(found.records).splitlines()[2].split()[:3] == ["4", "3", "20"]


def test_rows_of_another_machine_or_version_are_points_of_their_own(tmp_path: Path) -> None:
    machines: list[dict[str, Any]] = [
        {"gpus": [], "cpu": "a", "versions": {"torch": "2.9", "triton": "3.5"}},
        {"gpus": [], "cpu": "b", "versions": {"torch": "2.9", "triton": "3.5"}},
        {"gpus": [], "cpu": "a", "versions": {"torch": "2.8", "triton": "3.5"}},
        {"gpus": [], "cpu": "a", "versions": {"torch": "2.9", "triton": "3.4"}},
    ]
    with Journal(tmp_path) as journal:
        for repeat, machine in enumerate([*machines, machines[0]]):
            its = row(0, repeat, 10.0 + repeat)
            journal.append({**its, "result": {**its["result"], "machine": machine}})
    found = read_folder(tmp_path).records
    assert [each.metrics["output_tokens_per_s"].values for each in found] == [
        (10, 14),
        (11,),
        (12,),
        (13,),
    ]
    names = telling_names(found)
    assert names == ["cpu", "torch", "triton"]
    assert len({label(each, names) for each in found}) == 4


def test_every_file_of_a_folder_is_read_or_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(result(5.0)))
    (tmp_path / "other.json").write_text('{"rows": []}')
    (tmp_path / "torn.json").write_text('{"kind": ')
    (tmp_path / "short.json").write_text('{"kind": "load", "config": {}}')
    (tmp_path / "wrong.json").write_text('{"kind": "load", "config": 1, "workload": 1}')
    (tmp_path / "rows.jsonl").write_text('{"key": ')
    found = read_folder(tmp_path)
    assert [each.source for each in found.records] == ["good.json"]
    bad = {"other.json", "torn.json", "short.json", "wrong.json", "rows.jsonl"}
    assert set(found.skipped) == bad
    assert "no result" in found.skipped["other.json"]
    assert "workload" in found.skipped["short.json"]
    assert "torn" in found.skipped["rows.jsonl"]
    with pytest.raises(ValueError, match="no such folder"):
        read_folder(tmp_path / "nowhere")


def test_the_older_files_of_bench_engine_are_points_too() -> None:
    folder = ROOT / "benchmarks" / "h200"
    found = read_folder(folder)
    old = [each for each in found.records if each.kind == "engine"]
    rates = {
        (path.name, name): load["output_tokens_per_s"]
        for path in folder.glob("v[12]-*-tp*.json")
        for name, load in json.loads(path.read_text()).get("loads", {}).items()
    }
    assert len(old) == len(rates) > 20
    medians = sorted(each.metrics["output_tokens_per_s"].median for each in old)
    # the files have rates to a tenth
    assert medians == pytest.approx(sorted(rates.values()), rel=1e-3, abs=0.05)
    names = telling_names(old)
    # two loads of a file are batches of 64, of other lengths
    assert names == ["model", "tp", "runner", "workload", "batch", "input_len"]
    assert len({label(each, names) for each in old}) == len(old)
    assert {each.device for each in old} == {"NVIDIA H200"}
    assert "tune-few-rows.json" in found.skipped


def test_what_follows_from_other_settings_is_left_out_of_a_label() -> None:
    records = [
        record(model="m", tp=tp, runner=runner, async_depth=depth, dtype="float32", max_num_seqs=n)
        for tp, (runner, depth), n in product((1, 2), (("v1", 1), ("v2", 2)), (8, 16))
    ]
    names = telling_names(records)
    assert names == ["tp", "runner", "max_num_seqs"]
    assert label(records[0], names) == "tp 1, v1, max num seqs 8"
    # but a main setting stays in, though here it says no more than another
    both = [record(model="a", tp=1), record(model="b", tp=2)]
    assert telling_names(both) == ["model", "tp"]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_front_holds_exactly_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    def is_beaten(point: tuple[int, int]) -> bool:
        return any(x <= point[0] and y >= point[1] and (x, y) != point for x, y in points)

    assert front(points) == sorted({point for point in points if not is_beaten(point)})
