"""Is a forward that became slower found? Plant a slow-down, look with the project's own tools.

    python scripts/find_slow_down.py --share 0.2 --model qwen3-0.6b \
        --load-format dummy --skip-tokenizer-init --workload b64 --temperature 0.6

    plain      bench throughput --step-times: how long the forward takes
    compare    that command against itself with a delay of `share` of it inside the forward, in
               fresh processes by turns, as `bench compare` does

Found means two things: the step breakdown has the forward, and no other part, longer by about the
delay, and the comparison's verdict on the throughput is "worse". The exit code is 1 otherwise. The
delay is a kernel on a GPU (a part of the captured graph) and a busy wait on a CPU. One rank only:
the delay would not be in the other ranks' processes.
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
from nanorunner.bench.cli import parser_of
from nanorunner.bench.compare import conclude, measure
from nanorunner.bench.measuring_flags import count_above_0, number_above_0
from nanorunner.bench.sides import Side
from nanorunner.bench.verdicts import MIN_ROUNDS_OF_A_VERDICT
from nanorunner.config import Config, make_config
from nanorunner.flags import engine_settings
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.state_tables import InputBuffers
from nanorunner.workers.step_body import StepBody

STAGE = "forward"  # StepBody._forward, as the step breakdown names it
PLAIN, SLOW = "v2", "v2, slower"
TIMEOUT_S = 300.0  # of one process
NEAR = 0.5  # the part grew by the delay, give or take this share of it
CALIBRATION_CYCLES = 20_000_000  # about ten milliseconds
SLOWED = "--slowed"  # what this script calls itself with


def delay_on(device: str, us: float) -> Callable[[], None]:
    """Return what delays a forward by so many microseconds: a kernel on a GPU, else a busy wait."""
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


def config_of(flags: list[str]) -> Config:
    """Return what flags of `bench throughput` ask of the engine.

    Raises ValueError for what no engine can be; an unknown flag ends the process with 2.
    """
    return make_config(engine_settings(parser_of("throughput").parse(flags)))


def device_of(flags: list[str]) -> str:
    """Return where a command with these flags runs: cpu or cuda."""
    device = config_of(flags).device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def serve_slowed(us: float, flags: list[str]) -> int:
    """Run `bench throughput` in this process with a slower forward; return its exit code."""
    delay, forward = delay_on(device_of(flags), us), StepBody._forward

    def slowed(self: StepBody, buffers: InputBuffers, batch: AttentionBatch) -> torch.Tensor:
        hidden = forward(self, buffers, batch)
        delay()
        return hidden

    StepBody._forward = slowed  # type: ignore[method-assign]
    return bench(["throughput", *flags])


def forward_us(result: dict[str, Any]) -> float:
    """Return the median time of a step's forward."""
    median: float = result["steps"]["parts"][STAGE]["median_us"]
    return median


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


def main(argv: list[str]) -> int:
    """Plant, look, print what was found and return the exit code."""
    parser = argparse.ArgumentParser(prog="find_slow_down", description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=number_above_0, default=0.2, help="of the forward's time")
    parser.add_argument("--rounds", type=count_above_0, default=MIN_ROUNDS_OF_A_VERDICT)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args, flags = parser.parse_known_args(argv)
    if args.rounds < MIN_ROUNDS_OF_A_VERDICT:
        parser.error(f"--rounds {args.rounds}: a verdict needs {MIN_ROUNDS_OF_A_VERDICT}")
    flags = ["--runner", "v2", "--step-times", "--quiet", "--keep-ids", *flags]
    try:
        tp = config_of(flags).tp
    except ValueError as error:
        parser.error(str(error))
    if tp > 1:
        parser.error(f"--tp {tp}: only rank 0 would be slower; use 1")
    sides = [Side(label=label, name="v2", own={}) for label in (PLAIN, SLOW)]
    delay_us = 0.0

    def command(side: Side, out: Path) -> list[str]:
        ending = [*flags, "--out", str(out)]
        if side.label == PLAIN:
            return ["python", "-m", "nanorunner", "bench", "throughput", *ending]
        return ["python", __file__, SLOWED, str(delay_us), *ending]

    first = measure(sides[:1], command, 1, TIMEOUT_S)[PLAIN]
    if first.problem:
        print(f"find_slow_down: {first.problem}", file=sys.stderr)
        return 1
    delay_us = args.share * forward_us(first.results[0])
    compared = conclude(sides, measure(sides, command, args.rounds, TIMEOUT_S), {}, 0.0)
    if compared["problems"]:
        print("find_slow_down:", *compared["problems"], sep="\n  ", file=sys.stderr)
        return 1
    plain, slow = (side["result"] for side in compared["sides"])
    throughput = compared["ratios"][SLOW]["output_tokens_per_s"]
    found = {
        "benchmark": "find slow-down",
        "stage": STAGE,
        "share": args.share,
        "delay_us": round(delay_us, 1),
        "stage_us": [forward_us(result) for result in (plain, slow)],
        "parts_that_grew": grown_parts(plain, slow, delay_us),
        "throughput": throughput,
        "rounds": args.rounds,
        "command": " ".join(["python", *sys.argv]),
        "machine": plain["machine"],
        "commit": plain["commit"],
    }
    # on a GPU the forward is timed on the device; its launch by the CPU is another part
    found["good"] = set(found["parts_that_grew"]) == {STAGE} and (throughput["verdict"] == "worse")
    for name, value in found.items():
        print(f"{name:<16} {value}")
    text = json.dumps(found)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if found["good"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [SLOWED]:
        sys.exit(serve_slowed(float(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
