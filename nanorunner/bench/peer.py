"""`python -m nanorunner.bench.peer NAME [flags of bench throughput]`: measure another engine.

The workload, the passes and the metrics are those of `bench throughput`; only the engine is the
peer's. `bench compare` starts this in a process of its own; it is no command for people.
"""

from __future__ import annotations

import logging
import shlex
import sys
from argparse import Namespace
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from nanorunner.bench.cli import parser_of
from nanorunner.bench.code_version import git_commit
from nanorunner.bench.driver import Request
from nanorunner.bench.job import Job, set_job
from nanorunner.bench.measuring_flags import sampling_params
from nanorunner.bench.metrics import pass_metrics
from nanorunner.bench.peer_engines import Serve, open_peer
from nanorunner.bench.provenance import describe_machine
from nanorunner.bench.resources import ResourceMeter
from nanorunner.bench.result import SCHEMA, summarise, write_result
from nanorunner.bench.session import DEFAULTS
from nanorunner.bench.sides import PEERS, check_peer_sampling
from nanorunner.config import make_config
from nanorunner.exit_codes import OK, REFUSED, REQUEST_FAILED
from nanorunner.flags import engine_settings
from nanorunner.resolve import Resolved, resolve
from nanorunner.workers.cuda_graphs import capture_sizes

# Settings of ours that a peer has too, and was given the same value of.
SHARED = (
    "model",
    "tp",
    "device",
    "dtype",
    "load_format",
    "max_num_seqs",
    "seed",
)
SHARED_WITH_VLLM = (
    "enforce_eager",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "prefix_cache",
)


def main(argv: list[str]) -> int:
    """Measure the peer that argv names and return the exit code."""
    name, words = argv[0], argv[1:]
    logging.getLogger("nanorunner").setLevel(logging.WARNING)
    args = parser_of("throughput").parse(words)
    try:
        if name not in PEERS:
            raise ValueError(f"peer {name!r}: use {' or '.join(PEERS)}")
        check_peer_sampling(name, sampling_params(args))
        resolved = resolve(make_config({**DEFAULTS, **engine_settings(args)}))
        job = set_job(args, resolved)
        assert resolved.config.max_model_len is not None, "resolve() sets it"
        max_model_len = max(resolved.config.max_model_len, job.workload.longest)
        with open_peer(name, resolved, max_model_len) as (serve, engine):
            result = measure(serve, job, resolved, args)
    except (ValueError, ImportError, OSError) as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return REFUSED
    except TimeoutError as error:
        print(f"nanorunner: {name}: {error}", file=sys.stderr)
        return REQUEST_FAILED
    result["command"] = shlex.join(["python", "-m", "nanorunner.bench.peer", *argv])
    result["config"] = {
        "engine": engine,
        **peer_config(name, resolved),
        "max_model_len": max_model_len,
    }
    write_result(args.out, result)
    return OK


def measure(serve: Serve, job: Job, resolved: Resolved, args: Namespace) -> dict[str, Any]:
    """Return a result of the peer: warm-up passes, then measured ones."""
    config, params = resolved.config, sampling_params(args)

    def requests_of(number: int) -> list[Request]:
        return job.pass_requests(params, number, prefix_cache=config.prefix_cache)

    for number in range(args.warm_up):
        serve(requests_of(number), args.time_limit)
    began = datetime.now(timezone.utc)
    repeats, samples, ids = [], [], []
    not_counted: dict[str, str] = {}
    for number in range(args.repeat):
        requests = requests_of(args.warm_up + number)
        with ResourceMeter(config.tp if config.device == "cuda" else 0) as meter:
            record = serve(requests, args.time_limit)
        values, counts = pass_metrics(
            record.requests, record.duration_s, tp=config.tp, slo_ms=args.slo
        )
        used = meter.read()
        repeats.append(values | used.values)
        samples.append(counts | used.samples)
        not_counted |= used.gaps
        ids.append([request.token_ids for request in record.requests])
        for made, request in zip(ids[-1], requests, strict=True):
            if len(made) != request.params.max_tokens:
                raise ValueError(
                    f"{len(made)} ids came out of a request, {request.params.max_tokens} were "
                    f"asked for"
                )
    return {
        "schema": SCHEMA,
        "kind": "throughput",
        "time": began.isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": describe_machine(),
        "model": asdict(resolved.runner_config.model),
        "workload": job.describe(params),
        "repeats": repeats,
        "samples": samples,
        "metrics": summarise(repeats, samples),
        "counters": {"not_counted": not_counted},
        "outputs": {"equal": all(each == ids[0] for each in ids)},
        "output_ids": ids[0],
    }


def peer_config(name: str, resolved: Resolved) -> dict[str, Any]:
    """Return the settings that the peer was given, by our names."""
    config = asdict(resolved.config)
    if name != "vllm":
        return {key: config[key] for key in SHARED}
    has_graphs = config["device"] == "cuda" and not config["enforce_eager"]
    return {
        **{key: config[key] for key in (*SHARED, *SHARED_WITH_VLLM)},
        "graph_sizes": capture_sizes(config["max_num_seqs"]) if has_graphs else [],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
