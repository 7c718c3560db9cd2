"""Is a stage that became slower found? Plant a slow-down, then look with the project's own tools.

    python scripts/find_slow_down.py --stage forward --share 0.2 --model qwen3-0.6b \
        --load-format dummy --skip-tokenizer-init --workload b64 --temperature 0.6

    plain      bench throughput --step-times: how long the stage takes
    compare    that command against itself with a delay of `share` of it inside the stage, in fresh
               processes by turns, as `bench compare` does

Found means two things: the step breakdown has the stage, and no other part, longer by about the
delay, and the comparison's verdict on the throughput is "worse". The exit code is 1 otherwise. The
delay is a kernel on a GPU (a part of the captured graph) and a busy wait on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanorunner.bench.cli import main as bench
from nanorunner.bench.compare import conclude, measure
from nanorunner.bench.measuring_flags import count_above_0, number_above_0
from nanorunner.bench.sides import Side
from nanorunner.workers.sampler_v2 import SamplerV2
from nanorunner.workers.step_body import StepBody

STAGES = {"forward": (StepBody, "_forward"), "sample": (SamplerV2, "sample")}
PLAIN, SLOW = "v2", "v2, slower"
ROUNDS = 6  # what a verdict needs
TIMEOUT_S = 300.0  # of one process
NEAR = 0.5  # the part grew by the delay, give or take this share of it
CALIBRATION_CYCLES = 20_000_000  # about ten milliseconds
SLOWED = "--slowed"  # what this script calls itself with


def delay_on(device: str, us: float) -> Callable[[], None]:
    """Return what delays a stage by so many microseconds: a kernel on a GPU, else a busy wait."""
    if device == "cpu":

        def wait() -> None:
            end = time.perf_counter_ns() + us * 1e3
            while time.perf_counter_ns() < end:
                pass

        return wait
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(2):  # the first one loads the kernel
        begin.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    cycles_per_us = CALIBRATION_CYCLES / (begin.elapsed_time(end) * 1e3)
    return lambda: torch.cuda._sleep(round(us * cycles_per_us))  # type: ignore[no-untyped-call]


def serve_slowed(stage: str, us: float, argv: list[str]) -> int:
    """Run a bench command in this process with a slower stage; return its exit code."""
    owner, name = STAGES[stage]
    plain = getattr(owner, name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    delay = delay_on(argv[argv.index("--device") + 1] if "--device" in argv else device, us)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        delay()
        return result

    setattr(owner, name, slowed)
    return bench(argv)


def part_of(result: dict[str, Any], stage: str) -> dict[str, Any]:
    """Return a stage's part of a step, as the step breakdown names it."""
    part: dict[str, Any] = result["steps"]["parts"][stage]
    return part


def grown_parts(plain: dict[str, Any], slow: dict[str, Any], delay_us: float) -> dict[str, float]:
    """Return the parts that grew by more than half of the delay, and by how many microseconds.

    What waits for the GPU on the CPU grows with every GPU part; it is a wait, not a stage.
    """
    before, after = plain["steps"]["parts"], slow["steps"]["parts"]
    grown = {
        name: round(part["median_us"] - before[name]["median_us"], 1)
        for name, part in after.items()
        if name in before and not name.startswith("wait")
    }
    return {name: us for name, us in grown.items() if us > NEAR * delay_us}


def main() -> int:
    """Plant, look, print what was found and return the exit code."""
    parser = argparse.ArgumentParser(prog="find_slow_down", description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=sorted(STAGES), default="forward")
    parser.add_argument("--share", type=number_above_0, default=0.2, help="of the stage's time")
    parser.add_argument("--rounds", type=count_above_0, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args, flags = parser.parse_known_args()
    if args.rounds < ROUNDS:
        parser.error(f"--rounds {args.rounds}: a verdict needs {ROUNDS}")
    flags = ["--step-times", "--quiet", "--keep-ids", *flags]
    sides = [Side(label=label, name="v2", own={}) for label in (PLAIN, SLOW)]
    delay_us = 0.0

    def command(side: Side, out: Path) -> list[str]:
        ending = ["throughput", "--runner", "v2", *flags, "--out", str(out)]
        if side.label == PLAIN:
            return ["python", "-m", "nanorunner", "bench", *ending]
        return ["python", __file__, SLOWED, args.stage, str(delay_us), *ending]

    first = measure(sides[:1], command, 1, TIMEOUT_S)[PLAIN]
    if first.problem:
        print(f"find_slow_down: {first.problem}", file=sys.stderr)
        return 1
    delay_us = args.share * part_of(first.results[0], args.stage)["median_us"]
    compared = conclude(sides, measure(sides, command, args.rounds, TIMEOUT_S), {}, 0.0)
    if compared["problems"]:
        print("find_slow_down:", *compared["problems"], sep="\n  ", file=sys.stderr)
        return 1
    plain, slow = (side["result"] for side in compared["sides"])
    throughput = compared["ratios"][SLOW]["output_tokens_per_s"]
    found = {
        "benchmark": "find slow-down",
        "stage": args.stage,
        "share": args.share,
        "delay_us": round(delay_us, 1),
        "stage_us": [part_of(result, args.stage)["median_us"] for result in (plain, slow)],
        "parts_that_grew": grown_parts(plain, slow, delay_us),
        "throughput": throughput,
        "rounds": args.rounds,
        "command": " ".join(["python", *sys.argv]),
        "machine": plain["machine"],
        "commit": plain["commit"],
    }
    # on a GPU a stage is timed on the device; the time in which the CPU launches it is another part
    found["good"] = set(found["parts_that_grew"]) == {args.stage} and (
        throughput["verdict"] == "worse"
    )
    for name, value in found.items():
        print(f"{name:<16} {value}")
    text = json.dumps(found)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if found["good"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [SLOWED]:
        sys.exit(serve_slowed(sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
    sys.exit(main())
