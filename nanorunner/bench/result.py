"""The form of a result: one JSON object, the same for latency, throughput and load.

    {
      "schema": 2,                    raised when a key changes its meaning
      "kind": "latency" | "throughput" | "load",
      "command": "python -m nanorunner bench ...",
      "time": "2026-11-30T01:02:03+00:00",            when the first repeat began, UTC
      "commit": "0123456789ab" | "...+changes" | null,
      "machine": {gpus: [names], cuda, driver, cpu, cores, memory_gib, platform, python,
                  versions: {nanorunner, torch, triton, flash-attn, nccl, numpy}},
      "config": {every field of Config, no "auto" left, and
                 num_kv_blocks: of 256 tokens on each rank, graph_sizes: [requests] or [] (eager)},
      "model": {the fields of ModelConfig},
      "workload": {name, source, seed, requests, input_tokens, output_tokens (asked for),
                   input_len: {min, mean, p50, p95, max}, output_len: {the same},
                   digest: of all ids and lengths,
                   sampling: {temperature, ...},
                   arrivals: {kind, rate_per_s, burstiness, concurrency, speed, offered_per_s}},
      "slo": {"ttft_ms": 200.0} | {},
      "includes": {tokenizer: false, scheduler: true, rpc: true, forward: true, sampler: true},
      "start_up_s": 12.3,
      "warm_up": {"passes": 1, "seconds": [1.2]},
      "repeats": [{metric: value, ...}, ...]          one a measured pass; names: metrics.py
      "samples": [{metric: how many samples are behind the value}, ...]       beside each repeat
      "metrics": {metric: {"median", "min", "max", "unit", "samples": fewest in one repeat,
                           "repeats": how many repeats have a value}},
      "counters": {requests, finished, failed, input_tokens, output_tokens, skipped_idle_s,
                   scheduler: {the fields of SchedulerStats},     of all repeats together
                   prefix_hit_share: of the known tokens that requests came with, 0 to 1,
                   graphs: {dispatched: {"plain 8": steps, "layers 192", "eager"}, padded_rows,
                            padded_share},
                   memory: {host_peak_gib: all processes together, since they began,
                            gpu_peak_gib: [by rank] | null, pinned_peak_gib: [by rank] | null},
                   not_counted: {what: why}},
      "steps": {"rank": 0, "num_steps", "step_us": {"median", "p95", "mean"},     --step-times alone
                "parts": {name: {"kind": "cpu" | "gpu", "median_us", "p95_us", "mean_us",
                                 "share": of the steps' time}},       as they are stacked, each kind
                                     for itself; the means of a kind add up to step_us' mean
                "gpu_idle_share": of the GPU's time | null (a CPU), "num_lost", "note",
                "prediction": {"bytes_a_step", "operations_a_step", "requests_a_step",
                               "tokens_a_step", "bound_us" | null, "measured_us",
                               "mbu" | null, "mfu" | null, "limits": source | null, "formula"}},
      "outputs": {"digests": [of all output ids, by repeat], "equal": all repeats the same},
      "output_ids": [[ids of request 0], ...]         of the first repeat, with --keep-ids alone
      "errors": ["request 3: error: ..."]             the first ten
    }

A metric without a sample (TPOT of one-token outputs) is left out, never zero. Every rate is over
the whole pass. Written by write_result() whole or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanorunner.bench.metrics import LATENCIES, METRICS
from nanorunner.bench.steps import prediction_lines
from nanorunner.step_times import step_lines

SCHEMA = 2  # since 2 ids that arrive together are one arrival of itl_ms_*
INCLUDES = {"tokenizer": False, "scheduler": True, "rpc": True, "forward": True, "sampler": True}
ROW = "{:<30} {:>13} {:>13} {:>13}  {:<11} {:>9}"
NUM_ERRORS_SHOWN = 10


def summarise(
    repeats: Sequence[Mapping[str, float]], samples: Sequence[Mapping[str, int]]
) -> dict[str, dict[str, Any]]:
    """Return a result's "metrics": the middle and the spread of each over the repeats."""
    summary: dict[str, dict[str, Any]] = {}
    for name, metric in METRICS.items():
        values = [repeat[name] for repeat in repeats if name in repeat]
        if values:
            summary[name] = {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "unit": metric.unit,
                "samples": min(counts[name] for counts in samples if name in counts),
                "repeats": len(values),
            }
    return summary


def check_writable(path: Path | None) -> None:
    """Make the folder of a result's file; OSError when no file can be written there."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; name a file in it")
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise OSError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")
        return
    try:
        folder = path.resolve().parent  # a link's file is replaced where it lies
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # there is room for a name; the file has gone already
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result to a file; a reader sees the old file or the whole new one.

    A link stays a link, and a device or a pipe what it is: that is written to, not replaced.
    """
    text = json.dumps(result, indent=1) + "\n"
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _is_special(path: Path) -> bool:
    """Return whether something is there that is no file: a device, a pipe."""
    return path.exists() and not path.is_file()


def last_line(result: Mapping[str, Any]) -> str:
    """Return the JSON that ends stdout: the result without the output ids."""
    return json.dumps({key: value for key, value in result.items() if key != "output_ids"})


def table(result: Mapping[str, Any]) -> str:
    """Return a result as a person reads it: what was measured, how it is defined, the figures."""
    config, counters = result["config"], result["counters"]
    num_repeats, warm_up = len(result["repeats"]), result["warm_up"]
    lines = [
        f"nanorunner bench {result['kind']}: {config['model'] or 'the embedded model'}, tp "
        f"{config['tp']}, runner {config['runner']}, {config['device']}, {config['dtype']}, "
        f"{config['attention_backend']}, "
        f"{'CUDA graphs' if config['graph_sizes'] else 'no graphs'}; commit {result['commit']}",
        *caveats(config),
        _workload_line(result["workload"]),
        "includes " + ", ".join(part for part, is_in in INCLUDES.items() if is_in) + "; not the "
        "tokenizer, no HTTP",
        *(f"{name.upper()}: {LATENCIES[name]}" for name in ("ttft", "tpot", "itl")),
        f"start-up {result['start_up_s']:.1f} s; {warm_up['passes']} warm-up pass(es), "
        f"{sum(warm_up['seconds']):.2f} s; {num_repeats} repeat(s)",
        "",
        ROW.format("metric", "median", "min", "max", "unit", "samples"),
    ]
    for name, values in result["metrics"].items():
        if name.startswith("handover") and result["kind"] != "load":
            continue  # there all come at once, before the first step
        figures = (_figure(values[key]) for key in ("median", "min", "max"))
        lines.append(ROW.format(name, *figures, values["unit"], values["samples"]))
    lines += ["", *_counter_lines(counters, num_repeats)]
    if "steps" in result:
        steps = result["steps"]
        lines += ["", *step_lines(steps), "", *prediction_lines(steps["prediction"])]
    if not result["outputs"]["equal"]:
        lines.append("the repeats' output ids differ")
    lines += [f"FAILED {error}" for error in result["errors"]]
    return "\n".join(lines)


def caveats(config: Mapping[str, Any]) -> list[str]:
    """Return what makes these figures no measure of the engine's speed."""
    lines = []
    if config.get("share_gpu"):
        lines.append(f"--share-gpu: {config['tp']} ranks on one GPU, over gloo; not for comparison")
    if config.get("check_ranks"):
        lines.append("--check-ranks: the ranks compare their values; not for comparison")
    return lines


def _workload_line(workload: Mapping[str, Any]) -> str:
    arrivals = dict(workload["arrivals"])
    kind = arrivals.pop("kind")
    how = ", ".join(f"{name} {value:.4g}" for name, value in arrivals.items())
    lengths = (
        f"{workload[key]['min']}..{workload[key]['max']}, mean {workload[key]['mean']:g}"
        for key in ("input_len", "output_len")
    )
    ids = (f"{workload[key]:,}" for key in ("input_tokens", "output_tokens"))
    (count_in, count_out), (len_in, len_out) = ids, lengths
    return (
        f"workload {workload['name']}: {workload['requests']} requests, {count_in} ids in "
        f"({len_in}), {count_out} asked for ({len_out}); arrivals {kind}"
        f"{f' ({how})' if how else ''}; seed {workload['seed']}"
    )


def draft_words(drafts: Mapping[str, Any]) -> str:
    """Return what came of speculation, in words."""
    by_place = ", ".join(f"{share:.0%}" for share in drafts["acceptance"])
    return (
        f"{sum(drafts['accepted']):,} of {sum(drafts['meant']):,} accepted (by place: {by_place}); "
        f"{drafts['mean_accepted_length']:.2f} ids a request from a step with drafts; "
        f"{drafts['verify_steps']:,} of {drafts['steps']:,} steps had some"
    )


def _counter_lines(counters: Mapping[str, Any], num_repeats: int) -> list[str]:
    scheduler, memory = counters["scheduler"], counters["memory"]
    lines = [
        f"{num_repeats} repeat(s) together: {counters['finished']:,} of {counters['requests']:,} "
        f"requests finished, {counters['failed']:,} failed; {counters['input_tokens']:,} ids in, "
        f"{counters['output_tokens']:,} came out",
        f"{scheduler['steps']:,} steps, {scheduler['mixed_steps']:,} of them mixed; "
        f"{scheduler['preemptions']:,} preemptions; {scheduler['cached_tokens']:,} ids from the "
        f"prefix cache ({counters['prefix_hit_share']:.1%}); at most "
        f"{scheduler['peak_used_blocks']:,} KV blocks used",
    ]
    if counters["skipped_idle_s"]:
        lines.append(f"{counters['skipped_idle_s']:.1f} s of silence were skipped (--max-idle)")
    if drafts := counters["drafts"]:
        lines.append(f"drafts: {draft_words(drafts)}")
    if (graphs := counters["graphs"])["dispatched"]:
        steps = ", ".join(f"{name}: {count:,}" for name, count in graphs["dispatched"].items())
        lines.append(
            f"steps by graph: {steps}; {graphs['padded_rows']:,} rows computed in vain "
            f"({graphs['padded_share']:.1%} of the graphs' rows)"
        )
    peaks = [f"host {memory['host_peak_gib']:.2f} GiB in all processes"]
    for key, name in (("gpu_peak_gib", "GPU"), ("pinned_peak_gib", "pinned")):
        if memory[key] is not None:
            by_rank = ", ".join(f"{value:.2f}" for value in memory[key])
            peaks.append(f"{name} {by_rank} GiB by rank")
    lines.append("peak memory: " + "; ".join(peaks))
    lines += [f"not counted: {what}: {why}" for what, why in counters["not_counted"].items()]
    return lines


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
