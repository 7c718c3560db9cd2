"""The figures of a benchmark folder, as matplotlib draws them.

    draw_all(records, limits) -> [Drawing], {figure: why it was not drawn}

Every point is the median of its repeats, with a bar from the smallest to the largest. A figure that
has nothing to say (one batch size, one runner) is left out by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib

from nanorunner.bench.bounds import FORMULA, Limits, run_bound_s
from nanorunner.bench.drawing import (
    COLOURS,
    GREY,
    NOTE_SIZE,
    STYLE,
    Drawing,
    NothingToShow,
    canvas,
    error_bars,
    finish,
    lines,
    measured_ticks,
    note,
)
from nanorunner.bench.environment import ENVIRONMENT_NAMES
from nanorunner.bench.metrics import METRICS
from nanorunner.bench.pareto import front, latency_of
from nanorunner.bench.records import Record, label, series, telling_names, text_of, value_of
from nanorunner.bench.tables import number

RATE = "output_tokens_per_s"
# Beside throughput: the latency that changes most with the setting.
SECOND_METRIC = {"input_len": "ttft_ms_p50", "rate": "ttft_ms_p95", "concurrency": "ttft_ms_p95"}
DEFAULT_SECOND_METRIC = "itl_ms_p95"
LOAD_NAMES = ("batch", "concurrency", "rate", "requests")  # how much is asked, not of whom
NO_FIGURE_NAMES = ("model", "workload", "commit", "tp", "batch", "requests", *ENVIRONMENT_NAMES)
# What the physical limit of a batch depends on; a runner has the same one as another.
LIMIT_NAMES = ("model", "tp", "dtype", "input_len", "output_len", "gpu", "cpu")
REPEATS = "Points: median of all repeats; bars: smallest to largest."

LimitsOf = Callable[[Record], Limits | None]


def draw_all(
    records: Sequence[Record], limits_of_record: LimitsOf
) -> tuple[list[Drawing], dict[str, str]]:
    """Return every figure that the records allow, and for each other one what it lacks."""
    makers: dict[str, Callable[[], Drawing]] = {
        "throughput against latency": partial(pareto, records),
        "tokens per second and the limit": partial(batches, records, limits_of_record),
        "scaling over tp": partial(scaling, records),
        "step time": partial(steps, records),
        "runner": partial(choices, records, "runner"),
    }
    for name in telling_names(records):
        if name in NO_FIGURE_NAMES:
            continue
        draw = over if all(_is_number(value_of(each, name)) for each in records) else choices
        makers[name] = partial(draw, records, name)
    drawings, left_out = [], {}
    with matplotlib.rc_context(STYLE):
        for figure, make in makers.items():
            try:
                drawings.append(make())
            except NothingToShow as lack:
                left_out[figure] = str(lack)
    return drawings, left_out


def pareto(records: Sequence[Record]) -> Drawing:
    """Draw throughput a rank against latency, and which points no other beats in both."""
    name, latencies = latency_of(records)
    shown = [record for record in records if id(record) in latencies and RATE in record.metrics]
    if len(shown) < 2:
        raise NothingToShow("needs two points with a latency")

    def point_of(record: Record) -> tuple[float, float]:
        return latencies[id(record)], record.metrics[RATE].median / _tp(record)

    names = telling_names(shown)
    loads = [each for each in names if each in LOAD_NAMES]
    figure, (axes,) = canvas()
    for title, its, look in lines(series(shown, [each for each in names if each not in loads])):
        its = sorted(its, key=lambda record: [_order(value_of(record, each)) for each in loads])
        axes.plot(*zip(*map(point_of, its), strict=True), label=title or None, **look)
        for record in its:
            if loads:
                note(axes, point_of(record), text_of(record, loads[0]))
    for model in dict.fromkeys(text_of(record, "model") for record in shown):
        its = [record for record in shown if text_of(record, "model") == model]
        axes.plot(
            *zip(*front([point_of(record) for record in its]), strict=True),
            color="0.5",
            lw=9,
            marker="o",  # a front of one point has no line
            ms=22,
            alpha=0.3,
            zorder=0,
            drawstyle="steps-post",
            label="Pareto front" + (f", {model}" if "model" in names else ""),
        )
    axes.set(xscale="log", xlabel=f"{name} (less is better)")
    axes.set(yscale="log", ylabel="output tokens/s a rank (more is better)")
    noted = f" Numbers at points: {loads[0]}." if loads else ""
    caption = f"{REPEATS}{noted} On the grey front no other point of that model is better in both."
    return finish("pareto", "Throughput against latency", caption, figure)


def batches(records: Sequence[Record], limits_of_record: LimitsOf) -> Drawing:
    """Draw tokens/s over the batch size, with the machine's limit where it is known."""
    shown = [record for record in records if record.shape is not None and RATE in record.metrics]
    if len({_batch(record) for record in shown}) < 2:
        raise NothingToShow("needs two batch sizes of equal requests")
    figure, (axes,) = canvas()
    names = [name for name in telling_names(shown) if name != "batch"]
    for title, its, look in lines(series(shown, names)):
        its = sorted(its, key=_batch)
        rates = [record.metrics[RATE].values for record in its]
        error_bars(axes, [_batch(record) for record in its], rates, title, look)
    curves, sources = limit_curves(shown, names, limits_of_record)
    smallest = min(_batch(record) for record in shown)
    for title, points in curves.items():
        axes.plot(*zip(*points, strict=True), color=GREY, ls="--", lw=2)
        words = f"limit {title}".strip()
        # left of the smallest batch are the figures of the axis
        side = "left" if points[-1][0] == smallest else "right"
        note(axes, points[-1], words, xytext=(0, 8), ha=side, color=GREY)
    axes.set(xlabel="batch (requests at once)", ylabel="output tokens/s", yscale="log")
    measured_ticks(axes, [_batch(record) for record in shown])
    title, limit = "Tokens per second", "No limit: the machine's bandwidth is not known."
    if sources:
        title, limit = f"{title} and the physical limit", f"{FORMULA} ({'; '.join(sources)})."
    return finish("batch", f"{title}, over the batch", f"{REPEATS} {limit}", figure)


def limit_curves(
    records: Sequence[Record], names: Sequence[str], limits_of_record: LimitsOf
) -> tuple[dict[str, list[tuple[int, float]]], set[str]]:
    """Return the limit's points (batch, output tokens/s) by what it is the limit of.

    names: the settings that tell the records apart. Beside them comes where the limits are from.
    """
    curves, sources = {}, set()
    for title, its in series(records, [name for name in names if name in LIMIT_NAMES]).items():
        curve: dict[int, float] = {}
        for record in its:
            limits = limits_of_record(record)
            if limits is not None:
                sources.add(limits.source)
                curve[_batch(record)] = limit_tokens_per_s(record, limits)
        if curve:
            curves[title] = sorted(curve.items())
    return curves, sources


def limit_tokens_per_s(record: Record, limits: Limits) -> float:
    """Return the most output tokens/s that a batch's work allows, its prefill included."""
    assert record.shape is not None, "only a batch of equal requests has a limit"
    assert record.model is not None, "the caller has asked whether the model is known"
    shape = record.shape
    seconds = run_bound_s(
        record.model,
        record.settings["dtype"],
        limits,
        batch=shape.batch,
        input_len=shape.input_len,
        output_len=shape.output_len,
        tp=_tp(record),
    )
    return shape.batch * shape.output_len / seconds


def scaling(records: Sequence[Record]) -> Drawing:
    """Draw tokens/s over tp relative to the smallest tp, beside perfect scaling."""
    groups = _with_several(records, "tp")
    if not groups:
        raise NothingToShow("needs two tp with all else equal")
    figure, (axes,) = canvas()
    tps: set[int] = set()
    for title, its, look in lines(groups):
        its = sorted(its, key=_tp)
        base = its[0].metrics[RATE].median / _tp(its[0])
        ratios = [[value / base for value in record.metrics[RATE].values] for record in its]
        error_bars(axes, [_tp(record) for record in its], ratios, title, look)
        tps.update(_tp(record) for record in its)
    axes.plot(sorted(tps), sorted(tps), ls=":", color=GREY, label="perfect")
    axes.set(xlabel="tp (ranks)", ylabel="speed-up of output tokens/s", ylim=(0, None))
    measured_ticks(axes, tps)
    caption = f"{REPEATS} 1 is one rank, or the smallest tp's rate over its number of ranks."
    return finish("tp", "Scaling over tp", caption, figure)


def over(records: Sequence[Record], name: str) -> Drawing:
    """Draw throughput, and a latency where there is one, over a setting that is a number."""
    second = SECOND_METRIC.get(name, DEFAULT_SECOND_METRIC)
    panels = [metric for metric in (RATE, second) if any(metric in r.metrics for r in records)]
    if not panels:
        raise NothingToShow(f"needs {RATE}")
    names = [each for each in telling_names(records) if each != name]
    figure, all_axes = canvas(len(panels))
    for axes, metric in zip(all_axes, panels, strict=True):
        shown = [record for record in records if metric in record.metrics]
        for title, its, look in lines(series(shown, names)):
            its = sorted(its, key=lambda record: float(value_of(record, name)))
            xs = [float(value_of(record, name)) for record in its]
            error_bars(axes, xs, [record.metrics[metric].values for record in its], title, look)
        axes.set(xlabel=name.replace("_", " "), ylabel=metric_words(metric), ylim=(0, None))
        measured_ticks(axes, [float(value_of(record, name)) for record in records])
    words = "; ".join(f"{metric}: {METRICS[metric].definition}" for metric in panels)
    return finish(name, f"Over {name.replace('_', ' ')}", f"{REPEATS} {words}.", figure)


def choices(records: Sequence[Record], name: str) -> Drawing:
    """Draw bars for the choices of a setting, each group relative to its first choice."""
    groups = _with_several(records, name)
    if not groups:
        raise NothingToShow(f"needs two choices of {name} with all else equal")
    options = list(dict.fromkeys(text_of(each, name) for its in groups.values() for each in its))
    figure, (axes,) = canvas()
    width = 0.8 / len(options)
    is_dense = len(groups) * len(options) > 14
    for place, its in enumerate(groups.values()):
        by_option = {text_of(record, name): record.metrics[RATE] for record in its}
        base = next(by_option[option] for option in options if option in by_option)
        for index, option in enumerate(options):
            if option not in by_option:
                continue
            rate = by_option[option]
            x = place + (index - (len(options) - 1) / 2) * width
            height = rate.median / base.median
            spread = [
                [(rate.median - rate.low) / base.median],
                [(rate.high - rate.median) / base.median],
            ]
            axes.bar(x, height, width * 0.92, color=COLOURS[index % len(COLOURS)])
            axes.errorbar(x, height, yerr=spread, color=GREY, capsize=4, lw=1.6)
            axes.annotate(
                f" {number(rate.median)}",
                (x, rate.high / base.median),
                ha="center",
                va="bottom",
                fontsize=NOTE_SIZE,
                rotation=90 if is_dense else 0,
            )
    for index, option in enumerate(options):
        axes.bar(0, 0, color=COLOURS[index % len(COLOURS)], label=option)
    axes.axhline(1, color=GREY, lw=1.2)
    axes.set_xticks(range(len(groups)), [title.replace(", ", "\n") or "all" for title in groups])
    axes.tick_params(axis="x", labelsize=NOTE_SIZE)
    axes.margins(y=0.15)
    axes.set_ylabel(f"output tokens/s, {options[0]} = 1")
    title = f"{name.replace('_', ' ')}: " + ", ".join(options)
    caption = "Height: output tokens/s relative to the first choice; above the bars: tokens/s."
    return finish(name, title, f"{REPEATS} {caption}", figure)


def steps(records: Sequence[Record]) -> Drawing:
    """Draw where a step's time goes, stage by stage, the CPU's and the GPU's beside each other."""
    shown = [record for record in records if record.step_ms]
    if not shown:
        raise NothingToShow("no result holds the times of a step's stages")
    figure, (axes,) = canvas()
    names = telling_names(shown)
    bars = [(record, kind) for record in shown for kind in record.step_ms]
    stages = list(dict.fromkeys(s for record, kind in bars for s in record.step_ms[kind]))
    colours = matplotlib.colormaps["tab20"]
    places = range(len(bars))
    left = [0.0] * len(bars)
    for index, stage in enumerate(stages):
        widths = [record.step_ms[kind].get(stage, 0.0) for record, kind in bars]
        colour = colours(index % colours.N)
        axes.barh(places, widths, left=left, label=stage.replace("_", " "), color=colour)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    labels = [f"{label(record, names) or record.source}, {kind.upper()}" for record, kind in bars]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    return finish("steps", "Where a step's time goes", "Means of all steps.", figure)


def metric_words(name: str) -> str:
    """Return a metric's name as an axis shows it: "itl p95, ms"."""
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ") + "/s"
    return f"{name.replace('_ms', '').replace('_', ' ')}, {METRICS[name].unit}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _order(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size and before all else."""
    return (False, float(value), "") if _is_number(value) else (True, 0.0, str(value))


def _batch(record: Record) -> int:
    assert record.shape is not None, "only records of one batch are drawn over it"
    return record.shape.batch


def _tp(record: Record) -> int:
    return int(record.settings.get("tp", 1))


def _with_several(records: Sequence[Record], name: str) -> dict[str, list[Record]]:
    """Return the series of equal other settings in which a setting takes several values."""
    others = [each for each in telling_names(records) if each != name]
    rated = [record for record in records if RATE in record.metrics]
    return {
        title: its
        for title, its in series(rated, others).items()
        if len({text_of(record, name) for record in its}) > 1
    }
