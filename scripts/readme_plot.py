"""Draw the READMEs' picture from benchmarks/h200/*.json: tokens/s over the batch, and the limit.

    python scripts/readme_plot.py            write benchmarks/h200/tokens-per-second.png

One panel a model on one rank, one line each for runner v2, runner v1 and vLLM: output tokens/s of
the loads that are one batch of equal requests (b1, b8, b64, b256), as the table has them, with bars
from the slowest to the fastest repeat. Dashed: what the GPU's memory and processors allow of the
same load (nanorunner/bench/bounds.py):

    limit       batch x output_len / (prefill_s + decode_s of i = 1 + ... + of i = output_len - 1)
    prefill_s   one step over all prompts, which makes each request's first token
    decode_s    of i: one step of `batch` requests, each of input_len + i positions
    both        max(bytes / 4.48e12 per s, operations / 788e12 per s), as measured on an H200
    bytes       every weight once + K and V of every position that is read or written
    operations  2 x weights x tokens + 4 x layers x heads x head_dim x attended positions
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib

from nanorunner.bench.bounds import FORMULA, Limits, limits_of, run_bound_s
from nanorunner.bench.drawing import (
    COLOURS,
    GREY,
    MARKERS,
    STYLE,
    Drawing,
    canvas,
    error_bars,
    finish,
    measured_ticks,
    note,
)
from nanorunner.bench.records import Shape
from nanorunner.bench.workloads import make_workload
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse

if TYPE_CHECKING:
    from scripts.readme_table import OURS, ROOT, read_results, who_ran
else:  # a script's own folder is where Python looks first; it is no package
    from readme_table import OURS, ROOT, read_results, who_ran

FOLDER = ROOT / "benchmarks" / "h200"
PICTURE = FOLDER / "tokens-per-second.png"
MODELS = ("qwen3-0.6b", "qwen3-8b")
BATCH_LOADS = ("b1", "b8", "b64", "b256")
SIDES = ("v2", "v1", "vLLM")  # what who_ran() begins with, in the order of the legend
MARKED = "v2"  # the side whose share of the limit stands beside it
DTYPE = "bfloat16"  # of every result


class Point(NamedTuple):
    """One load of one engine."""

    batch: int  # requests at once
    rate: float  # output tokens/s of the median repeat
    slowest: float
    fastest: float
    limit: float  # output tokens/s that the machine allows


def shape_of(load: str) -> Shape:
    """Return the batch that a load is: so many equal requests, all at once."""
    workload = make_workload(load, vocab_size=2)
    return Shape(len(workload.prompts), len(workload.prompts[0]), workload.output_lens[0])


def sides(results: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Return the model's result on one rank of each side; ValueError unless each has just one."""
    found = []
    for side in SIDES:
        its = [
            result
            for result in results
            if (result["model"], result["tp"]) == (model, 1) and who_ran(result).startswith(side)
        ]
        if len(its) != 1:
            raise ValueError(f"{model}, tp 1, {side}: {len(its)} results, where one is drawn")
        found += its
    return found


def limits_for(result: dict[str, Any]) -> Limits:
    """Return what the GPU of a result can do; ValueError where nobody has measured it."""
    gpu = result["versions"]["gpus"][0]
    limits = limits_of(gpu, DTYPE)
    if limits is None:
        raise ValueError(f"{gpu}: no limit is known; bounds.py has those that are")
    return limits


def points(result: dict[str, Any]) -> list[Point]:
    """Return a result's batches, the smallest first."""
    found = []
    for load in BATCH_LOADS:
        if load in result["loads"]:
            measured, shape = result["loads"][load], shape_of(load)
            rate = measured["output_tokens_per_s"]
            rates = [shape.batch * shape.output_len / seconds for seconds in measured["seconds"]]
            # the file's rate is rounded, so it may lie just outside of what equal repeats give
            slowest, fastest = min(rate, *rates), max(rate, *rates)
            limit = limit_tokens_per_s(result["model"], limits_for(result), shape)
            found.append(Point(shape.batch, rate, slowest, fastest, limit))
    return found


def limit_tokens_per_s(model: str, limits: Limits, shape: Shape) -> float:
    """Return the most output tokens/s that one device can make of a batch, prefill included."""
    seconds = run_bound_s(parse(load_preset(model)), DTYPE, limits, **shape._asdict())
    return shape.batch * shape.output_len / seconds


def draw(results: list[dict[str, Any]]) -> Drawing:
    """Return the picture."""
    with matplotlib.rc_context(STYLE):
        figure, panels = canvas(len(MODELS))
        for axes, model in zip(panels, MODELS, strict=True):
            draw_panel(axes, model, sides(results, model))
        title = "Output tokens per second on one H200, and the physical limit"
        return finish(PICTURE.stem, title, caption(results), figure, is_captioned=True)


def draw_panel(axes: Any, model: str, results: list[dict[str, Any]]) -> None:
    """Draw one model's sides and the limit above them."""
    limits: dict[int, float] = {}
    for index, result in enumerate(results):
        name, its = name_of(result), points(result)
        look = {"color": COLOURS[index], "marker": MARKERS[index]}
        values = [(point.slowest, point.rate, point.fastest) for point in its]
        error_bars(axes, [point.batch for point in its], values, name, look)
        limits |= {point.batch: point.limit for point in its}
        if name.endswith(MARKED):
            for point in its:  # left of the limit, where no line is
                place, words = (point.batch, point.limit), f"{point.rate / point.limit:.0%}"
                note(axes, place, words, xytext=(-9, 6), ha="right", color=COLOURS[index])
    axes.plot(*zip(*sorted(limits.items()), strict=True), color=GREY, ls="--", label="limit")
    axes.set(title=model, xlabel="batch (requests at once)", yscale="log")
    axes.set_ylabel("output tokens/s")
    axes.margins(x=0.16)  # room for the first percentage
    measured_ticks(axes, limits)


def name_of(result: dict[str, Any]) -> str:
    """Return what the legend calls a result: "nanorunner v2" or "vLLM 0.25.1"."""
    who = who_ran(result).split(",")[0]
    return f"{OURS} {who}" if result["engine"] == OURS else who


def caption(results: list[dict[str, Any]]) -> str:
    """Return what the lines are, and when they were measured."""
    its = [result for model in MODELS for result in sides(results, model)]
    sources = {limits_for(result).source for result in its}
    names: dict[str, list[str]] = {}
    for result in its:
        names.setdefault(result["date"][:10], []).append(who_ran(result).split(",")[0])
    days = [f"{day}: {', '.join(dict.fromkeys(names[day]))}" for day in sorted(names)]
    shapes = [shape_of(load) for load in BATCH_LOADS]
    lengths = ", ".join(f"{each.batch} x {each.input_len}" for each in shapes)
    return (
        "limit = tokens out / (limits of one prefill step + of each decode step at its context); "
        f"{FORMULA} ({'; '.join(sorted(sources))}). Percentages: {MARKED} of the limit. "
        f"Requests x tokens in: {lengths}; {shapes[0].output_len} out. "
        f"Bars: slowest to fastest run. Measured {'; '.join(days)}."
    )


def main() -> int:
    """Write the picture and return the exit code."""
    drawing = draw(read_results(FOLDER))
    PICTURE.write_bytes(drawing.png)
    print(f"{PICTURE.relative_to(ROOT)}: {drawing.caption}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
