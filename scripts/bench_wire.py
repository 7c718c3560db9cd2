"""Measure the wire: round trips while stepping and after idle, and calls per second.

    python scripts/bench_wire.py [--tp 2] [--calls 20000] [--json results.json]

A round trip is: rank 0 writes a call, every other rank copies it out and unpickles it, rank 0 sees
all acks. The table comes first; the last line of stdout is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanorunner.workers.channel import SEGMENT_BYTES, Channel, spin_time_s

METHODS = frozenset({"step", "close"})
STEADY_STEP = (12345, b"", (), (), None, b"")  # StepInput of a decode step that changes nothing
IDLE_S = 0.05  # longer than any reader spins
WARM_UP = 200


def main() -> None:
    """Run every measurement and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    memory = memoryview(mmap.mmap(-1, SEGMENT_BYTES))
    channel = Channel(memory, 0, options.tp, METHODS)
    children = [start_reader(memory, rank, options.tp) for rank in range(1, options.tp)]
    wide = (*STEADY_STEP[:4], os.urandom(8 * 256), os.urandom(4 * 256))  # 256 requests, v1
    results = {
        "stepping": measure(channel, options.tp, options.calls, STEADY_STEP, pause_s=0.0),
        "stepping, 3 kB": measure(channel, options.tp, options.calls, wide, pause_s=0.0),
        "every 0.5 ms": measure(channel, options.tp, 2000, STEADY_STEP, pause_s=0.0005),
        "after idle": measure(channel, options.tp, 100, STEADY_STEP, pause_s=IDLE_S),
    }
    calls_per_s = stream(channel, options.tp, options.calls)
    channel.write_shm("close")
    for pid in children:
        os.waitpid(pid, 0)

    print(f"tp {options.tp}, {len(os.sched_getaffinity(0))} cores; round trips in us")
    print(f"{'':16}{'median':>9}{'p10':>9}{'p90':>9}{'p99':>9}{'calls':>9}")
    for name, row in results.items():
        print(
            f"{name:16}" + "".join(f"{row[key]:9.1f}" for key in ("p50", "p10", "p90", "p99")),
            end="",
        )
        print(f"{row['calls']:9.0f}")
    print(f"one way, rank 0 running ahead: {calls_per_s:,.0f} calls/s")
    report = {
        "bench": "wire",
        "tp": options.tp,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "round_trip_us": results,
        "calls_per_s": calls_per_s,
        "command": " ".join(sys.argv),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def start_reader(memory: memoryview, rank: int, tp: int) -> int:
    """Fork a process that reads calls until `close`; return its pid."""
    pid = os.fork()
    if pid == 0:
        channel = Channel(memory, rank, tp, METHODS, spin_time_s(tp))
        while channel.read_shm(timeout_s=60.0).method != "close":
            pass
        os._exit(0)
    return pid


def measure(
    channel: Channel, tp: int, num_calls: int, wire: tuple[object, ...], pause_s: float
) -> dict[str, float]:
    """Return the percentiles of num_calls round trips, in us, with pause_s between them."""
    times = []
    for _ in range(num_calls + WARM_UP * (pause_s == 0.0)):
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        frame = channel.write_shm("step", wire)
        wait_for_acks(channel, tp, frame)
        times.append((time.perf_counter() - start) * 1e6)
    cuts = statistics.quantiles(times[-num_calls:], n=100)
    return {"p50": cuts[49], "p10": cuts[9], "p90": cuts[89], "p99": cuts[98], "calls": num_calls}


def stream(channel: Channel, tp: int, num_calls: int) -> float:
    """Return how many calls a second pass when rank 0 waits for room alone."""
    start = time.perf_counter()
    for _ in range(num_calls):
        frame = channel.write_shm("step", STEADY_STEP)
    wait_for_acks(channel, tp, frame)
    return num_calls / (time.perf_counter() - start)


def wait_for_acks(channel: Channel, tp: int, frame: int) -> None:
    """Spin until every rank has copied the frame out; at most 10 s."""
    acked: Callable[[int], int] = channel.acked
    deadline = time.monotonic() + 10.0
    while any(acked(rank) < frame for rank in range(1, tp)):
        os.sched_yield()  # the reader may need this core
        if time.monotonic() > deadline:
            raise TimeoutError(f"no ack of frame {frame} in 10 s")


if __name__ == "__main__":
    main()
