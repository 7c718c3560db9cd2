"""How a figure looks: 1920 x 1080, readable on a slide, told apart without colour.

figures.py says what is drawn; this file holds the canvas, the lines, the ticks and the legend.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from nanorunner.bench.records import Record
from nanorunner.bench.tables import number

SIZE_INCHES, DPI = (12.8, 7.2), 150
# Okabe and Ito's palette: told apart by colour-blind readers and in grey
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A900")
MARKERS = "osD^vP*X"
GREY = "0.35"
NOTE_SIZE = 13
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
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def plain_log_axes(axes: Any) -> None:
    """Make both axes logarithmic, with figures such as 5 and 2,000 at the ticks."""
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def finish(name: str, title: str, caption: str, figure: Any) -> Drawing:
    """Return the figure as a PNG, the first panel's legend below it."""
    for axes in figure.axes:
        if axes.get_yscale() == "log":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        # below: a legend beside the axes would halve them
        columns = min(3, math.ceil(len(labels) / 2)) if len(labels) > 2 else len(labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize=24)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Drawing(name, title, caption, buffer.getvalue())
