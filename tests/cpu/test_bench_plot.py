"""A sweep of the toy becomes figures and a report that opens without a network."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import yaml
from headless_chromium import Chromium

from nanorunner.bench import figures
from nanorunner.bench.bounds import Limits
from nanorunner.bench.cli import main
from nanorunner.bench.drawing import STYLE, canvas, error_bars, finish, measured_ticks
from nanorunner.bench.figures import draw_all, limit_curves, limit_tokens_per_s
from nanorunner.bench.journal import FILE_NAME, read_rows
from nanorunner.bench.records import Record, Shape, Values, telling_names
from nanorunner.bench.result_files import read_folder
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


RANGES = {
    "narrow": (18_998, 27_290),
    "narrower": (19_999, 20_001),
    "of one value": (20_000, 20_000),
    "of values that differ by rounding": (0.3, 0.1 + 0.2),
    "one decade": (1, 10),
    "just within a decade": (1.03, 9.7),
    "over the end of a decade": (0.96, 1.09),
    "two decades and a half": (150, 60_000),
    "many decades": (0.001, 10_000_000),
    "tiny": (1.234e-7, 1.241e-7),
    "huge": (3e9, 8e14),
}


def shown_ticks(axis: Any, limits: tuple[float, float]) -> dict[str, float]:
    """Return the ticks of a rendered axis that a reader sees a label at, by that label.

    Fails where two labels are the same or lie on each other.
    """
    low, high = sorted(limits)
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    ticks = [t for t in ticks if t.label1.get_visible() and t.label1.get_text()]
    ticks = sorted((t for t in ticks if low <= t.get_loc() <= high), key=lambda t: t.get_loc())
    boxes = [tick.label1.get_window_extent() for tick in ticks]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    shown = {tick.label1.get_text(): tick.get_loc() for tick in ticks}
    assert len(shown) == len(ticks)
    return shown


@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize("limits", RANGES.values(), ids=RANGES)
def test_an_axis_has_two_labels_or_more_whatever_its_range(
    limits: tuple[float, float], scale: str
) -> None:
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = canvas()
        axes.plot(limits, limits, marker="o")
        axes.set(xscale=scale, yscale=scale)
        finish("name", "A title", "", figure)
    for axis, shown_limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        assert shown_limits[0] <= limits[0]
        assert limits[1] <= shown_limits[1]
        shown = shown_ticks(axis, shown_limits)
        assert len(shown) >= 2
        for words, place in shown.items():  # a label is the figure that it stands at
            step = min(abs(place - other) for other in shown.values() if other != place)
            assert float(words.replace(",", "")) == pytest.approx(place, rel=0, abs=step / 1e5)


@pytest.mark.parametrize("values", [(1, 8, 64, 256), (1, 2), (0.25, 12.125), (1000, 1024)])
def test_measured_values_are_the_labels_of_their_axis(values: tuple[float, ...]) -> None:
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = canvas()
        error_bars(axes, values, [(1.0, 2.0)] * len(values), "", {"color": "k", "marker": "o"})
        measured_ticks(axes, values)
        finish("name", "A title", "", figure)
    shown = shown_ticks(axes.xaxis, axes.get_xlim())
    assert [float(words.replace(",", "")) for words in shown] == list(values)
    assert list(shown.values()) == list(values)


def test_a_caption_in_the_image_lies_below_all_else() -> None:
    caption = "so many words that they take several lines " * 8
    with matplotlib.rc_context(STYLE):
        figure, panels = canvas(2)
        for axes in panels:
            axes.plot((1, 8), (20, 30), label="a line")
            axes.set(xlabel="batch", ylabel="rate", yscale="log")
        finish("name", "A title", caption, figure, is_captioned=True)
    (legend,) = figure.legends
    (words,) = (text for text in figure.texts if text.get_text().startswith("so many"))
    assert words.get_text().split() == caption.split()
    box, room = words.get_window_extent(), legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0
    assert box.y1 <= room.y0
    assert room.y1 <= min(axes.get_tightbbox().y0 for axes in panels)


def drawn_axes(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[Any]]:
    """Return the names of the figures that draw_all makes, and all their axes."""
    made = []

    def keeping_canvas(num_panels: int = 1) -> tuple[Any, list[Any]]:
        figure, panels = canvas(num_panels)
        made.append(figure)
        return figure, panels

    monkeypatch.setattr(figures, "canvas", keeping_canvas)
    drawings, _ = draw_all(records, lambda record: Limits(1e12, None, "as given"))
    assert len(drawings) == len(made)
    return [each.name for each in drawings], [axes for figure in made for axes in figure.axes]


@pytest.mark.parametrize(
    ("slowest", "fastest"), [(20_000.0, 27_000.0), (990.0, 1_010.0), (3.0, 4e6)]
)
def test_every_axis_of_every_figure_has_two_labels_or_more(
    slowest: float, fastest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parse(load_preset("tiny-qwen3"))

    def record(index: int, batch: int, tp: int, runner: str, depth: int) -> Record:
        rate = slowest * (fastest / slowest) ** (index / 15)
        names = ("batch", "tp", "runner", "async_depth")
        return Record(
            source="x",
            kind="latency",
            settings=dict(zip(names, (batch, tp, runner, depth), strict=True))
            | {"dtype": "float32"},
            varied=names,
            metrics={
                "output_tokens_per_s": Values(values=(rate, rate * 1.001), unit="tokens/s"),
                "tpot_ms_p50": Values(values=(1e6 / rate,), unit="ms"),
                "itl_ms_p95": Values(values=(2e6 / rate,), unit="ms"),
            },
            machine={},
            commit="abc",
            shape=Shape(batch, 64, 32),
            model=model,
            # a few: each has two bars, which have labels too
            step_ms={"cpu": {"schedule": 0.1}, "gpu": {"forward": 1e3 / rate}} if tp == 2 else {},
        )

    points = [(b, tp, r, d) for b in (1, 8) for tp in (1, 2) for r in ("v1", "v2") for d in (1, 2)]
    records = [record(index, *point) for index, point in enumerate(points)]
    names, all_axes = drawn_axes(records, monkeypatch)
    assert names == ["pareto", "batch", "tp", "steps", "runner", "async_depth"]
    for axes in all_axes:
        assert len(shown_ticks(axes.xaxis, axes.get_xlim())) >= 2
        assert len(shown_ticks(axes.yaxis, axes.get_ylim())) >= 2


def test_the_words_of_a_limit_leave_the_figures_of_the_axis_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in (ROOT / "benchmarks" / "h200").glob("v2-*b-tp?.json"):
        shutil.copy(path, tmp_path)
    names, all_axes = drawn_axes(read_folder(tmp_path).records, monkeypatch)
    axes = all_axes[names.index("batch")]
    notes = [text.get_window_extent() for text in axes.texts]
    assert notes  # one of them of the smallest batch alone
    labels = [tick.label1 for tick in axes.yaxis.get_major_ticks() if tick.label1.get_text()]
    for label in labels:
        assert not any(label.get_window_extent().overlaps(box) for box in notes)


def test_the_comparison_with_vllm_has_figures_at_both_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    records = read_folder(ROOT / "benchmarks" / "h200" / "compare-b64").records
    names, (pareto, bars) = drawn_axes(records, monkeypatch)
    assert names == ["pareto", "side"]
    assert len(shown_ticks(pareto.xaxis, pareto.get_xlim())) >= 2
    rates = shown_ticks(pareto.yaxis, pareto.get_ylim())
    assert len(rates) >= 2
    assert all(18_000 < rate < 28_000 for rate in rates.values())
    assert len(shown_ticks(bars.yaxis, bars.get_ylim())) >= 2


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
