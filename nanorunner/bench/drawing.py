"""How a figure looks: 1920 x 1080, readable on a slide, told apart without colour.

figures.py says what is drawn; this file holds the canvas, the lines, the ticks and the legend.
Every axis of numbers gets at least two labelled ticks, wherever its limits are.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from nanorunner.bench.records import Record

SIZE_INCHES, DPI = (12.8, 7.2), 150
# Okabe and Ito's palette: told apart by colour-blind readers and in grey
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A900")
MARKERS = "osD^vP*X"
GREY = "0.35"
NOTE_SIZE = 13
CAPTION_LETTERS = 135  # of that size in a line
MOST_TICKS = 6  # on an axis: even labels such as 10,000,000 stay apart at this size
# An axis over its figures; those nearer to each other have too many digits to read.
NARROWEST = 1e-4
STYLE = {
    "font.size": 17,
    "axes.titlesize": 22,
    "axes.labelsize": 19,
    "legend.fontsize": 14,
    "lines.linewidth": 2.6,
    "lines.markersize": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Look = dict[str, Any]  # colour and marker of a line


class Drawing(NamedTuple):
    """A finished figure."""

    name: str  # of its file, without the suffix
    title: str
    caption: str
    png: bytes


class NothingToShow(Exception):
    """The records hold too little for a figure; the message says what is missing."""


def canvas(num_panels: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, side by side."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def lines(groups: Mapping[str, list[Record]]) -> Iterable[tuple[str, list[Record], Look]]:
    """Yield each series with its label, its records, its colour and marker."""
    for index, (title, records) in enumerate(groups.items()):
        yield (
            title,
            records,
            {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]},
        )


def error_bars(
    axes: Any, xs: Sequence[float], values: Sequence[Sequence[float]], title: str, look: Look
) -> None:
    """Draw a line through the medians, with a bar from the smallest to the largest value."""
    medians = [statistics.median(each) for each in values]
    low = [median - min(each) for median, each in zip(medians, values, strict=True)]
    high = [max(each) - median for median, each in zip(medians, values, strict=True)]
    axes.errorbar(xs, medians, yerr=[low, high], capsize=5, label=title or None, **look)


def note(axes: Any, point: tuple[float, float], text: str, **settings: Any) -> None:
    """Write a few words beside a point, legible above lines."""
    axes.annotate(
        text,
        point,
        textcoords="offset points",
        fontsize=NOTE_SIZE,
        bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1},
        **{"xytext": (8, -16), **settings},
    )


def measured_ticks(axes: Any, values: Iterable[float]) -> None:
    """Put the measured values on the x axis, spaced by their logarithm when they are far apart."""
    ticks = sorted(set(values))
    if ticks and ticks[0] > 0 and ticks[-1] / ticks[0] >= 4:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, tick_words(ticks))
    axes.xaxis.set_minor_locator(NullLocator())


def label_ticks(axes: Any) -> None:
    """Choose and label the ticks of both axes by their limits; an axis that has its own keeps them.

    matplotlib's own choice leaves a logarithmic axis without a label where no 1, 10, 100 lies in
    it. The limits stay as they are, except where they lie too near each other for any label.
    """
    for axis, limits, set_limits in (
        (axes.xaxis, axes.get_xlim(), axes.set_xlim),
        (axes.yaxis, axes.get_ylim(), axes.set_ylim),
    ):
        if isinstance(axis.get_major_locator(), FixedLocator):
            continue
        low, high = sorted(map(float, limits))
        if high - low < NARROWEST * max(abs(low), abs(high)):
            low, high = sorted((low * (1 - NARROWEST), high * (1 + NARROWEST)))
            set_limits(low, high)
        is_log = axis.get_scale() == "log"
        ticks = log_ticks(low, high) if is_log else even_ticks(low, high)
        axis.set_ticks(ticks, tick_words(ticks))
        axis.set_minor_formatter(NullFormatter())


def log_ticks(low: float, high: float) -> list[float]:
    """Return at least two round figures from low to high, both above 0, as many as can be read.

    1, 2, 5, 10, 20, ... where there is room, else 1, 3, 10, ..., or powers of ten, every second of
    them and so on; evenly spaced ones on an axis so short that it holds hardly one of those.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        powers = range(first, last + 1)
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MOST_TICKS:
            return ticks if len(ticks) > 2 else even_ticks(low, high)
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)]  # seven powers or more: at least four stay


def even_ticks(low: float, high: float) -> list[float]:
    """Return at least two evenly spaced round figures from low to high."""
    locator = MaxNLocator(MOST_TICKS, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)
    return [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Return figures such as 2.5 and 20,000, each with the digits that tell it from the others."""
    words = []
    for tick in ticks:
        gap = min((abs(tick - other) for other in ticks if other != tick), default=abs(tick))
        rounding = gap / 1e6  # more than a sum of steps is off, less than anyone sees
        if abs(tick) <= rounding:
            words.append("0")
            continue
        digits = next(n for n in range(1, 18) if abs(float(f"{tick:.{n}g}") - tick) <= rounding)
        power = math.floor(math.log10(abs(tick)))
        is_plain = -4 <= power < 9
        decimals = max(0, digits - 1 - power)
        words.append(f"{tick:,.{decimals}f}" if is_plain else f"{tick:.{digits}g}")
    return words


def finish(name: str, title: str, caption: str, figure: Any, is_captioned: bool = False) -> Drawing:
    """Return the figure as a PNG, its ticks labelled, the first panel's legend below it.

    is_captioned: the caption stands in the image too, at its foot, for a page that has no other.
    """
    for axes in figure.axes:
        label_ticks(axes)
    figure.suptitle(title, fontsize=24)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        # below: a legend beside the axes would halve them
        columns = min(3, math.ceil(len(labels) / 2)) if len(labels) > 2 else len(labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    if is_captioned:
        write_caption(figure, caption)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Drawing(name, title, caption, buffer.getvalue())


def write_caption(figure: Any, caption: str) -> None:
    """Write a caption at the foot of a figure that is complete otherwise; all else moves up."""
    words = textwrap.wrap(caption, CAPTION_LETTERS)
    foot = len(words) * 1.3 * NOTE_SIZE / (72 * SIZE_INCHES[1])  # as a share of the height
    figure.get_layout_engine().set(rect=(0, foot, 1, 1 - foot))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # all stays where it is now, but for the legend
    for legend in figure.legends:  # whose room the layout keeps, but at the figure's own foot
        legend.set_bbox_to_anchor((0, foot, 1, 1 - foot), figure.transFigure)
    figure.text(0.5, foot, "\n".join(words), ha="center", va="top", fontsize=NOTE_SIZE)
