"""A traced run of the toy becomes trace.json and a page that works in a browser, without a network.

GPU lanes are looked at on synthetic traces: this group of tests has no GPU.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from headless_chromium import Chromium, Page
from synthetic_trace import write_synthetic
from trace_events import check_format

from nanorunner import LLM, SamplingParams
from nanorunner.cli import main
from nanorunner.workers.span_recording import open_nvtx
from nanorunner.workers.spans import MEANINGS, NAMES
from nanorunner.workshop.timeline_page import PARTS

TP = 2
MAX_TOKENS = 24
START_METHODS = 5  # load_model, profile, allocate_kv, capture, and spans: are the clocks one?
LAST_METHODS = 1  # close
TOY: dict[str, Any] = {
    "model": "tiny-qwen3",
    "load_format": "dummy",
    "device": "cpu",
    "num_blocks": 16,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "prefix_cache": False,
}
CHROMIUM = pytest.mark.program("chromium")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the traces of v1 and of v2, of which the last one has the page of both."""
    folders = []
    for runner in ("v1", "v2"):
        folder = tmp_path_factory.mktemp("traces") / runner
        with LLM(runner=runner, tp=TP, trace=folder, **TOY) as llm:
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            prompts = [{"prompt_token_ids": list(range(3, 20 + number))} for number in range(2)]
            llm.generate(prompts, params, use_tqdm=False)
        folders.append(folder)
    assert main(["timeline", *map(str, folders)]) == 0
    return folders


def test_trace_json_keeps_the_rules_and_has_every_frames_arrows(folders: list[Path]) -> None:
    for folder in folders:
        events = check_format((folder / "trace.json").read_text())
        frames = [event for event in events if (event["ph"], event.get("cat")) == ("f", "frame")]
        assert len(frames) == (START_METHODS + MAX_TOKENS + LAST_METHODS) * (TP - 1)
        outputs = [event for event in events if (event["ph"], event.get("cat")) == ("f", "output")]
        assert len(outputs) == MAX_TOKENS
        names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert names == {"CPU", "wire", "steps"}  # no GPU is drawn


def test_the_page_says_that_there_is_no_gpu(folders: list[Path]) -> None:
    assert not (folders[0] / "timeline.html").exists()
    page = (folders[1] / "timeline.html").read_text()
    assert "no GPU in this run: the CPU did the work itself" in page
    assert '["launch",' not in page


class Shown(NamedTuple):
    """A page in a browser."""

    browser: Chromium
    page: Page

    def value(self, expression: str) -> Any:
        """Return what an expression over `timeline`, the page's state, comes to."""
        return self.browser.evaluate(self.page, expression)

    def view(self) -> tuple[float, float]:
        """Return the time that is seen, in ns."""
        begin, end = self.value("[timeline.view.from, timeline.view.to]")
        return begin, end

    def place(
        self, run: int, rank: int, lane: str, name: str, step: int = -1
    ) -> tuple[float, float]:
        """Return where a span of a name is on the screen: its upper left corner.

        The first one of the step, without a step the first whole one.
        """
        x, y = self.value(f"""(() => {{
            const run = timeline.runs[{run}], view = timeline.view;
            const lane = run.ranks[{rank}].lanes.find((each) => each.lane === "{lane}");
            const span = lane.spans.find((each) => each[0] === {NAMES.index(name)}
                && ({step} < 0 ? each[1] - run.origin > view.from : each[3] === {step}));
            const box = document.getElementById("lanes").getBoundingClientRect();
            return [box.left + view.x(span[1] - run.origin), box.top + lane.top + lane.strip];
        }})()""")
        return x, y

    def colour(self, x: float, y: float) -> str:
        """Return the colour of a point of the picture."""
        numbers = self.value(f"""(() => {{
            const canvas = document.getElementById("lanes"), ratio = window.devicePixelRatio;
            const box = canvas.getBoundingClientRect();
            return [...canvas.getContext("2d").getImageData(
                ({x} - box.left) * ratio, ({y} - box.top) * ratio, 1, 1).data];
        }})()""")
        return "#{:02x}{:02x}{:02x}".format(*numbers[:3])


@pytest.fixture
def shown_pair(tmp_path: Path) -> Iterator[Shown]:
    """Yield the page of v1 above v2, with GPUs."""
    for runner in ("v1", "v2"):
        write_synthetic(tmp_path / runner, runner, tp=2, num_steps=60)
    assert main(["timeline", str(tmp_path / "v1"), str(tmp_path / "v2")]) == 0
    with Chromium(tmp_path / "profile") as browser:
        yield Shown(browser, browser.open(tmp_path / "v2" / "timeline.html"))


def colour_of(name: str) -> str:
    """Return the colour that the script gives a name."""
    match = re.search(rf'\b{name}: "(#\w+)"', (PARTS / "draw.js").read_text())
    assert match is not None
    return match[1]


@CHROMIUM
def test_the_page_of_real_runs_opens_without_a_network(folders: list[Path], tmp_path: Path) -> None:
    with Chromium(tmp_path) as browser:
        page = browser.open(folders[1] / "timeline.html")
        shown = Shown(browser, page)
        assert page.failed == []
        assert [url.partition(":")[0] for url in page.requested] == ["file"]
        for words in ("Timeline: v1 above v2", "steps are left out here", MEANINGS["forward"]):
            assert words in page.text
        x, y = shown.place(1, 1, "cpu", "forward")
        assert shown.colour(x + 3, y + 4) == colour_of("forward")
        picture = browser.screenshot(page)
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height > 900) == (1920, True)


@CHROMIUM
def test_lanes_bubbles_and_overlap_are_seen(shown_pair: Shown) -> None:
    shown = shown_pair
    assert shown.page.failed == []
    for run in (0, 1):
        for rank in (0, 1):
            for lane, name in (("cpu", "graph"), ("gpu", "forward")):
                x, y = shown.place(run, rank, lane, name)
                assert shown.colour(x + 3, y + 4) == colour_of(name)
    begin, end = shown.view()
    assert begin < 0
    assert 4 * 2.0e6 < end < 5 * 2.3e6  # four steps of v1
    x, y = shown.place(0, 0, "gpu", "bubble")
    shown.browser.mouse(shown.page, "mouseMoved", x=x + 20, y=y + 10)
    tip = shown.value("document.getElementById('tip').innerText")
    assert tip.startswith(f"bubble\n{MEANINGS['bubble']}\n0.4930 ms (493 \u00b5s)\n")


@CHROMIUM
def test_from_afar_a_lane_looks_as_it_was_on_the_whole(tmp_path: Path) -> None:
    write_synthetic(tmp_path, "v2", num_steps=300)
    assert main(["timeline", str(tmp_path), "--steps", "0:299"]) == 0
    with Chromium(tmp_path / "profile") as browser:
        shown = Shown(browser, browser.open(tmp_path / "timeline.html"))
        # bubbles are 0.2 % of the GPU's time; to widen each to a pixel would paint a fifth red
        reds, length = shown.value("""(() => {
            const canvas = document.getElementById("lanes"), ratio = window.devicePixelRatio;
            const lane = timeline.runs[0].ranks[0].lanes.find((each) => each.lane === "gpu");
            const row = canvas.getContext("2d").getImageData(
                0, (lane.top + lane.strip + 9) * ratio, canvas.width, 1).data;
            let reds = 0;
            for (let x = 0; x < canvas.width; x++) reds += row[4 * x] > row[4 * x + 2] + 20;
            return [reds, canvas.width];
        })()""")
    assert length > 1800
    assert reds < 0.02 * length


@CHROMIUM
def test_mouse_and_keys_zoom_move_pick_and_fold(shown_pair: Shown) -> None:
    shown, (browser, page) = shown_pair, shown_pair
    begin, end = shown.view()
    browser.mouse(page, "mouseWheel", x=900, y=300, deltaX=0, deltaY=-400)
    near = shown.view()
    assert near[1] - near[0] < 0.6 * (end - begin)
    assert begin < near[0] < near[1] < end
    for kind, x in (("mousePressed", 900), ("mouseMoved", 700), ("mouseReleased", 700)):
        browser.mouse(page, kind, x=x, y=300, button="left", buttons=1, clickCount=1)
    moved = shown.view()
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    browser.press(page, "ArrowLeft")
    assert shown.view()[0] < moved[0]
    browser.press(page, "+")
    assert shown.view()[1] - shown.view()[0] < near[1] - near[0]
    browser.press(page, "0")
    assert shown.view()[1] > 3 * end
    assert shown.view() == tuple(shown.value("[timeline.view.first, timeline.view.last]"))

    browser.press(page, "]")
    assert shown.value("timeline.picked") == 22
    browser.press(page, "]")
    assert shown.value("document.getElementById('pick').value") == "23"
    # both runs begin at the picked step now
    origins = shown.value("timeline.runs.map((run) => run.origin - run.steps[1][1])")
    assert origins == [0, 0]
    assert "0 ms: step 23 is planned" in shown.value("document.body.innerText")
    left, top = shown.place(1, 0, "gpu", "forward", step=24)
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(page, kind, x=left + 9, y=top + 8, button="left", clickCount=1)
    assert shown.value("timeline.picked") == 24
    browser.press(page, "Escape")
    assert shown.value("timeline.picked") is None
    assert shown.view() == pytest.approx((begin, end))

    height = shown.value("timeline.height")
    place = shown.value(
        "document.getElementById('lanes').getBoundingClientRect().top"
        " + timeline.runs[0].ranks[1].top + 9"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(page, kind, x=40, y=place, button="left", clickCount=1)
    assert shown.value("timeline.runs[0].ranks[1].isFolded") is True
    assert shown.value("timeline.height") < height - 80
    errors = [each for each in browser.events if each["method"] == "Runtime.exceptionThrown"]
    assert errors == []


def test_a_traced_rank_tells_nvtx_where_pytorch_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: str) -> None:
        raise RuntimeError("built without")

    told: list[str] = []
    monkeypatch.setattr("torch.cuda.nvtx.mark", told.append)
    nvtx = open_nvtx()
    assert nvtx is not None
    nvtx.mark("forward")
    assert told == ["trace", "forward"]
    monkeypatch.setattr("torch.cuda.nvtx.mark", fail)
    with caplog.at_level("INFO", "nanorunner"):
        assert open_nvtx() is None
    assert "the trace has no NVTX ranges: built without" in caplog.text


def test_the_summary_is_the_last_line(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(folders[0]), "--steps", "3:5"]) == 0
    *_, where, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert where == f"{summary['page']}: open it in a browser"
    assert summary["steps"] == [[3, 5]]
    assert summary["steps_left_out"] == [MAX_TOKENS - 3]
    assert summary["arrows"] == [(START_METHODS + MAX_TOKENS + LAST_METHODS) + MAX_TOKENS]
