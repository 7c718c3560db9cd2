"""How long rank 0's CPU works on a steady decode step of runner v2, part by part.

    python scripts/bench_host.py [--num-seqs 256] [--steps 1000] [--model qwen3-0.6b]

schedule, the wire form, the runner's share (apply, prepare, launch) and update; not the wait for
the output. On a GPU it is the real thing. On a CPU a stub takes the place of the CUDA graph, so
that nothing is computed: what remains is the same Python and numpy, without the driver's calls.
--profile prints where the runner's time goes.

Prints one table, then one JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pickle
import platform
import pstats
from collections import deque
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from nanorunner.config import make_config
from nanorunner.engine import Engine
from nanorunner.resolve import resolve
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.cuda_graphs import PLAIN, Descriptor, GraphManager
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import BLOCK_SIZE, RunnerConfig
from nanorunner.workers.model_runner import ModelRunner

PROMPT_LEN = 20
NUM_WARM = 100
SOME_ID = 5
PARTS = ("schedule", "wire", "runner", "update")


class StubGraphs(GraphManager):
    """On a CPU: says that a graph serves every decode, and computes nothing."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs, is_enabled=True)
        self._logits = torch.zeros(max_num_seqs, 1)

    def dispatch(
        self, num_reqs: int, *, is_decode: bool, is_plain: bool, **kind: Any
    ) -> Descriptor | None:
        """Return a descriptor for every decode."""
        return Descriptor(num_reqs, PLAIN, **kind) if is_decode else None

    def replay(self, descriptor: Descriptor) -> torch.Tensor:
        """Return nothing of worth."""
        return self._logits


def make_runner(config: RunnerConfig, num_blocks: int) -> ModelRunner:
    """Return rank 0's runner, ready for its first step."""
    device = Device(config.device, 0)
    group = Group(None, 0, 1, device.torch_device, config.step_timeout_s)
    runner = ModelRunner(config, 0, group, device)
    runner.load_model()
    runner.allocate_kv(num_blocks)
    runner.capture()
    if not device.is_cuda:
        runner.graphs = StubGraphs(config.max_num_seqs)
        runner.outputs.ids.fill_(SOME_ID)
    return runner


def make_scheduler(config: RunnerConfig, num_blocks: int, num_tokens: int) -> Scheduler:
    """Return a scheduler with max_num_seqs requests, all about to start."""
    vocab_size = config.model.vocab_size
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
        prefix_cache=True,
        depth=config.async_depth,
        send_sampled_ids=False,
    )
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.6)
    random = np.random.default_rng(0)
    engine = Engine(scheduler, lambda *_: None, vocab_size=vocab_size)  # only to queue them
    for _ in range(config.max_num_seqs):
        prompt = random.integers(3, min(vocab_size, 10_000), PROMPT_LEN).tolist()
        engine.add_request(prompt, params, quiet=True)  # as LLM.generate queues them
    return scheduler


def measure(
    scheduler: Scheduler, runner: ModelRunner, num_steps: int, profile: cProfile.Profile | None
) -> dict[str, list[float]]:
    """Return microseconds of each part of each steady step, and the bytes of its frame."""
    times: dict[str, list[float]] = {part: [] for part in (*PARTS, "wait", "frame bytes")}
    in_flight: deque[Any] = deque()
    last = perf_counter_ns()

    def lap(part: str) -> None:
        nonlocal last
        now = perf_counter_ns()
        times[part].append((now - last) / 1000)
        last = now

    for number in range(NUM_WARM + num_steps):
        if number == NUM_WARM:
            for taken in times.values():
                taken.clear()
        while len(in_flight) < scheduler.depth:
            last = perf_counter_ns()
            step = scheduler.schedule()
            assert step is not None, "the requests ended too early"
            lap("schedule")
            wire = step.step_input.to_wire()
            frame = pickle.dumps(("step", (wire,)), pickle.HIGHEST_PROTOCOL)
            lap("wire")
            if profile is not None and number > NUM_WARM:
                profile.enable()
            in_flight.append(runner.step(wire))
            if profile is not None:
                profile.disable()
            lap("runner")
            times["frame bytes"].append(len(frame))
        last = perf_counter_ns()
        output = in_flight.popleft().result()
        lap("wait")
        scheduler.update(output)
        lap("update")
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--model", help="a preset (default: qwen3-0.6b on a GPU, else a toy)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also print the runner's functions")
    args = parser.parse_args()
    is_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    num_tokens = NUM_WARM + args.steps + 3 * args.depth
    max_model_len = min(PROMPT_LEN + num_tokens, 4096 if is_cuda else 1024)
    if num_tokens > max_model_len - PROMPT_LEN:
        parser.error(f"steps {args.steps}: use at most {max_model_len - PROMPT_LEN - NUM_WARM - 6}")
    num_blocks = (args.num_seqs + 2) * -(-max_model_len // BLOCK_SIZE)
    settings = {
        "model": args.model or ("qwen3-0.6b" if is_cuda else "tiny-qwen3"),
        "runner": "v2",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cuda" if is_cuda else "cpu",
        "max_num_seqs": args.num_seqs,
        "max_model_len": max_model_len,
        "num_blocks": num_blocks,
        "async_depth": args.depth,
    }
    config = resolve(make_config(settings)).runner_config
    runner = make_runner(config, num_blocks)
    scheduler = make_scheduler(config, num_blocks, num_tokens)
    profile = cProfile.Profile() if args.profile else None
    times = measure(scheduler, runner, args.steps, profile)
    runner.close()
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    report(times, settings)


def report(times: dict[str, list[float]], settings: dict[str, Any]) -> None:
    """Print the table and the JSON line."""
    rows = {part: np.array(taken) for part, taken in times.items()}
    num_steps = len(rows["update"])
    rows["host work"] = np.sum([rows[part][-num_steps:] for part in PARTS], axis=0)
    result: dict[str, Any] = {"benchmark": "host", "python": platform.python_version()}
    result |= settings | {"steps": num_steps, "torch": torch.__version__}
    print(f"{'us a step':14} {'p50':>8} {'p90':>8} {'p99':>8}")
    for part, taken in rows.items():
        p50, p90, p99 = (float(x) for x in np.percentile(taken, [50, 90, 99]))
        print(f"{part:14} {p50:8.1f} {p90:8.1f} {p99:8.1f}")
        unit = "" if part == "frame bytes" else "_us"
        result[f"{part.replace(' ', '_')}{unit}_p50"] = round(p50, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
