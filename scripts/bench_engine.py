"""Measure the engine: output and input tokens per second on fixed workloads.

    python scripts/bench_engine.py --model qwen3-0.6b --tp 2 --loads b1,b8,nano --out result.json

Random weights, token ids in and out, prefix cache off, every request to its full length. A load's
seconds run from handing over its requests, all at once, to the last id of the last one; rates are
of the median repeat, input tokens over the whole time. Ids are counted as they come out. One pass
of b8 before the first load pays for what happens only once; its seconds are printed too.

The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from nanorunner import LLM, SamplingParams
from nanorunner.bench.code_version import git_commit
from nanorunner.bench.environment import package_version
from nanorunner.bench.workloads import WORKLOADS, Workload, make_workload
from nanorunner.flags import Parser

WARM_UP = "b8"
GREEDY_LOADS = ("b1",)  # one stream, as a person reads it; the others sample
POSITIONS = 4096  # of one request, unless a load is longer
FORMAT = "{:<8} {:>9} {:>9} {:>12} {:>12}  {}"


def measure(llm: LLM, workload: Workload, temperature: float, repeats: int) -> dict[str, Any]:
    """Run a workload `repeats` times and return its seconds and rates.

    Raises RuntimeError when a request ends before its full length: the rates would not compare.
    """
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length)
        for length in workload.output_lens
    ]
    seconds: list[float] = []
    num_output_tokens = 0
    before = asdict(llm.engine.stats)
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        num_output_tokens = sum(len(output.token_ids) for output in outputs)
        if num_output_tokens != sum(workload.output_lens):
            raise RuntimeError(
                f"{num_output_tokens} ids came out, {sum(workload.output_lens)} were asked for"
            )
    after = asdict(llm.engine.stats)
    median = statistics.median(seconds)
    return {
        "requests": len(prompts),
        "temperature": temperature,
        "seconds": [round(second, 4) for second in seconds],
        "input_tokens": workload.num_input_tokens,
        "output_tokens": num_output_tokens,
        "input_tokens_per_s": round(workload.num_input_tokens / median, 1),
        "output_tokens_per_s": round(num_output_tokens / median, 1),
        # of all repeats together; the peak is since the start
        "scheduler": {
            name: after[name] if name.startswith("peak") else after[name] - before[name]
            for name in after
        },
    }


def describe_machine() -> dict[str, Any]:
    """Return what a reader must know to repeat a measurement."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "machine": platform.platform(),
        **{name: package_version(name) for name in ("nanorunner", "torch", "triton", "flash-attn")},
        "commit": git_commit(),
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this script's flags."""
    parser = Parser(prog="bench_engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset, or a folder's shape")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--runner", default="v2", choices=["v1", "v2"])
    parser.add_argument("--loads", default="b1,b8,b64,b256,nano", help=", ".join(WORKLOADS))
    parser.add_argument("--temperature", type=float, default=0.6, help="b1 is greedy always")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--no-warm-up", action="store_true", help="skip the pass of b8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--max-model-len", type=int, help="default: 4096, or the longest load's")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--enforce-eager", action="store_true")
    return parser


def start_engine(args: argparse.Namespace, names: list[str]) -> LLM:
    """Return the engine that the flags ask for, long enough for every load."""
    lengths = [len(p) + n for name in names for p, n in zip(*make_workload(name, 2), strict=True)]
    return LLM(
        args.model,
        tp=args.tp,
        load_format="dummy",
        skip_tokenizer_init=True,
        prefix_cache=False,
        max_num_seqs=256,
        max_model_len=args.max_model_len or max(POSITIONS, *lengths),
        max_num_batched_tokens=args.max_num_batched_tokens,
        device=args.device,
        dtype=args.dtype,
        attention_backend=args.attention_backend,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        runner=args.runner,
    )


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Start the engine, run every load, print the table and return the result."""
    names = args.loads.split(",")
    start = time.perf_counter()
    with start_engine(args, names) as llm:
        startup_s = time.perf_counter() - start
        vocab_size = llm.resolved.runner_config.model.vocab_size
        warm_up_s = 0.0
        if not args.no_warm_up:
            warm_up = measure(llm, make_workload(WARM_UP, vocab_size), args.temperature, 1)
            warm_up_s = warm_up["seconds"][0]
        result: dict[str, Any] = {
            "engine": "nanorunner",
            "model": args.model,
            "tp": args.tp,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "scripts/bench_engine.py", *argv]),
            "startup_s": round(startup_s, 2),
            "warm_up_s": round(warm_up_s, 2),
            "versions": describe_machine(),
            "config": asdict(llm.resolved.config),
            "loads": {},
        }
        print(f"{args.model} tp {args.tp}: start-up {startup_s:.1f} s, warm-up {warm_up_s:.1f} s")
        print(FORMAT.format("load", "in", "out", "in tok/s", "out tok/s", "seconds"), flush=True)
        for name in names:
            temperature = 0.0 if name in GREEDY_LOADS else args.temperature
            row = measure(llm, make_workload(name, vocab_size), temperature, args.repeats)
            result["loads"][name] = row
            print_row(name, row)
            write(result, args.out)  # after each load: an end half-way keeps what is measured
    return result


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print one load's line of the table."""
    rates = (f"{row[f'{side}_tokens_per_s']:,.0f}" for side in ("input", "output"))
    seconds = " ".join(f"{second:.3f}" for second in row["seconds"])
    line = FORMAT.format(name, row["input_tokens"], row["output_tokens"], *rates, seconds)
    print(line, flush=True)


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the result so far to --out, if that was given."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        for name in args.loads.split(","):
            make_workload(name, 2)
        if args.repeats < 1:
            raise ValueError(f"repeats {args.repeats}: use 1 or more")
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
