"""A sweep of the toy becomes figures and a report that opens without a network."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from headless_chromium import Chromium

from nanorunner.bench.bounds import Limits
from nanorunner.bench.cli import main
from nanorunner.bench.figures import draw_all, limit_curves, limit_tokens_per_s
from nanorunner.bench.journal import FILE_NAME, read_rows
from nanorunner.bench.records import Record, Shape, Values, telling_names
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse

ROOT = Path(__file__).parents[2]
TOY = {
    "model": "tiny-qwen3",
    "load_format": "dummy",
    "device": "cpu",
    "max_num_seqs": 4,
    "input_len": 8,
    "output_len": 4,
    "warm_up": 0,
    "repeat": 2,
    "quiet": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep over two batches and of its report."""
    folder = tmp_path_factory.mktemp("sweep")
    spec = folder / "toy.yaml"
    vary = {"batch": [1, 2]}
    spec.write_text(yaml.safe_dump({"command": "latency", "base": TOY, "vary": vary, "repeat": 1}))
    assert main(["sweep", str(spec), "--out", str(folder)]) == 0
    (folder / "notes.json").write_text("{}")
    assert main(["plot", str(folder), "--bandwidth", "20"]) == 0
    return folder


def test_a_row_says_how_to_repeat_its_measurement(folder: Path) -> None:
    rows, _ = read_rows(folder / FILE_NAME)
    assert {row["settings"]["batch"] for row in rows} == {1, 2}
    for row in rows:
        result = row["result"]
        assert result["config"]["attention_backend"] == "torch"
        assert len(result["repeats"]) == 2
        assert result["workload"]["requests"] == row["settings"]["batch"]
        assert f"--batch {row['settings']['batch']}" in row["command"]
        assert row["exit_code"] == 0


def test_figures_are_written_at_slide_size(folder: Path) -> None:
    names = {path.name for path in folder.glob("*.png")}
    assert names == {"pareto.png", "batch.png"}  # one tp, one runner: nothing else to show
    for name in names:
        head = (folder / name).read_bytes()[:24]
        size = tuple(int.from_bytes(head[i : i + 4], "big") for i in (16, 20))
        assert size == (1920, 1080)


def test_the_report_holds_everything_and_fetches_nothing(folder: Path) -> None:
    report = (folder / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 2
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([a-z]+:)""", report)
    assert set(links) == {"data:"}
    assert "<script" not in report
    assert "notes.json: is no result" in report
    assert "share of limit" in report
    assert "scaling over tp: needs two tp" in report
    assert "python -m nanorunner bench latency --device cpu" in report
    assert "--batch 2" in report


@pytest.mark.program("chromium")
def test_the_report_opens_without_a_network(folder: Path, tmp_path: Path) -> None:
    with Chromium(tmp_path) as browser:
        page = browser.open(folder / "report.html")
    assert page.natural_widths == [1920, 1920]
    assert page.failed == []
    assert {url.partition(":")[0] for url in page.requested} == {"file", "data"}
    assert "Throughput against latency" in page.text


def test_the_older_results_are_drawn_beside_their_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (ROOT / "benchmarks" / "h200").glob("v?-0.6b-tp?.json"):
        shutil.copy(path, tmp_path)
    assert main(["plot", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"pareto.png", "batch.png", "tp.png", "runner.png"} <= set(summary["figures"])
    report = (tmp_path / "report.html").read_text()
    assert "measured on H200: 4.48 TB/s" in report
    shares = [int(share) for share in re.findall(r"<td>(\d+)%</td></tr>", report)]
    assert shares
    assert all(0 < share < 100 for share in shares)


def test_other_settings_and_step_times_get_figures_of_their_own() -> None:
    def record(input_len: int, is_eager: bool) -> Record:
        rate, ttft = 1e6 / input_len / (1 + is_eager), input_len / 10
        return Record(
            source="x",
            kind="latency",
            settings={"input_len": input_len, "enforce_eager": is_eager},
            varied=("input_len", "enforce_eager"),
            metrics={
                "output_tokens_per_s": Values(values=(rate, rate * 1.1), unit="tokens/s"),
                "ttft_ms_p50": Values(values=(ttft,), unit="ms"),
            },
            machine={},
            commit="abc",
            step_ms={"cpu": {"schedule": 0.1}, "gpu": {"forward": 1.0 + is_eager, "bubble": 0.2}},
        )

    records = [record(n, e) for n in (128, 1024, 8192) for e in (False, True)]
    drawings, not_drawn = draw_all(records, lambda record: None)
    assert [each.name for each in drawings] == ["steps", "input_len", "enforce_eager"]
    assert set(not_drawn) == {
        "throughput against latency",
        "tokens per second and the limit",
        "scaling over tp",
        "runner",
    }
    assert "time to first token" in drawings[1].caption


def test_each_output_length_has_a_limit_of_its_own() -> None:
    model = parse(load_preset("tiny-qwen3"))

    def record(batch: int, output_len: int) -> Record:
        return Record(
            source="x",
            kind="latency",
            settings={"batch": batch, "output_len": output_len, "dtype": "float32"},
            varied=("batch", "output_len"),
            metrics={"output_tokens_per_s": Values(values=(1.0,), unit="tokens/s")},
            machine={},
            commit="abc",
            shape=Shape(batch, 64, output_len),
            model=model,
        )

    records = [record(batch, length) for length in (1, 128) for batch in (1, 8)]
    limits = Limits(1e9, None, "as given")
    names = [name for name in telling_names(records) if name != "batch"]
    curves, sources = limit_curves(records, names, lambda record: limits)
    assert sources == {"as given"}
    expected = [limit_tokens_per_s(each, limits) for each in records]
    assert list(curves.values()) == [
        [(1, expected[0]), (8, expected[1])],
        [(1, expected[2]), (8, expected[3])],
    ]


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / FILE_NAME, tmp_path)
    (tmp_path / "report.html").mkdir()  # in the way; root may write in any folder
    assert main(["plot", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "report.html: is a folder" in printed.err
    assert printed.out == ""
    assert not list(tmp_path.glob("*.png"))


def test_without_matplotlib_one_line_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str) -> Any:
        return None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert main(["plot", str(folder)]) == 2
    expected = "nanorunner: plot needs matplotlib; pip install 'nanorunner[bench]'\n"
    assert capsys.readouterr().err == expected


def test_a_folder_without_results_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.json").write_text("[]")
    assert main(["plot", str(tmp_path)]) == 2
    assert "no result in it; notes.json is no result" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "--bandwidth", "0"]) == 2
    assert "--bandwidth 0.0: use a number above 0" in capsys.readouterr().err
