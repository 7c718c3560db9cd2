"""`nanorunner bench plot DIR`: figures and one HTML report of the results in a folder.

    DIR/rows.jsonl, DIR/*.json -> result_files.py -> figures.py -> DIR/*.png, DIR/report.html

The report holds its images and needs no network. What could not be read or drawn is named, on
stderr and in the report. matplotlib comes with the extra [bench].
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nanorunner.bench.bounds import Limits, limits_of
from nanorunner.bench.records import Record
from nanorunner.bench.report import Limited, report_html
from nanorunner.bench.result import check_writable
from nanorunner.bench.result_files import Found, read_folder
from nanorunner.bench.tables import points_table
from nanorunner.exit_codes import OK, REFUSED

REPORT_NAME = "report.html"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where results are, and plots go")
    parser.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="memory bandwidth of one device, for the physical limit (known for H200)",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="TFLOP/S",
        help="matrix products of one device, for the same (known for H200, 16-bit)",
    )


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Draw all that the folder holds and return the exit code."""
    try:
        _check_limits(args)
        found = read_folder(args.folder)
        if not found.records:
            raise ValueError(f"{args.folder}: no result in it{_skipped_words(found)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("plot needs matplotlib; pip install 'nanorunner[bench]'")
        check_writable(args.folder / REPORT_NAME)
    except (ValueError, OSError) as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return REFUSED
    for name, reason in found.skipped.items():
        print(f"nanorunner: skipped {name}: {reason}", file=sys.stderr)
    # imported here: they need matplotlib
    from nanorunner.bench.figures import draw_all, limit_tokens_per_s

    def limits_of_record(record: Record) -> Limits | None:
        if record.model is None or record.shape is None:
            return None
        dtype = record.settings["dtype"]
        return limits_of(record.device, dtype, args.bandwidth, args.tflops)

    drawings, not_drawn = draw_all(found.records, limits_of_record)
    limited: Limited = {}
    for record in found.records:
        if (limits := limits_of_record(record)) is not None:
            limited[id(record)] = limit_tokens_per_s(record, limits)
    for drawing in drawings:
        (args.folder / f"{drawing.name}.png").write_bytes(drawing.png)
    report = args.folder / REPORT_NAME
    title = f"Benchmarks: {args.folder.resolve().name}"
    report.write_text(report_html(title, found, drawings, not_drawn, limited), encoding="utf-8")
    print(points_table(found.records))
    print(
        json.dumps(
            {
                "kind": "plot",
                "report": str(report),
                "figures": [f"{drawing.name}.png" for drawing in drawings],
                "points": len(found.records),
                "failed_runs": len(found.failures),
                "skipped": found.skipped,
                "not_drawn": not_drawn,
            }
        )
    )
    return OK


def _check_limits(args: argparse.Namespace) -> None:
    for flag in ("bandwidth", "tflops"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise ValueError(f"--{flag} {value}: use a number above 0")


def _skipped_words(found: Found) -> str:
    words = "".join(f"; {name} {reason}" for name, reason in found.skipped.items())
    return words + (f"; {len(found.failures)} run(s) failed" if found.failures else "")
