"""How long rank 0's own work on a steady decode step takes: schedule, pickle, update; no model.

    python scripts/bench_scheduler.py [--num-seqs 256] [--steps 2000] [--depth 1]

Prints one table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import TypeVar

import numpy as np

from nanorunner.request import make_request
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.messages import BLOCK_SIZE, Int32, StepOutput

VOCAB = 151_936
T = TypeVar("T")


def make_steady_scheduler(num_seqs: int, num_tokens: int, depth: int) -> Scheduler:
    """Return a scheduler with num_seqs requests of different lengths, all about to start."""
    max_model_len = 1024 + num_tokens
    scheduler = Scheduler(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_model_len=max_model_len,
        num_blocks=num_seqs * (max_model_len // BLOCK_SIZE + 1),
        vocab_size=VOCAB,
        eos_token_ids=frozenset({2}),
        depth=depth,
        send_sampled_ids=depth == 1,
    )
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    random = np.random.default_rng(0)
    for request_id in range(num_seqs):
        prompt: Int32 = random.integers(3, VOCAB, random.integers(100, 1000)).astype(np.int32)
        sampling = params.for_sampler(seed=0)
        request = make_request(request_id, prompt, params, sampling, max_model_len)
        request.is_quiet = True  # as generate() queues them
        scheduler.add(request)
    return scheduler


def measure(num_seqs: int, num_steps: int, depth: int) -> dict[str, Int32]:
    """Return nanoseconds of each part of each step, [num_steps]."""
    num_warm = 200
    scheduler = make_steady_scheduler(num_seqs, num_warm + num_steps + 100, depth)
    times: dict[str, list[int]] = {"schedule": [], "pickle": [], "update": []}
    in_flight: list[StepOutput] = []
    ids = np.arange(3, 3 + num_seqs, dtype=np.int32)

    def timed(part: str, work: Callable[[], T]) -> T:
        start = perf_counter_ns()
        value = work()
        times[part].append(perf_counter_ns() - start)
        return value

    for _ in range(num_warm + num_steps):
        while len(in_flight) < depth:
            step = timed("schedule", scheduler.schedule)
            assert step is not None, "the requests ended too early"
            wire = step.step_input.to_wire()
            timed("pickle", partial(pickle.dumps, wire, -1))
            output = StepOutput(
                step.step_input.step_id, step.sample_ids, ids[: len(step.sample_ids)]
            )
            in_flight.append(output)
        timed("update", lambda: scheduler.update(in_flight.pop(0)))
    assert scheduler.num_running == num_seqs, "not all of them run"
    print(scheduler.stats)
    return {part: np.array(taken[-num_steps:]) for part, taken in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--depth", type=int, default=1)
    arguments = parser.parse_args()
    times = measure(arguments.num_seqs, arguments.steps, arguments.depth)
    times["schedule + update"] = times["schedule"] + times["update"]
    result: dict[str, float | int | str] = {
        "benchmark": "scheduler",
        "num_seqs": arguments.num_seqs,
        "steps": arguments.steps,
        "depth": arguments.depth,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(f"{'us a step':20} {'p50':>8} {'p90':>8} {'p99':>8}")
    for part, taken in times.items():
        p50, p90, p99 = (float(x) / 1000 for x in np.percentile(taken, [50, 90, 99]))
        print(f"{part:20} {p50:8.1f} {p90:8.1f} {p99:8.1f}")
        result[f"{part.replace(' + ', '_')}_us_p50"] = round(p50, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
