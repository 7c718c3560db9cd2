"""The page holds what it needs and no more than was asked for, and says what it leaves out."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic_trace import write_synthetic

from nanorunner.cli import main
from nanorunner.workers.spans import MEANINGS, NAMES
from nanorunner.workshop import timeline_page
from nanorunner.workshop.timeline_page import PARTS, SCRIPTS

ROOT = Path(__file__).parents[2]


def timeline(*words: object) -> int:
    return main(["timeline", *map(str, words)])


def data_of(folder: Path) -> dict[str, Any]:
    """Return what a page's script is given."""
    page = (folder / "timeline.html").read_text()
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def spans_of(run: dict[str, Any], lane: str) -> list[list[int]]:
    """Return [name, begin, end, step, frame, depth] of a lane, of all ranks."""
    lanes = [each for rank in run["ranks"] for each in rank["lanes"] if each["lane"] == lane]
    return [span for each in lanes for span in each["spans"]]


def test_a_long_trace_makes_a_small_page_that_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic(tmp_path, num_steps=1500)
    assert timeline(tmp_path) == 0
    printed = capsys.readouterr().out
    words = "1,484 of 1,500 steps are left out here; trace.json has them all"
    assert words in printed
    assert (tmp_path / "timeline.html").stat().st_size < 150_000
    (run,) = data_of(tmp_path)["runs"]
    assert [step[0] for step in run["steps"]] == list(range(742, 758))
    assert {step[3] for step in run["steps"]} == {"decode of 8 requests"}
    assert any(words in note for note in run["notes"])
    for lane in ("cpu", "wire", "gpu"):
        spans = spans_of(run, lane)
        # what is under way when the first step begins and when the last one ends is there too
        assert all(begin <= run["end"] and end >= 0 for _, begin, end, *_ in spans)
        assert {step for _, _, _, step, _, _ in spans} - {-1} <= set(range(741, 760))
    assert all(arrow[8] >= 0 and arrow[5] <= run["end"] for arrow in run["arrows"])


def test_the_page_has_each_span_of_its_steps_and_each_arrow(tmp_path: Path) -> None:
    write_synthetic(tmp_path, "v2", tp=3, num_steps=30)
    assert timeline(tmp_path, "--steps", "10:12") == 0
    data = data_of(tmp_path)
    (run,) = data["runs"]
    assert data["shows_all"] is True
    assert data["meanings"] == MEANINGS
    assert data["names"] == list(NAMES)
    forwards = [s[3] for s in spans_of(run, "gpu") if data["names"][s[0]] == "forward"]
    for step in (10, 11, 12):
        assert forwards.count(step) == 3
        arrows = [(a[0], a[6]) for a in run["arrows"] if a[1] == step]
        assert sorted(arrows) == [
            *(("frame", rank) for rank in (1, 2)),
            *(("launch", rank) for rank in (0, 1, 2)),
            ("output", 0),
        ]
    first = run["steps"][0]
    assert (first[0], first[1]) == (10, 0)  # the clock begins with it


def test_without_a_gpu_it_is_said_and_nothing_is_drawn(tmp_path: Path) -> None:
    write_synthetic(tmp_path, has_gpu=False, num_steps=9)
    assert timeline(tmp_path) == 0
    (run,) = data_of(tmp_path)["runs"]
    assert spans_of(run, "gpu") == spans_of(run, "copy") == []
    lanes = [lane for rank in run["ranks"] for lane in rank["lanes"] if lane["lane"] == "gpu"]
    assert [lane["absent"] for lane in lanes] == [
        "no GPU in this run: the CPU did the work itself"
    ] * 2
    assert not any(arrow[0] == "launch" for arrow in run["arrows"])
    assert any("nothing is drawn there" in note for note in run["notes"])


def test_two_runs_stand_above_each_other_on_a_clock_of_their_own_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "textbook", tmp_path / "overlap"]
    for folder, runner in zip(folders, ("v1", "v2"), strict=True):
        write_synthetic(folder, runner, num_steps=60)
    assert timeline(*folders) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["page"] == str(folders[1] / "timeline.html")
    assert summary["traces"] == [str(folder / "trace.json") for folder in folders]
    assert not (folders[0] / "timeline.html").exists()
    runs = data_of(folders[1])["runs"]
    assert [run["title"][:10] for run in runs] == ["runner v1,", "runner v2,"]
    assert [run["steps"][0][:2] for run in runs] == [[22, 0], [22, 0]]
    assert "<h1>Timeline: textbook above overlap</h1>" in (folders[1] / "timeline.html").read_text()
    # how v2 hides its CPU: while a GPU has one step, rank 0 plans the next one
    for run, is_hidden in zip(runs, (False, True), strict=True):
        forward = {s[3]: s for s in spans_of(run, "gpu") if NAMES[s[0]] == "forward"}
        plan = {s[3]: s for s in spans_of(run, "cpu") if NAMES[s[0]] == "schedule"}
        step = run["steps"][3][0]
        assert (plan[step + 1][1] < forward[step][2]) is is_hidden


def test_what_is_lost_cut_or_not_drawn_is_told(tmp_path: Path) -> None:
    write_synthetic(tmp_path, num_steps=20, num_lost=7)
    lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    lines = [line for line in lines if '"name":"send"' not in line or '"frame":9' not in line]
    first = next(n for n, line in enumerate(lines) if '"kind":"gpu"' in line and '"step":5' in line)
    span = json.loads(lines[first])
    lines[first] = json.dumps(span | {"begin": span["begin"] - 3700})  # by the clock's error
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines))
    assert timeline(tmp_path) == 0
    (run,) = data_of(tmp_path)["runs"]
    notes = " ".join(run["notes"])
    assert "Spans that are lost, the oldest first: 14." in notes
    assert "overlapped the one before them and were cut: 1, by 0.7 us at most." in notes
    assert "Arrows that are not drawn, as one of their spans was lost: 1." in notes
    assert "lie on the CPU's clock to within 4.0 us" in notes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "5"], "'5' names no steps; write FROM:TO, as 40:47"),
        (["--steps", "9:5"], "'9:5' ends before it begins; write 5:9"),
        (["--steps", "50:60"], "--steps 50:60: {folder} has the steps 0 to 29"),
        (["--step", "1:2"], "unknown flag --step; did you mean --steps?"),
        (["{folder}"], "{folder}: is given twice"),
    ],
)
def test_a_wrong_flag_is_refused_and_nothing_is_written(
    tmp_path: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic(tmp_path, num_steps=30)
    try:
        code: object = timeline(tmp_path, *(word.format(folder=tmp_path) for word in words))
    except SystemExit as exit_of_argparse:
        code = exit_of_argparse.code
    assert code == 2
    assert expected.format(folder=tmp_path) in capsys.readouterr().err
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl"}


def test_more_than_a_browser_can_draw_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_page, "MOST_SPANS", 200)
    write_synthetic(tmp_path, num_steps=30)
    assert timeline(tmp_path, "--steps", "0:29") == 2
    assert re.search(
        r"--steps: they have [\d,]+ spans, and a page holds 200", capsys.readouterr().err
    )
    assert timeline(tmp_path, "--steps", "3:5") == 0


def test_a_run_without_a_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic(tmp_path, num_steps=0)
    assert timeline(tmp_path) == 2
    assert f"{tmp_path}: no whole step is in it" in capsys.readouterr().err


def test_the_page_fetches_nothing_and_no_name_can_break_out_of_it(tmp_path: Path) -> None:
    evil = "</script><img src=https://example.org/x>"
    about = {"config": {"model": evil}, "machine": {"gpus": [evil]}}
    write_synthetic(tmp_path, num_steps=3, head=about)
    assert timeline(tmp_path) == 0
    page = (tmp_path / "timeline.html").read_text()
    assert page.count("</script>") == 2
    assert "default-src 'none'" in page
    assert not re.search(r"<(img|link|iframe|script src)", page)
    parts = "".join(path.read_text() for path in PARTS.iterdir())
    assert not re.search(r"https?:|@import|url\(|fetch\(|\bsrc\b|XMLHttp|import\(", parts)
    assert evil.split("/")[-1] in data_of(tmp_path)["runs"][0]["title"]


def test_the_parts_travel_with_the_package() -> None:
    names = {path.name for path in PARTS.iterdir()}
    assert names == {"page.html", "page.css", *(f"{name}.js" for name in SCRIPTS)}
    tree = ast.parse((ROOT / "setup.py").read_text())
    patterns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert f"{PARTS.name}/*" in patterns


def test_every_name_has_a_colour() -> None:
    script = (PARTS / "draw.js").read_text()
    colours = re.search(r"const COLOURS = \{(.*?)\n\};", script, re.DOTALL)
    assert colours is not None
    assert set(re.findall(r"(\w+): \"#", colours[1])) == set(NAMES)
