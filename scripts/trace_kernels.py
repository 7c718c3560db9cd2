"""Time the kernels of steady steps on this GPU, one by one: where a step's time goes.

    python scripts/trace_kernels.py --model qwen3-8b --tp 2 --requests 8,64 [--ragged] [--chunk 512]

Random weights of a preset's shapes. So many requests of --input-len ids (--ragged: of a third to
twice as many) decode; after 200 steps torch.profiler records --steps of them on rank 0. With
--chunk a prompt of so many ids arrives in each recorded step, which is then a mixed one. Printed:
how long no kernel ran, and the longest such gaps; for each kernel its microseconds a step, launches
a step and microseconds a launch; then some kernels in their order, each with the gap to the end of
the one before, which is negative where they overlap. Times of overlapping kernels include their
waiting, so they add up to more than the step.

The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner import LLM, SamplingParams
from nanorunner.bench.measuring_flags import count_above_0, counts_above_0
from nanorunner.flags import Parser

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

WARM_STEPS = 200
MAX_STEPS = 64
SHOWN_KERNELS, SHOWN_LAUNCHES, SHOWN_GAPS = 20, 24, 8
LARGEST_ID = 10_000
MAX_MODEL_LEN = 4096
MAX_PROMPT_LEN = 3072  # so that every request has room for the steps before and in the recording


class Launch(NamedTuple):
    """One kernel, in microseconds of the profiler's clock."""

    name: str
    begin_us: float
    end_us: float


def lengths_of(num_reqs: int, input_len: int, *, is_ragged: bool) -> list[int]:
    """Return the prompts' lengths, the same ones on every call."""
    draw = random.Random(num_reqs)
    if not is_ragged:
        return [input_len] * num_reqs
    return [draw.randint(max(input_len // 3, 1), 2 * input_len) for _ in range(num_reqs)]


def add(llm: LLM, length: int, max_tokens: int) -> None:
    """Queue a request that runs to its full length."""
    ids = [(17 * length + place) % LARGEST_ID for place in range(length)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
    llm.engine.add_request(ids, params)


def record(llm: LLM, lengths: Sequence[int], num_steps: int, chunk: int) -> list[Launch]:
    """Let requests decode, and return the kernels of num_steps steps; no request is left."""
    engine = llm.engine
    for length in lengths:
        add(llm, length, WARM_STEPS + 2 * num_steps + len(lengths))
    for _ in range(WARM_STEPS):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            if chunk:
                add(llm, chunk, 1)
            engine.step()
        torch.cuda.synchronize()
    engine.abort_all()
    while engine.has_unfinished():
        engine.step()
    events = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    launches = [Launch(e.name, e.time_range.start, e.time_range.end) for e in events]
    return sorted(launches, key=lambda launch: launch.begin_us)


def summarise(launches: Sequence[Launch], num_steps: int) -> dict[str, Any]:
    """Return a step's length and each kernel's part of it, the largest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for launch in launches:
        times[launch.name].append(launch.end_us - launch.begin_us)
    kernels = [
        {
            "name": name,
            "us_a_step": round(sum(own) / num_steps, 1),
            "launches_a_step": round(len(own) / num_steps, 2),
            "us_a_launch": round(sum(own) / len(own), 2),
        }
        for name, own in times.items()
    ]
    span_us = max(each.end_us for each in launches) - launches[0].begin_us if launches else 0.0
    gaps = idle_gaps(launches)
    return {
        "us_a_step": round(span_us / num_steps, 1),
        "idle_us_a_step": round(sum(gap_us for gap_us, _ in gaps) / num_steps, 1),
        "largest_gaps": gaps[:SHOWN_GAPS],
        "kernels": sorted(kernels, key=lambda kernel: -float(kernel["us_a_step"])),
    }


def idle_gaps(launches: Sequence[Launch]) -> list[tuple[float, str]]:
    """Return each time in which no kernel ran, us, and the kernel that ended it, longest first."""
    gaps, busy_until_us = [], launches[0].begin_us if launches else 0.0
    for launch in launches:
        if launch.begin_us > busy_until_us:
            gaps.append((round(launch.begin_us - busy_until_us, 2), launch.name))
        busy_until_us = max(busy_until_us, launch.end_us)
    return sorted(gaps, reverse=True)


def in_order(launches: Sequence[Launch]) -> list[tuple[float, float, str]]:
    """Return some launches from the middle: gap to the one before, duration, name."""
    middle = max(len(launches) // 2, 1)
    pairs = zip(launches[middle - 1 :], launches[middle:], strict=False)
    return [
        (
            round(each.begin_us - before.end_us, 2),
            round(each.end_us - each.begin_us, 2),
            each.name,
        )
        for before, each in list(pairs)[:SHOWN_LAUNCHES]
    ]


def report(num_reqs: int, found: dict[str, Any]) -> None:
    """Print one case."""
    idle_us = found["idle_us_a_step"]
    print(
        f"{num_reqs} requests: {found['us_a_step']:,.0f} us a step, {idle_us:,.0f} idle", flush=True
    )
    for gap_us, name in found["largest_gaps"]:
        print(f"{gap_us:>11,.1f} us without a kernel, until {name[:80]}")
    print("  us a step  launches  us each")
    for kernel in found["kernels"][:SHOWN_KERNELS]:
        numbers = f"{kernel['us_a_step']:>11,.1f} {kernel['launches_a_step']:>9} "
        print(f"{numbers}{kernel['us_a_launch']:>8}  {kernel['name'][:90]}")
    print("     gap        us, in order")
    for gap_us, us, name in found["in_order"]:
        print(f"{gap_us:>+8.2f} {us:>9.2f}  {name[:90]}")


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="trace_kernels.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset, or a folder's shape")
    parser.add_argument("--tp", type=count_above_0, default=1)
    parser.add_argument("--runner", default="v2", choices=["v1", "v2"])
    parser.add_argument("--requests", type=counts_above_0, default=[8, 64, 256], help="a case each")
    parser.add_argument("--input-len", type=count_above_0, default=512, help="ids of a prompt")
    parser.add_argument("--ragged", action="store_true", help="prompts of many lengths")
    parser.add_argument("--chunk", type=count_above_0, help="ids of a prompt that joins each step")
    parser.add_argument("--steps", type=count_above_0, default=8, help="to record")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args: argparse.Namespace = parser.parse_args(argv)
    if args.steps > MAX_STEPS:
        parser.error(f"--steps {args.steps}: use at most {MAX_STEPS}")
    longest = 2 * args.input_len if args.ragged else args.input_len
    for words, length in ((f"--input-len {args.input_len}", longest), ("--chunk", args.chunk or 0)):
        if length > MAX_PROMPT_LEN:
            parser.error(f"{words}: prompts of {length} ids; use at most {MAX_PROMPT_LEN}")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here; these are measurements of one")
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/trace_kernels.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "cases": [],
    }
    with LLM(
        args.model,
        tp=args.tp,
        runner=args.runner,
        load_format="dummy",
        skip_tokenizer_init=True,
        prefix_cache=False,
        max_num_seqs=max(args.requests) + MAX_STEPS,
        max_model_len=MAX_MODEL_LEN,
    ) as llm:
        for num_reqs in args.requests:
            lengths = lengths_of(num_reqs, args.input_len, is_ragged=args.ragged)
            launches = record(llm, lengths, args.steps, args.chunk or 0)
            found = summarise(launches, args.steps) | {"in_order": in_order(launches)}
            report(num_reqs, found)
            result["cases"].append({"requests": num_reqs, "lengths": lengths, **found})
            write(result, args.out)
    print(json.dumps(result, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
