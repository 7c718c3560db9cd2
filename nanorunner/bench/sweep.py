"""`nanorunner bench sweep SPEC --out DIR`: measure every point of a spec, each in a fresh process.

    points.py  SPEC -> runs, shuffled        fresh_process.py  one run, with a time limit
    journal.py DIR/rows.jsonl, a row a run   DIR/logs/KEY.log  what its process printed

A row is written when its run has ended, good or not: a failed point is a row with its error, and
the sweep goes on. --resume skips the good rows that are there and runs failed ones again. A row's
key holds command, settings, repeat, commit, a hash of the source, devices and the versions of torch
and triton, so that changed code, or another machine's figures, never pass for measured here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from nanorunner.bench.cli import MEASURING, module_of
from nanorunner.bench.code_version import code_version
from nanorunner.bench.environment import Environment, changes, environment
from nanorunner.bench.fresh_process import Outcome, run_fresh
from nanorunner.bench.journal import Journal, Row, latest
from nanorunner.bench.measuring_flags import check_several_processes
from nanorunner.bench.points import (
    Run,
    Sweep,
    find_spec,
    read_sweep,
    ready_sweeps,
    runs_of,
)
from nanorunner.bench.progress import Progress
from nanorunner.bench.result_files import NOT_A_RESULT, read_result, reason, records_of
from nanorunner.bench.tables import points_table
from nanorunner.config import make_config
from nanorunner.did_you_mean import did_you_mean
from nanorunner.exit_codes import OK, REFUSED, REQUEST_FAILED
from nanorunner.flags import Parser, engine_settings

MAX_ERROR_LINES = 12  # of a failed run's log, kept in its row

# The measuring command has these too, but they measure nothing; --out is the sweep's to give.
NO_SETTINGS = ("--help", "--definitions", "--out")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "spec", metavar="SPEC", help=f"a YAML file, or one of: {', '.join(ready_sweeps())}"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where rows go")
    parser.add_argument(
        "--dry-run", action="store_true", help="print every command and their number; run nothing"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on in DIR: run what has no good row yet"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="pin a setting, or vary it with NAME=[VALUE, VALUE]; repeat for several",
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="processes a point, for the spec's")
    parser.add_argument("--timeout", type=float, metavar="S", help="of one process, for the spec's")
    parser.add_argument("--seed", type=int, metavar="N", help="of the order, for the spec's")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the sweep and return the exit code: 1 when a point failed, 2 when nothing was run."""
    try:
        sweep = _with_flags(read_sweep(find_spec(args.spec), args.set), args)
        try:
            known = check_points(sweep)
        except ValueError as error:
            raise ValueError(f"sweep {sweep.name}: {error}") from None
        origin = {"code": code_version(), **environment()}
        runs = runs_of(sweep, json.dumps(origin), known)
        if args.dry_run:
            return _dry_run(sweep, runs, args.out)
        journal = Journal(args.out)
    except BrokenPipeError:
        raise  # the reader of stdout has left: cli.py's to handle
    except BlockingIOError:
        return _refuse(f"{args.out}: another sweep is writing there; give another folder")
    except (ValueError, OSError) as error:
        return _refuse(str(error))
    with journal:
        if journal.rows and not args.resume:
            return _refuse(
                f"{args.out} holds {len(journal.rows)} row(s) already; add --resume to go on "
                f"with them, or give a new folder"
            )
        try:
            return _run_all(sweep, runs, journal, args.out, origin)
        except OSError as error:  # a full disk: each row before is whole
            _say(f"{error}; the rows so far are in {journal.path}")
            return REQUEST_FAILED


def check_points(sweep: Sweep) -> list[str] | None:
    """Return the command's long flags, having parsed every point with them; None for a program.

    Raises ValueError, naming the point, for settings that the command would refuse.
    """
    if sweep.program:
        return None
    if sweep.command not in MEASURING:
        raise ValueError(f"command {sweep.command!r}; {did_you_mean(sweep.command, MEASURING)}")
    parser = _Checker(prog=sweep.command)
    module_of(sweep.command).add_flags(parser)
    flags = [flag for flag in parser.long_flags() if flag not in NO_SETTINGS]
    for run in runs_of(replace(sweep, repeat=1), "", flags):
        try:
            config = make_config(engine_settings(parser.parse([*run.flags])))
            check_several_processes(config, sweep.command)
        except ValueError as error:
            point = {name: run.settings[name] for name in sweep.varied if name in run.settings}
            raise ValueError(f"point {point or run.settings}: {error}") from None
    return flags


class _Checker(Parser):
    """The measuring command's parser; it refuses by ValueError instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _with_flags(sweep: Sweep, args: argparse.Namespace) -> Sweep:
    given = {"repeat": args.repeat, "timeout_s": args.timeout, "seed": args.seed}
    for name, least in (("repeat", 1), ("timeout_s", 1), ("seed", 0)):
        if given[name] is not None and given[name] < least:
            raise ValueError(f"{name} {given[name]}: use {least} or more")
    return replace(sweep, **{name: value for name, value in given.items() if value is not None})


def _dry_run(sweep: Sweep, runs: Sequence[Run], folder: Path) -> int:
    for run in runs:
        print(shlex.join(_command(sweep, run, folder)))
    num_points = len(sweep.points)
    print(
        f"{sweep.name}: {num_points} point(s) x {sweep.repeat} repeat(s) = {len(runs)} processes, "
        f"at most {sweep.timeout_s:g} s each"
    )
    print(json.dumps({"kind": "dry run", "points": num_points, "processes": len(runs)}))
    return OK


def _run_all(
    sweep: Sweep, runs: Sequence[Run], journal: Journal, folder: Path, origin: Environment
) -> int:
    (folder / "logs").mkdir(exist_ok=True)
    if journal.num_torn_bytes:
        _say(f"cut a torn line of {journal.num_torn_bytes} bytes from {journal.path}")
    for line in other_origins(journal.rows, runs, origin):
        _say(line)
    good = {key for key, row in latest(journal.rows).items() if row["status"] == "ok"}
    todo = [run for run in runs if run.key not in good]
    num_there = len(runs) - len(todo)
    _say(
        f"{sweep.name}: {len(sweep.points)} points x {sweep.repeat} = {len(runs)} processes"
        + (f", {num_there} there already" if num_there else "")
    )
    start = time.monotonic()
    try:
        with Progress(len(todo), sweep.name) as progress:
            for run in todo:
                row = _measure(sweep, run, folder, progress) | {"origin": origin}
                journal.append(row)
                progress.done(row)
    except KeyboardInterrupt:
        _say(f"stopped; the rows so far are in {journal.path}, and --resume goes on after them")
        raise
    return _report(sweep, runs, journal, folder, num_there, time.monotonic() - start)


def other_origins(rows: Sequence[Row], runs: Sequence[Run], origin: Environment) -> list[str]:
    """Return a line for each other code or machine that rows of these runs are from."""
    asked = {run.key for run in runs}
    points = [run.settings for run in runs]
    counts: Counter[str] = Counter()
    for row in rows:
        if row["key"] not in asked and row.get("settings") in points:
            counts[changes(row.get("origin", {}), origin)] += 1
    del counts[""]  # repeats beyond those that are asked for
    what = "row(s) there are another origin's, and measured anew"
    return [f"{count} {what}: {change}" for change, count in counts.items()]


def _measure(sweep: Sweep, run: Run, folder: Path, progress: Progress) -> Row:
    """Return the row of one run, whatever becomes of it."""
    logs = folder / "logs"
    log, result_file = logs / f"{run.key}.log", logs / f"{run.key}.json"
    result_file.unlink(missing_ok=True)  # of a run that was killed: it is not this one's
    command = _command(sweep, run, folder)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    outcome = run_fresh(command, log, sweep.timeout_s, progress.tick)
    result, problem = _result(outcome, result_file, sweep.timeout_s)
    result_file.unlink(missing_ok=True)  # the row has it
    row: Row = {
        "key": run.key,
        "sweep": sweep.name,
        "point": run.point,
        "repeat": run.repeat,
        "settings": run.settings,
        "varied": list(sweep.varied),
        "command": shlex.join([*sweep.words, *run.flags]),  # --out is this folder's own affair
        "started": started,
        "seconds": round(outcome.seconds, 3),
        "status": "ok" if not problem else "timeout" if outcome.timed_out else "failed",
        "exit_code": outcome.exit_code,
    }
    if problem:
        return {**row, "error": [problem, *_last_lines(log)]}
    return {**row, "result": result}


def _command(sweep: Sweep, run: Run, folder: Path) -> list[str]:
    return [*sweep.words, *run.flags, "--out", str(folder / "logs" / f"{run.key}.json")]


def _result(outcome: Outcome, path: Path, timeout_s: float) -> tuple[Any, str]:
    """Return what a run wrote, and what is wrong: "" for nothing."""
    if outcome.timed_out:
        return None, f"not done after {timeout_s:g} s: killed"
    if outcome.exit_code != OK:
        return None, f"exit code {outcome.exit_code}"
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        if not read_result(result, path.name):
            raise ValueError("it holds no measurement")
    except (OSError, *NOT_A_RESULT) as error:
        return None, f"exit code 0, but no result: {reason(error)}"
    return result, ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number")


def _last_lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-MAX_ERROR_LINES:]


def _report(
    sweep: Sweep,
    runs: Sequence[Run],
    journal: Journal,
    folder: Path,
    num_there: int,
    seconds: float,
) -> int:
    """Print the table of points and, last, one line of JSON; return the exit code."""
    newest = latest(journal.rows)
    rows = [newest[run.key] for run in runs]
    failed = [row for row in rows if row["status"] != "ok"]
    print(points_table(records_of(rows)))
    for row in failed:
        print(f"failed: {row['command']}\n  " + "\n  ".join(row["error"]))
    summary = {
        "kind": "sweep",
        "name": sweep.name,
        "rows": str(journal.path),
        "points": len(sweep.points),
        "processes": len(runs),
        "ok": len(rows) - len(failed),
        "failed": len(failed),
        "there_before": num_there,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(summary))
    return REQUEST_FAILED if failed else OK


def _refuse(reason: str) -> int:
    _say(reason)
    return REFUSED


def _say(text: str) -> None:
    print(f"nanorunner: {text}", file=sys.stderr)
