"""The HTML report: one file with its images inside, no script, nothing fetched.

Its own policy (Content-Security-Policy) forbids every request, so a mistake here shows as a missing
image and not as a file that works only with a network.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from nanorunner.bench.metrics import METRICS
from nanorunner.bench.records import Record
from nanorunner.bench.result_files import Found
from nanorunner.bench.tables import CHIEF_METRICS, cells

if TYPE_CHECKING:  # drawing.py needs matplotlib, which this file does not
    from nanorunner.bench.drawing import Drawing

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CSS = """
body { font: 18px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 2.2rem; } h2 { font-size: 1.6rem; margin-top: 2.5rem; }
figure { margin: 0 0 2rem; } img { width: 100%; height: auto; } figcaption { color: #444; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 16px; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: right; }
th { background: #f2f2f2; } th:first-child, td:first-child,
.words th, .words td { text-align: left; }
pre { background: #f2f2f2; padding: .7rem; overflow-x: auto; font-size: 14px; }
"""

Limited = dict[int, float]  # id(record) -> output tokens/s that the machine's limit allows


def report_html(
    title: str,
    found: Found,
    drawings: Sequence[Drawing],
    not_drawn: Mapping[str, str],
    limited: Limited,
) -> str:
    """Return the report as one HTML text."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        _machines(found.records),
        *map(_figure, drawings),
        "<h2>All points</h2>",
        _points(found.records, limited),
        "<h2>What the figures mean</h2>",
        _definitions(found.records),
        *_leftovers(found, not_drawn),
        "<h2>Commands</h2>",
        f"<pre>{escape(chr(10).join(_commands(found.records)))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _machines(records: Sequence[Record]) -> str:
    """Return a line for each machine and commit that measured something here."""
    lines: dict[str, None] = {}
    for record in records:
        machine = record.machine
        gpus = machine.get("gpus") or []
        device = f"{len(gpus)} x {gpus[0]}" if gpus else str(machine.get("cpu", "CPU"))
        versions = {**machine, **machine.get("versions", {})}
        named = ("python", "torch", "triton", "flash-attn", "cuda")
        words = ", ".join(f"{name} {versions[name]}" for name in named if versions.get(name))
        lines[f"{device}; {words}; commit {record.commit}"] = None
    return "<p>" + "<br>".join(map(escape, lines)) + "</p>"


def _figure(drawing: Drawing) -> str:
    data = base64.b64encode(drawing.png).decode("ascii")
    return (
        f"<h2>{escape(drawing.title)}</h2><figure>"
        f'<img alt="{escape(drawing.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
    )


def _points(records: Sequence[Record], limited: Limited) -> str:
    table = cells(records)
    if limited:
        table[0].append("share of limit")
        for row, record in zip(table[1:], records, strict=True):
            limit = limited.get(id(record))
            rate = record.metrics.get("output_tokens_per_s")
            row.append("-" if limit is None or rate is None else f"{rate.median / limit:.0%}")
    return _table(table)


def _table(table: Sequence[Sequence[str]], kind: str = "figures") -> str:
    header, *rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def _definitions(records: Sequence[Record]) -> str:
    shown = [name for name in CHIEF_METRICS if any(name in record.metrics for record in records)]
    table = [["metric", "unit", "definition"]]
    table += [[name, METRICS[name].unit, METRICS[name].definition] for name in shown]
    return _table(table, "words") + "<p>Figures are medians of all repeats of a point.</p>"


def _leftovers(found: Found, not_drawn: Mapping[str, str]) -> list[str]:
    """Return what a reader would miss: failed runs, skipped files, figures without data."""
    parts = []
    if found.failures:
        parts.append(f"<h2>{len(found.failures)} failed run(s)</h2>")
        parts += [f"<pre>{escape(_failure(row))}</pre>" for row in found.failures]
    for title, reasons in (("Skipped files", found.skipped), ("Not drawn", not_drawn)):
        if reasons:
            items = "".join(f"<li>{escape(n)}: {escape(why)}</li>" for n, why in reasons.items())
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return parts


def _failure(row: Mapping[str, Any]) -> str:
    lines = [str(row["command"]), json.dumps(row["settings"]), *map(str, row["error"])]
    return "\n".join(lines)


def _commands(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.command for record in records if record.command))
