"""The READMEs' picture shows the result files' figures below what the machine allows.

It is here and not in tests/pure since the limit's formula comes with imports that need torch.
"""

from __future__ import annotations

import copy
import json
import struct
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from nanorunner.bench.bounds import KNOWN_LIMITS
from nanorunner.bench.drawing import STYLE, canvas
from nanorunner.bench.records import Shape
from nanorunner.bench.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # its files import each other by their bare names

from scripts import readme_plot  # noqa: E402
from scripts.readme_plot import (  # noqa: E402
    MODELS,
    PICTURE,
    caption,
    draw,
    draw_panel,
    limit_tokens_per_s,
    name_of,
    points,
    shape_of,
    sides,
)
from scripts.readme_table import read_results  # noqa: E402

RESULTS = read_results(ROOT / "benchmarks" / "h200")
FILES = {
    ("qwen3-0.6b", "nanorunner v2"): "v2-0.6b-tp1.json",
    ("qwen3-0.6b", "nanorunner v1"): "v1-0.6b-tp1.json",
    ("qwen3-0.6b", "vLLM 0.25.1"): "vllm-0.6b-tp1.json",
    ("qwen3-8b", "nanorunner v2"): "v2-8b-tp1.json",
    ("qwen3-8b", "nanorunner v1"): "v1-8b-tp1.json",
    ("qwen3-8b", "vLLM 0.25.1"): "vllm-8b-tp1.json",
}
BATCHES = {"b1": 1, "b8": 8, "b64": 64, "b256": 256}


def rates_of_file(model: str, name: str) -> list[tuple[int, float]]:
    """Return a file's (batch, output tokens/s), read without the code that is tested."""
    loads = json.loads((ROOT / "benchmarks" / "h200" / FILES[model, name]).read_text())["loads"]
    return [
        (batch, loads[load]["output_tokens_per_s"])
        for load, batch in BATCHES.items()
        if load in loads
    ]


@pytest.mark.parametrize(("model", "name"), FILES)
def test_the_points_are_the_figures_of_the_files(model: str, name: str) -> None:
    assert [name_of(result) for result in sides(RESULTS, model)] == [
        each for its_model, each in FILES if its_model == model
    ]
    result = next(each for each in sides(RESULTS, model) if name_of(each) == name)
    found = points(result)
    assert [(point.batch, point.rate) for point in found] == rates_of_file(model, name)
    for point in found:
        assert point.slowest <= point.rate <= point.fastest < point.limit
        # the bars are of the same repeats: their middle one gave the rate
        seconds = sorted(result["loads"][f"b{point.batch}"]["seconds"])
        tokens = point.batch * 512
        assert point.slowest == pytest.approx(tokens / seconds[-1], rel=1e-3)
        assert point.rate == pytest.approx(tokens / seconds[1], rel=1e-3)
        assert point.fastest == pytest.approx(tokens / seconds[0], rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_drawn_are_the_points_and_the_limit(model: str) -> None:
    results = sides(RESULTS, model)
    with matplotlib.rc_context(STYLE):
        _, (axes,) = canvas()
        draw_panel(axes, model, results)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = {
        container.get_label(): [(x, y) for x, y in container.lines[0].get_xydata()]
        for container in axes.containers
    }
    assert drawn == {name: rates_of_file(m, name) for m, name in FILES if m == model}
    (limit,) = (line for line in axes.lines if line.get_label() == "limit")
    expected = {point.batch: point.limit for result in results for point in points(result)}
    assert [(x, y) for x, y in limit.get_xydata()] == sorted(expected.items())
    shares = [text.get_text() for text in axes.texts]
    assert shares == [f"{100 * p.rate / p.limit:.0f}%" for p in points(results[0])]


def test_the_limit_of_one_request_of_8b_is_the_arithmetic_of_its_shape() -> None:
    # a layer: q, k, v and o of 32 and 8 heads of 128 on hidden 4096, then the three of the MLP
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288
    weight_bytes = 2 * (36 * layer + 151936 * 4096)  # and the head; of the table one row is read
    assert weight_bytes == 15_136_194_560
    position_bytes = 2 * 2 * 36 * 8 * 128  # K and V of 8 heads of 128
    # the prefill has 128 positions, decode steps 1 to 511 have 129 to 639; memory is slower in all
    steps = [weight_bytes + positions * position_bytes for positions in range(128, 640)]
    assert len(steps) == 512
    seconds = sum(steps) / 4.48e12
    assert 2 * 36 * layer * 128 + 2 * 151936 * 4096 + 4 * 36 * 32 * 128 * 128 * 129 / 2 < (
        steps[0] / 4.48e12 * 788e12
    )
    limit = limit_tokens_per_s("qwen3-8b", KNOWN_LIMITS["NVIDIA H200"], Shape(1, 128, 512))
    assert limit == pytest.approx(512 / seconds, rel=1e-12)
    assert limit == pytest.approx(294.88, abs=0.01)
    v2 = points(sides(RESULTS, "qwen3-8b")[0])
    assert v2[0].limit == limit


def test_where_prompts_are_many_the_processors_bound_the_prefill() -> None:
    layer = 1024 * 128 * 2 * (16 + 8) + 3 * 1024 * 3072
    head = 151936 * 1024
    tokens, attended = 256 * 512, 256 * 512 * 513 // 2
    operations = 2 * 28 * layer * tokens + 2 * head * 256 + 4 * 28 * 16 * 128 * attended
    position_bytes = 2 * 2 * 28 * 8 * 128
    decodes = (2 * (28 * layer + head) + 256 * n * position_bytes for n in range(513, 1024))
    seconds = operations / 788e12 + sum(decodes) / 4.48e12
    limit = points(sides(RESULTS, "qwen3-0.6b")[0])[-1].limit
    assert limit == pytest.approx(256 * 512 / seconds, rel=1e-12)


def test_a_load_is_one_batch_of_equal_requests() -> None:
    for load in readme_plot.BATCH_LOADS:
        batch, input_len, output_len = shape_of(load)
        assert batch == BATCHES[load]
        workload = WORKLOADS[load](1)
        assert {len(prompt) for prompt in workload.prompts} == {input_len}
        assert set(workload.output_lens) == {output_len}


def test_the_caption_has_the_formula_its_figures_and_the_days() -> None:
    words = caption(RESULTS)
    for part in ("max(bytes / bandwidth", "4.48 TB/s", "788 TFLOP/s", "1 x 128, 8 x 512"):
        assert part in words
    for side in sides(RESULTS, "qwen3-8b"):
        assert side["date"][:10] in words


def without(side: str) -> list[dict[str, Any]]:
    return [each for each in RESULTS if not name_of(each).endswith(side)]


def test_a_side_without_a_result_or_a_gpu_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qwen3-8b, tp 1, v1: 0 results"):
        sides(without("v1"), "qwen3-8b")
    with pytest.raises(ValueError, match=r"qwen3-8b, tp 1, v2: 2 results"):
        sides([*RESULTS, sides(RESULTS, "qwen3-8b")[0]], "qwen3-8b")
    other = copy.deepcopy(sides(RESULTS, "qwen3-8b")[0])
    other["versions"]["gpus"] = ["NVIDIA T4"]
    with pytest.raises(ValueError, match="NVIDIA T4: no limit is known"):
        points(other)


def test_the_picture_has_the_size_of_a_slide() -> None:
    for png in (PICTURE.read_bytes(), draw(RESULTS).png):
        assert png.startswith(b"\x89PNG")
        assert struct.unpack(">2I", png[16:24]) == (1920, 1080)
