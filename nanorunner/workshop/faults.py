"""The fault lab: break a rank on purpose, and see what is said, how soon, and what is left.

Without a name it lists the faults. All run on the CPU, each in seconds. Where no model is needed
the ranks have none: launcher, wire, loop and watcher are the real ones. --full takes the toy model
there, too.

    nanorunner faults
    nanorunner faults kill-idle
    nanorunner faults all
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NamedTuple

from nanorunner.did_you_mean import did_you_mean
from nanorunner.errors import RankDied
from nanorunner.exit_codes import OK, REQUEST_FAILED
from nanorunner.workshop import fault_model, fault_processes, fault_wire
from nanorunner.workshop.fault_lab import Lab
from nanorunner.workshop.fault_report import FaultReport


class Fault(NamedTuple):
    """One fault of the lab."""

    about: str
    must: str  # what must be seen
    play: Callable[[Lab], None]


FAULTS = {
    "kill-idle": Fault(
        "SIGKILL rank 1 between two calls",
        "RankDied names the rank and the signal; no hang",
        fault_processes.kill_idle,
    ),
    "kill-busy": Fault(
        "SIGKILL rank 1 inside an all-reduce",
        "the same, out of the all-reduce that rank 0 waits in",
        fault_model.kill_busy,
    ),
    "stop": Fault(
        "SIGSTOP rank 1, later SIGCONT",
        "a warning that names it; then the call goes on",
        fault_processes.stop,
    ),
    "slow": Fault(
        "rank 1 sleeps 50 ms before each ack",
        "no error; every step takes 50 ms and more, as predicted",
        fault_model.slow,
    ),
    "too-big": Fault(
        "a call of 8 MiB over 1 MiB of shared memory",
        "it arrives whole, in fragments",
        fault_wire.too_big,
    ),
    "skip": Fault(
        "rank 1's frame counter is one ahead",
        "the wire names the frame that came and the one that should have",
        fault_wire.skip,
    ),
    "bad-shard": Fault(
        "two KV heads swapped on rank 1",
        "no error; tp 1 and tp 2 differ, and checksums name the layer",
        fault_model.bad_shard,
    ),
    "oom": Fault(
        "rank 1 raises MemoryError in a call",
        "RankDied with rank 1's own traceback, frame and method",
        fault_processes.oom,
    ),
    "orphan": Fault(
        "SIGKILL rank 0",
        "every other rank leaves by itself",
        fault_processes.orphan,
    ),
    "leftover": Fault(
        "a segment's name that a crash has left",
        "doctor reports it, the next start removes it",
        fault_processes.leftover,
    ),
    "no-ack": Fault(
        "a wire on which rank 0 does not wait for acks",
        "calls are lost and torn; with every ack none is",
        fault_wire.no_ack,
    ),
}
ALL = "all"


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to play, or all")
    parser.add_argument("--full", action="store_true", help="the toy model for every fault")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each fault")


def run(arguments: Namespace) -> int:
    """Play the faults; 1 when one of them was not as it must be."""
    names = list(FAULTS) if arguments.names == [ALL] else arguments.names
    for name in names:
        if name not in FAULTS:
            raise ValueError(f"unknown fault {name!r}; {did_you_mean(name, [*FAULTS, ALL])}")
    if not names:
        print("\n".join(_overview()))
        return OK
    reports = [play(name, is_full=arguments.full, as_json=arguments.json) for name in names]
    wrong = [report.name for report in reports if report.wrong]
    if len(reports) > 1 and not arguments.json:
        print(f"{len(reports) - len(wrong)} of {len(reports)} as they must be{_list(wrong)}")
    return REQUEST_FAILED if wrong else OK


def play(name: str, *, is_full: bool = False, as_json: bool = False) -> FaultReport:
    """Play one fault, tell it, and return its report."""
    fault = FAULTS[name]
    start = time.monotonic()
    if as_json:
        report = FaultReport(name, say=lambda text: None)
    else:
        print(f"{name}: {fault.about}\n  must  {fault.must}", flush=True)
        report = FaultReport(name)
    try:
        with Lab(report, is_full=is_full) as lab:
            fault.play(lab)
    except (TimeoutError, RankDied) as error:
        report.must(False, str(error).partition("\n")[0])
    report.end(time.monotonic() - start)
    if as_json:
        print(report.as_json(), flush=True)
    return report


def _overview() -> list[str]:
    lines = ["nanorunner faults NAME, or all; each breaks something and checks what must be seen"]
    for name, fault in FAULTS.items():
        lines += [f"  {name:<10} {fault.about}", f"  {'':<10}   must: {fault.must}"]
    return lines


def _list(names: list[str]) -> str:
    return f"; not {', '.join(names)}" if names else ""
