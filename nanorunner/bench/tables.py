"""Points as a table of text: what `sweep` prints at its end and what the HTML report holds."""

from __future__ import annotations

from collections.abc import Sequence

from nanorunner.bench.records import Record, telling_names, text_of

# The figures that a table has room for, as far as there are any.
CHIEF_METRICS = (
    "output_tokens_per_s",
    "requests_per_s",
    "ttft_ms_p50",
    "ttft_ms_p95",
    "tpot_ms_p50",
    "tpot_ms_p95",
    "itl_ms_p95",
    "duration_s",
)

Cells = list[list[str]]


def number(value: float) -> str:
    """Return a figure with as many digits as a reader can use."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def cells(records: Sequence[Record]) -> Cells:
    """Return the header and a row a point: settings, repeats, chief metrics, spread."""
    names = telling_names(records)
    metrics = [name for name in CHIEF_METRICS if any(name in each.metrics for each in records)]
    header = [*(name.replace("_", " ") for name in names), "repeats", *metrics]
    if metrics:
        header.append(f"spread of {metrics[0]}")
    table = [header]
    for record in records:
        values = [record.metrics.get(name) for name in metrics]
        repeats = max((len(value.values) for value in values if value), default=0)
        row = [*(text_of(record, name) for name in names), str(repeats)]
        row += ["-" if value is None else number(value.median) for value in values]
        if metrics:
            first = record.metrics.get(metrics[0])
            row.append("-" if first is None else f"{first.spread:.1%}")
        table.append(row)
    return table


def points_table(records: Sequence[Record]) -> str:
    """Return the points as aligned text, medians of all repeats."""
    return aligned(cells(records)) if records else "no point has a result"


def aligned(table: Cells) -> str:
    """Return rows of cells as text; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
