"""How much of the time the GPU waits for the CPU: in a steady decode of runner v2, and in v1.

    python scripts/idle_share.py [--model qwen3-0.6b] [--num-seqs 256] [--parts idle,sleep,ratio]

idle: CUDA events stand before and after each step's graph; the share of the time between one
step's last kernel and the next one's first. Whatever lies between them (the copy of a changed
batch) counts as idle, so the figure is an upper bound.
sleep: output tokens per second of the `nano` load as it is, and with 0.3 ms of sleep in every step
on rank 0's CPU, in turns. What is hidden behind the GPU costs nothing.
ratio: does v1's idle time explain how much faster v2 is? The `nano` load on both, in turns, and
once more on v1 to find out how long the GPU works on each of its steps (busy_clock.py). A GPU
that never waited would be 1 / (1 - idle share) times as fast.

Needs a GPU. Prints one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from nanorunner import LLM
from nanorunner.bench.workloads import make_workload
from nanorunner.config import make_config
from nanorunner.resolve import resolve
from nanorunner.workers.cuda_graphs import Descriptor
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workers.model_runner import ModelRunner

if TYPE_CHECKING:
    from scripts.bench_engine import WARM_UP, measure
    from scripts.bench_host import NUM_WARM, PROMPT_LEN, make_runner, make_scheduler
    from scripts.busy_clock import BusyClock
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import WARM_UP, measure
    from bench_host import NUM_WARM, PROMPT_LEN, make_runner, make_scheduler
    from busy_clock import BusyClock

SLEEP_S = 0.0003
KV_CACHE_GIB = 40.0  # of `nano`: 256 requests of up to 2,048 tokens
IDLE_LIMIT, SLOWDOWN_LIMIT, RATIO_LIMIT = 0.03, 0.03, 0.05
PARTS = ("idle", "sleep", "ratio")
TEMPERATURE = 0.6


def watch_graphs(runner: ModelRunner) -> list[tuple[Any, Any]]:
    """Have each replay bracketed by timing events from now on; return the list they go to."""
    pairs: list[tuple[Any, Any]] = []
    replay = runner.graphs.replay

    def timed(descriptor: Descriptor) -> torch.Tensor:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        logits = replay(descriptor)
        end.record()
        pairs.append((begin, end))
        return logits

    runner.graphs.replay = timed  # type: ignore[method-assign]
    return pairs


def idle_share(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shares of a steady decode of num_seqs requests at depth 2 and, to compare, 1."""
    result: dict[str, Any] = {}
    for depth in (2, 1):
        max_model_len = PROMPT_LEN + NUM_WARM + args.steps + 20
        num_blocks = (args.num_seqs + 2) * -(-max_model_len // BLOCK_SIZE)
        settings = {"model": args.model, "runner": "v2", "load_format": "dummy", "device": "cuda"}
        sizes = {"max_num_seqs": args.num_seqs, "max_model_len": max_model_len}
        more = {"num_blocks": num_blocks, "async_depth": depth, "skip_tokenizer_init": True}
        config = resolve(make_config(settings | sizes | more)).runner_config
        runner = make_runner(config, num_blocks)
        scheduler = make_scheduler(config, num_blocks, NUM_WARM + args.steps + 10)
        pairs = watch_graphs(runner)
        in_flight: deque[Any] = deque()
        for _ in range(NUM_WARM + args.steps):
            while len(in_flight) < depth:
                step = scheduler.schedule()
                assert step is not None, "the requests ended too early"
                in_flight.append(runner.step(step.step_input.to_wire()))
            scheduler.update(in_flight.popleft().result())
        torch.cuda.synchronize()
        pairs = pairs[-args.steps :]
        gaps = [a[1].elapsed_time(b[0]) for a, b in pairwise(pairs)]
        busy = [begin.elapsed_time(end) for begin, end in pairs]
        span = pairs[0][0].elapsed_time(pairs[-1][1])
        result[f"idle_share_depth_{depth}"] = round(sum(gaps) / span, 4)
        result[f"gap_us_p50_depth_{depth}"] = round(statistics.median(gaps) * 1000, 1)
        result[f"busy_us_p50_depth_{depth}"] = round(statistics.median(busy) * 1000, 1)
        runner.close()
        del runner, pairs
        torch.cuda.empty_cache()
    return result


def start_llm(args: argparse.Namespace, runner: str) -> LLM:
    """Return an engine with random weights for the `nano` load; two of them fit on one GPU."""
    return LLM(
        args.model,
        runner=runner,
        load_format="dummy",
        skip_tokenizer_init=True,
        prefix_cache=False,
        max_num_seqs=args.num_seqs,
        kv_cache_gib=KV_CACHE_GIB,  # a share of the GPU would count the other engine's memory
    )


def sleep_cost(args: argparse.Namespace) -> dict[str, Any]:
    """Return output tokens per second with and without the sleep, and what it costs."""
    rates: dict[str, list[float]] = {"plain": [], "with_sleep": []}
    with start_llm(args, "v2") as llm:
        load = make_workload("nano", llm.resolved.runner_config.model.vocab_size)
        plain = llm.engine.step

        def slow() -> Any:
            time.sleep(SLEEP_S)
            return plain()

        measure(llm, load, TEMPERATURE, 1)  # the first pass pays for what happens once
        for _ in range(args.repeats):
            for name, step in (("plain", plain), ("with_sleep", slow)):
                llm.engine.step = step  # type: ignore[method-assign]
                rates[name].append(measure(llm, load, TEMPERATURE, 1)["output_tokens_per_s"])
    before, after = (statistics.median(rates[name]) for name in ("plain", "with_sleep"))
    return {"nano_tokens_per_s": rates, "slowdown": round(1 - after / before, 4)}


def runners_ratio(args: argparse.Namespace) -> dict[str, Any]:
    """Return how much faster v2 is than v1, and how much v1's idle share lets expect.

    Raises RuntimeError when the pass that times v1's steps did not run the same steps.
    """
    seconds: dict[str, list[float]] = {"v1": [], "v2": []}
    with start_llm(args, "v1") as one, start_llm(args, "v2") as two:
        vocab_size = one.resolved.runner_config.model.vocab_size
        load, warm_up = (make_workload(name, vocab_size) for name in ("nano", WARM_UP))
        for llm in (one, two):
            measure(llm, warm_up, TEMPERATURE, 1)
        num_steps = 0
        for _ in range(args.repeats):
            for name, llm in (("v1", one), ("v2", two)):
                result = measure(llm, load, TEMPERATURE, 1)
                seconds[name] += result["seconds"]
                if name == "v1":
                    num_steps = result["scheduler"]["steps"]
        with BusyClock(rank_0(one)) as clock:
            measure(one, load, TEMPERATURE, 1)
        busy = clock.seconds()
    if len(busy) != num_steps:
        raise RuntimeError(f"{len(busy)} steps were timed, but a pass of v1 has {num_steps}")
    v1_s, v2_s = (statistics.median(seconds[name]) for name in ("v1", "v2"))
    predicted, measured = v1_s / sum(busy), v1_s / v2_s
    return {
        "nano_seconds": seconds,
        "v1_steps": num_steps,
        "v1_busy_s": round(sum(busy), 3),
        "v1_steps_timed_with_gaps": clock.num_uncovered,
        "v1_idle_share": round(1 - sum(busy) / v1_s, 4),
        "predicted_v2_over_v1": round(predicted, 4),
        "measured_v2_over_v1": round(measured, 4),
        "measured_over_predicted": round(measured / predicted, 4),
    }


def rank_0(llm: LLM) -> Any:
    """Return rank 0's own runner of an engine with one rank."""
    return llm.engine._call.__self__.runner  # type: ignore[attr-defined]


def main() -> int:
    """Measure and print; return 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default="idle,sleep", help=f"some of {', '.join(PARTS)}")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"parts: {', '.join(sorted(unknown))}: use some of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU was found; a CPU has no idle GPU to measure")
    result: dict[str, Any] = {"benchmark": "idle share"} | vars(args)
    result |= {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    if "ratio" in parts:
        result |= runners_ratio(args)
    if "sleep" in parts:
        result |= sleep_cost(args)
    if "idle" in parts:
        result |= idle_share(args)
    for key, value in result.items():
        print(f"{key:24} {value}")
    print(json.dumps(result))
    is_good = (
        result.get("idle_share_depth_2", 0) < IDLE_LIMIT
        and result.get("slowdown", 0) < SLOWDOWN_LIMIT
        and abs(result.get("measured_over_predicted", 1) - 1) <= RATIO_LIMIT
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
