"""Measure what users wait for under timed arrivals, of this engine or of vLLM: one side a process.

    python scripts/bench_arrivals.py v2   --model qwen3-8b --rate 12 --num-requests 240
    python scripts/bench_arrivals.py vllm --model qwen3-8b --rate 12 --num-requests 240

    a named load, Poisson times by seed -> driver.run_pass -> TTFT, ITL, ids a second

A seed gives every side the same times. Random weights, ids in and out, prefix cache off,
temperature 0.6 and no seeds of the requests' own, every request to its full length. vLLM has our
settings but for the tokens of a step (--max-num-batched-tokens) and the sizes of CUDA graphs: its
own, as the result says. What a schedule came to is offered_per_s, which is not quite the rate.
The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from nanorunner import LLM, SamplingParams
from nanorunner.bench.arrivals import Arrivals, all_at_once, open_loop
from nanorunner.bench.code_version import git_commit
from nanorunner.bench.driver import Clock, PassRecord, Request, Serving, run_pass
from nanorunner.bench.measuring_flags import count_above_0, number_above_0
from nanorunner.bench.metrics import pass_metrics
from nanorunner.bench.peer_engines import PunctualVllm, model_folder, vllm_settings
from nanorunner.bench.provenance import describe_machine
from nanorunner.bench.result import check_writable, write_result
from nanorunner.bench.tables import aligned
from nanorunner.bench.workloads import WORKLOADS, Workload, describe, make_workload
from nanorunner.config import Config, make_config
from nanorunner.errors import RankDied
from nanorunner.exit_codes import OK, REFUSED, REQUEST_FAILED
from nanorunner.flags import Parser
from nanorunner.resolve import resolve

# Before anything is measured: a batch of 96 that shrinks to 1, then some timed arrivals.
WARM_UP_AT_ONCE, WARM_UP_TIMED, WARM_UP_SEED = 96, 32, -1
# stdout belongs to the result, and a machine without a network must not wait for one
VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
KEPT = ["offered_per_s", "duration_s", "output_tokens_per_s"]
KEPT += [f"{name}_ms_p{share}" for name in ("ttft", "itl", "handover") for share in (50, 95, 99)]


class IncompletePass(RuntimeError):
    """A request has not the length that it was asked for; rates would not compare."""


def config_of(args: Namespace) -> Config:
    """Return the settings that every side starts from; ValueError for what cannot work."""
    settings: dict[str, Any] = {
        "model": args.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "prefix_cache": False,
        "max_num_seqs": 256,
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.max_num_batched_tokens or 8192,
        "gpu_memory_utilization": 0.85,
        "device": args.device,
    }
    return make_config(settings if args.side == "vllm" else settings | {"runner": args.side})


def make_load(name: str, vocab_size: int, count: int) -> Workload:
    """Return a load's requests in order, from its first one again when there are too few."""
    prompts, output_lens = make_workload(name, vocab_size)
    return Workload(list(islice(cycle(prompts), count)), list(islice(cycle(output_lens), count)))


@contextmanager
def open_side(args: Namespace) -> Iterator[tuple[Serving, dict[str, Any]]]:
    """Yield the side's engine and the settings that it runs with."""
    if args.side != "vllm":
        with LLM.from_config(config_of(args)) as llm:
            yield llm.engine, asdict(llm.resolved.config)
        return
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm: Any = importlib.import_module("vllm")  # typed here: few machines have it
    resolved = resolve(config_of(args))
    with model_folder(resolved) as folder:
        given = vllm_settings(resolved, folder, args.max_model_len)
        given.pop("compilation_config", None)
        if args.max_num_batched_tokens is None:
            del given["max_num_batched_tokens"]
        peer = vllm.LLM(**given)
        used = peer.llm_engine.vllm_config
        config = given | {
            "vllm": vllm.__version__,
            "model": args.model,
            "max_num_batched_tokens": used.scheduler_config.max_num_batched_tokens,
            "async_scheduling": used.scheduler_config.async_scheduling,
            "graph_sizes": used.compilation_config.cudagraph_capture_sizes,
        }
        try:
            yield PunctualVllm(peer, vllm), config
        finally:  # its last words come before the result
            peer.llm_engine.engine_core.shutdown(timeout=20.0)


def serve(
    engine: Serving, requests: list[Request], arrivals: Arrivals, limit_s: float
) -> PassRecord:
    """Return a pass of whole requests; IncompletePass, or TimeoutError after limit_s, if not."""
    clock = Clock(limit_s)  # a shorter wait is real
    if isinstance(engine, PunctualVllm):
        engine.begin_pass(arrivals, clock)
    record = run_pass(engine, requests, arrivals, clock, limit_s)
    for index, (got, asked) in enumerate(zip(record.requests, requests, strict=True)):
        count, wanted = len(got.token_ids), asked.params.max_tokens
        if count != wanted or got.finish_reason != "length":
            raise IncompletePass(
                f"request {index} of {len(requests)}: {count} ids came out, {wanted} were asked "
                f"for; it ended with {got.finish_reason!r}"
            )
    return record


def measure(args: Namespace, load: Workload) -> dict[str, Any]:
    """Start the side, warm it up, run every repeat and return what came of it."""
    requests = [  # without seeds: vLLM samples a request that has one in another, slower way
        Request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length))
        for prompt, length in zip(*load, strict=True)
    ]

    def run(name: str, chosen: list[Request], arrivals: Arrivals) -> PassRecord:
        record = serve(engine, chosen, arrivals, args.time_limit)
        about = f"{name}: {len(chosen)} requests, {arrivals.kind}, {record.duration_s:.1f} s"
        print(f"nanorunner: {args.side}: {about}", file=sys.stderr, flush=True)
        return record

    begin_s = time.perf_counter()
    with open_side(args) as (engine, config):
        start_up_s = round(time.perf_counter() - begin_s, 2)
        print(f"nanorunner: {args.side}: started, {start_up_s} s", file=sys.stderr, flush=True)
        at_once, timed = requests[:WARM_UP_AT_ONCE], requests[:WARM_UP_TIMED]
        run("warm-up", at_once, all_at_once(len(at_once)))
        run("warm-up", timed, open_loop("poisson", len(timed), args.rate, WARM_UP_SEED))
        repeats = []
        for seed in range(args.repeats):
            arrivals = open_loop("poisson", len(requests), args.rate, seed)
            record = run(f"repeat {seed + 1} of {args.repeats}", requests, arrivals)
            values, samples = pass_metrics(record.requests, record.duration_s, tp=1, slo_ms={})
            values["offered_per_s"] = arrivals.describe().get("offered_per_s", 0.0)
            row: dict[str, float] = {"seed": seed, "finished_requests": samples["requests_per_s"]}
            row["output_tokens"] = samples["output_tokens_per_s"]
            repeats.append(row | {name: round(values[name], 4) for name in KEPT if name in values})
    return {"config": config, "start_up_s": start_up_s, "repeats": repeats}


def make_parser() -> Parser:
    """Return the parser of this script's flags."""
    parser = Parser(prog="bench_arrivals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side", choices=["v1", "v2", "vllm"])
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset")
    parser.add_argument("--rate", type=number_above_0, required=True, help="requests a second")
    parser.add_argument("--workload", default="nano", choices=WORKLOADS)
    parser.add_argument("--num-requests", type=count_above_0, default=240)
    parser.add_argument("--repeats", type=count_above_0, default=1, help="with seeds 0, 1, ...")
    parser.add_argument("--time-limit", type=number_above_0, default=240.0, help="s, of a pass")
    parser.add_argument("--max-model-len", type=count_above_0, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=count_above_0, help="8192; vLLM: its own")
    parser.add_argument("--device", default="auto", help="of our engine")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


def main(argv: list[str]) -> int:
    """Measure, print and return the exit code."""
    args = make_parser().parse(argv)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        check_writable(args.out)
        vocab_size = resolve(config_of(args)).runner_config.model.vocab_size
        load = make_load(args.workload, vocab_size, args.num_requests)
        measured = measure(args, load)
    except (IncompletePass, RankDied, TimeoutError) as error:
        print(f"nanorunner: {args.side}: {error}", file=sys.stderr)
        return REQUEST_FAILED
    except (ValueError, OSError, ImportError) as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return REFUSED
    machine = describe_machine()
    result = {
        "benchmark": "arrivals",
        "side": args.side,
        "command": shlex.join(["python", "scripts/bench_arrivals.py", *argv]),
        "started": started,
        "commit": git_commit(),
        "versions": machine.pop("versions") | {"vllm": measured["config"].get("vllm")},
        "machine": machine,
        "rate_per_s": args.rate,
        "seeds": list(range(args.repeats)),
        "workload": {"name": args.workload, "temperature": 0.6, **describe(load)},
        **measured,
    }
    rows = [[f"{value:.8g}" for value in repeat.values()] for repeat in measured["repeats"]]
    print(aligned([list(measured["repeats"][0]), *rows]))
    if args.out is not None:
        write_result(args.out, result)
    print(json.dumps(result))
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
