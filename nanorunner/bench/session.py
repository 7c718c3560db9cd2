"""A measuring command from its flags to its result: refuse, start, warm up, repeat, count, write.

    flags -> Config, Job -> LLM -> warm-up passes -> measured passes -> result.py

Whatever a person can get wrong is refused before the engine starts, but for what only the running
engine knows: whether its KV cache has room for the longest request.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np

from nanorunner.bench import counters
from nanorunner.bench.bounds import limits_of
from nanorunner.bench.code_version import git_commit
from nanorunner.bench.driver import Clock, PassRecord, Request, run_pass
from nanorunner.bench.job import Job
from nanorunner.bench.measuring_flags import sampling_params
from nanorunner.bench.metrics import pass_metrics
from nanorunner.bench.provenance import describe_machine
from nanorunner.bench.resources import ResourceMeter
from nanorunner.bench.result import (
    INCLUDES,
    NUM_ERRORS_SHOWN,
    SCHEMA,
    check_writable,
    last_line,
    summarise,
    table,
    write_result,
)
from nanorunner.bench.steps import measured_steps
from nanorunner.compatibility import check_params
from nanorunner.config import Config, make_config
from nanorunner.errors import RankDied
from nanorunner.exit_codes import OK, RANK_DIED, REFUSED, REQUEST_FAILED
from nanorunner.flags import engine_settings
from nanorunner.llm import LLM
from nanorunner.resolve import Resolved, resolve
from nanorunner.sampling_params import SamplingParams
from nanorunner.workers.cuda_graphs import capture_sizes
from nanorunner.workers.rank_agreement import RankCheckFailed

# A benchmark's own defaults: repeats must not be served from the cache that the first one filled,
# and a tokenizer has no part in it.
DEFAULTS = {"prefix_cache": False, "skip_tokenizer_init": True}

logger = logging.getLogger("nanorunner")


class Measured(NamedTuple):
    """One measured pass."""

    record: PassRecord
    values: dict[str, float]
    samples: dict[str, int]
    gaps: dict[str, str]  # what could not be measured -> why


def run_benchmark(
    kind: str, args: Namespace, argv: Sequence[str], make_job: Callable[[Resolved], Job]
) -> int:
    """Run a measuring command and return its exit code."""
    if args.quiet:
        logger.setLevel(logging.WARNING)
    start = time.perf_counter()
    try:
        config = make_config({**DEFAULTS, **engine_settings(args)})
        params = sampling_params(args)
        check_params(config.runner, params)
        check_writable(args.out)
        _check_limits(args, config)
        resolved = resolve(config)
        job = make_job(resolved)
        config = _with_room(config, resolved, job)
        llm = LLM.from_config(config)
    except (ValueError, OSError, ImportError) as error:
        return _report(error, REFUSED)
    except (RankDied, RankCheckFailed) as error:
        return _report(error, RANK_DIED)
    start_up_s = time.perf_counter() - start
    with llm:
        try:
            for prompt_ids, request_params in job.requests(params, 0):
                llm.engine.check_request(prompt_ids, request_params)
        except ValueError as error:
            return _report(error, REFUSED)
        try:
            result = _measure(llm, job, params, args)
        except (RankDied, RankCheckFailed) as error:
            return _report(error, RANK_DIED)
        except TimeoutError as error:
            return _report(error, REQUEST_FAILED)
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": kind,
        "command": shlex.join(["python", "-m", "nanorunner", "bench", kind, *argv]),
    }
    result = head | result | {"start_up_s": start_up_s}
    print(table(result))
    print(last_line(result), flush=True)  # before the file: a full disk must not lose it
    try:
        if args.out is not None:
            write_result(args.out, result)
    except OSError as error:
        return _report(error, REQUEST_FAILED)
    return REQUEST_FAILED if result["counters"]["failed"] else OK


def _report(error: Exception, code: int) -> int:
    print(f"nanorunner: {error}", file=sys.stderr)
    return code


def _check_limits(args: Namespace, config: Config) -> None:
    """Refuse limits of a device that nothing would be compared with."""
    for name in ("bandwidth", "tflops"):
        if getattr(args, name) is not None and not config.step_times:
            raise ValueError(f"--{name}: means nothing without --step-times; add it")


def _with_room(config: Config, resolved: Resolved, job: Job) -> Config:
    """Return the config with a max_model_len that the longest request fits in."""
    longest, room = job.workload.longest, resolved.config.max_model_len
    assert room is not None, "resolve() sets it"
    if longest <= room:
        return config
    limit = resolved.runner_config.model.max_position_embeddings
    if config.max_model_len is not None or longest > limit:
        raise ValueError(
            f"workload {job.name}: its longest request has {longest} tokens, but max_model_len is "
            f"{config.max_model_len or limit} and the model's positions end at {limit}; use "
            f"shorter requests, or a larger --max-model-len where the model has one"
        )
    return replace(config, max_model_len=longest)


def _measure(llm: LLM, job: Job, params: SamplingParams, args: Namespace) -> dict[str, Any]:
    """Warm up, measure every repeat, and return the result but for its head."""
    config, engine = llm.resolved.config, llm.engine
    num_gpus = config.tp if config.device == "cuda" else 0
    max_idle_s = getattr(args, "max_idle", 0.0)

    def serve(pass_number: int) -> PassRecord:
        requests = job.pass_requests(params, pass_number, prefix_cache=config.prefix_cache)
        clock = Clock(max_idle_s)
        record = run_pass(engine, requests, job.arrivals, clock, args.time_limit)
        _check_counts(record, requests)
        return record

    warm_up_s = []
    for number in range(args.warm_up):
        warm_up_s.append(serve(number).duration_s)
        logger.info("warm-up pass %d of %d: %.2f s", number + 1, args.warm_up, warm_up_s[-1])
    began = datetime.now(timezone.utc)
    before, begin_ns = counters.read(engine), time.perf_counter_ns()
    measured = []
    for number in range(args.repeat):
        with ResourceMeter(num_gpus) as meter:
            record = serve(args.warm_up + number)
        values, samples = pass_metrics(
            record.requests, record.duration_s, tp=config.tp, slo_ms=args.slo
        )
        used = meter.read()
        values, samples = values | used.values, samples | used.samples
        measured.append(Measured(record, values, samples, used.gaps))
        logger.info("repeat %d of %d: %.2f s", number + 1, args.repeat, record.duration_s)
    end_ns = time.perf_counter_ns()
    passes = [one.record.requests for one in measured]
    counted = counters.count(
        before,
        counters.read(engine),
        passes,
        skipped_idle_s=sum(one.record.skipped_idle_s for one in measured),
        num_gpus=num_gpus,
    )
    for one in measured:
        counted["not_counted"] |= one.gaps
    digests = [_digest(one.record) for one in measured]
    repeats, all_samples = [one.values for one in measured], [one.samples for one in measured]
    result: dict[str, Any] = {
        "time": began.isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": describe_machine(),
        "config": _describe_config(llm),
        "model": asdict(llm.resolved.runner_config.model),
        "workload": job.describe(params),
        "slo": {f"{name}_ms": limit for name, limit in args.slo.items()},
        "includes": INCLUDES,
        "warm_up": {"passes": args.warm_up, "seconds": warm_up_s},
        "repeats": repeats,
        "samples": all_samples,
        "metrics": summarise(repeats, all_samples),
        "counters": counted,
        "outputs": {"digests": digests, "equal": len(set(digests)) == 1},
        "errors": _errors(measured),
    }
    if config.step_times:
        gpus = result["machine"]["gpus"]
        device = gpus[0] if config.device == "cuda" else ""
        limits = limits_of(device, config.dtype, args.bandwidth, args.tflops)
        spans = engine.spans()[0]
        try:
            result["steps"] = measured_steps(
                spans, llm.resolved.runner_config, limits, begin_ns, end_ns
            )
        except ValueError as error:  # the figures of the passes are good without it
            counted["not_counted"]["step times"] = str(error)
    if args.keep_ids:
        result["output_ids"] = [record.token_ids for record in passes[0]]
    return result


def _describe_config(llm: LLM) -> dict[str, Any]:
    """Return every engine setting as it was resolved, and the sizes that the start found."""
    config = llm.resolved.config
    has_graphs = config.device == "cuda" and not config.enforce_eager
    return {
        **asdict(config),
        "num_kv_blocks": llm.engine.scheduler.roster.blocks.num_blocks,
        "graph_sizes": capture_sizes(config.max_num_seqs) if has_graphs else [],
    }


def _check_counts(record: PassRecord, requests: Sequence[Request]) -> None:
    """Mark a request as failed that has not as many ids as it was asked for."""
    for got, asked in zip(record.requests, requests, strict=True):
        count, wanted = len(got.token_ids), asked.params.max_tokens
        if got.is_finished and count != wanted:
            got.finish_reason = f"error: {count} ids came out, {wanted} were asked for"


def _errors(measured: Sequence[Measured]) -> list[str]:
    """Return the first failures, in words."""
    failures = [
        f"repeat {number}, request {index}: {record.finish_reason}"
        for number, one in enumerate(measured)
        for index, record in enumerate(one.record.requests)
        if not record.is_finished
    ]
    return failures[:NUM_ERRORS_SHOWN]


def _digest(record: PassRecord) -> str:
    """Return a fingerprint of every output id of a pass, in the workload's order."""
    digest = hashlib.blake2b(digest_size=8)
    for request in record.requests:
        ids = request.token_ids
        digest.update(np.array([len(ids), *ids], np.int64).tobytes())
    return digest.hexdigest()
