"""trace.json keeps the rules of the trace-event format, and holds every span and arrow of a run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from synthetic_trace import write_synthetic
from trace_events import check_format, ns

from nanorunner.cli import main
from nanorunner.workers.spans import ACK, MEANINGS, NAMES
from nanorunner.workshop.timeline_lanes import lanes_of
from nanorunner.workshop.timeline_read import read_run

NUM_STEPS = 9


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("tp", [1, 3])
def test_the_file_keeps_the_formats_rules_and_holds_the_run(
    tmp_path: Path, tp: int, runner: str, has_gpu: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"tp": tp, "has_gpu": has_gpu, "num_steps": NUM_STEPS}
    write_synthetic(tmp_path, runner, rest_after=[4], **settings)
    assert main(["timeline", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    text = (tmp_path / "trace.json").read_text()
    events = check_format(text)
    run = read_run(tmp_path)
    origin, last = run.limits_ns()

    found = Counter(
        (e["pid"] - 1, e["name"], ns(e["ts"]), ns(e.get("dur", 0)), e["args"].get("step", -1))
        for e in events
        if e["ph"] in "Xi" and e["cat"] == "span"
    )
    recorded: Counter[tuple[int, str, int, int, int]] = Counter()
    for trace in run.ranks:
        table = trace.spans
        columns = (table.name, table.begin, table.end, table.step)
        for name, begin, end, step in zip(*(c.tolist() for c in columns), strict=True):
            recorded[trace.rank, NAMES[name], begin - origin, end - begin, step] += 1
    assert found == recorded
    assert all(ns(e["ts"]) + ns(e.get("dur", 0)) <= last - origin for e in events if "ts" in e)
    assert {e["args"]["meaning"] for e in events if e.get("cat") == "span"} <= {*MEANINGS.values()}
    assert {e["name"] for e in events if e["ph"] == "i"} == ({NAMES[ACK]} if tp > 1 else set())

    bubbles = [e for e in events if e.get("cat") == "bubble"]
    assert (
        len(bubbles) == sum(len(lanes.bubbles) for lanes in lanes_of(run)) == summary["bubbles"][0]
    )
    assert bool(bubbles) == has_gpu
    steps = [e["args"] for e in events if e.get("cat") == "step"]
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    assert steps[0]["what"] == "300 tokens of 8 requests"
    assert steps[1]["what"] == "decode of 8 requests"

    names = Counter(e["args"]["name"] for e in events if e["name"] == "thread_name")
    # v1 has one step in flight, v2 two
    expected = {"CPU": tp, "steps": 1 if runner == "v1" else 2}
    expected |= {"wire": tp} if tp > 1 else {}
    expected |= {"GPU": tp} if has_gpu else {}
    assert names == expected
    assert len([e for e in events if e["ph"] == "s"]) == summary["arrows"][0]
    absent = json.loads(text)["otherData"]["absent"]
    assert set(absent) == {"wire"} - ({"wire"} if tp > 1 else set()) | (
        set() if has_gpu else {"gpu"}
    )
    labels = [e["args"]["labels"] for e in events if e["name"] == "process_labels"]
    assert all(("no GPU in this run" in label) != has_gpu for label in labels)
