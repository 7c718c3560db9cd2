"""A measuring program for tests of `bench sweep`: quick, or wrong in one of the ways a real one is.

python sweep_stub.py --value 3 [--mode fail | hang | silent | nan | empty] [--pids DIR] --out FILE

In DIR it leaves an empty file for itself and each child, named by the process; with --hang-as 2 the
second process to do so hangs, whatever its mode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def result(value: float, batch: int = 1) -> dict[str, Any]:
    """Return a result as the measuring commands write it, with one metric."""
    unit = "tokens/s"
    summary = {"median": value, "min": value, "max": value, "unit": unit}
    lengths = {"min": 8, "max": 8}
    return {
        "kind": "latency",
        "command": "stub",
        "time": "2026-01-01T00:00:00+00:00",
        "commit": "abc",
        "machine": {"gpus": [], "cpu": "stub", "versions": {}},
        "config": {"model": "tiny-qwen3", "tp": 1, "runner": "v2", "max_num_seqs": 8},
        "workload": {
            "name": "batch",
            "requests": batch,
            "input_len": lengths,
            "output_len": lengths,
            "arrivals": {"kind": "all"},
        },
        "repeats": [{"output_tokens_per_s": value}],
        "metrics": {"output_tokens_per_s": summary},
        "counters": {},
    }


def main() -> None:
    """Do what --mode says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--value", type=float, default=1.0)
    parser.add_argument("--mode", default="good")
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--hang-as", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pids = [os.getpid()]
    if args.mode == "hang":
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    if args.pids is not None:
        for pid in pids:
            (args.pids / str(pid)).touch()
    is_its_turn = args.hang_as > 0 and len(list(args.pids.iterdir())) == args.hang_as
    time.sleep(600 if args.mode == "hang" or is_its_turn else 0)
    if args.mode == "fail":
        print("a first line\nValueError: planted", file=sys.stderr)
        sys.exit(3)
    if args.mode != "silent":
        value = float("nan") if args.mode == "nan" else args.value
        args.out.write_text(json.dumps({} if args.mode == "empty" else result(value)))


if __name__ == "__main__":
    main()
