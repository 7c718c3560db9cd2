"""Every figure of a benchmark: its name with the unit in it, its definition, how it is computed.

    RequestRecord, one a request -> pass_metrics -> {name: value}, {name: samples behind it}
    parse_slo("ttft=200,itl=50") -> limits -> goodput

Times are seconds on the pass's own clock, 0 where it began. A percentile lies between the two
nearest samples, in proportion (numpy's default). A metric without a sample is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nanorunner.did_you_mean import did_you_mean

Seconds = npt.NDArray[np.float64]

MS = 1000.0


class Metric(NamedTuple):
    """What a name in a result stands for."""

    unit: str
    definition: str
    is_better_low: bool = False


LATENCIES = {
    "ttft": "time to first token: from a request's arrival to its first id at the caller, time in "
    "the queue included",
    "tpot": "time per output token: (last id - first id) / (ids - 1) of a request; requests of one "
    "id have none",
    "itl": "inter-token latency: each gap between two arrivals of ids of a request at the caller, "
    "all requests together; ids that came together, as with speculation, are one arrival",
    "e2e": "end to end: from a request's arrival to its last id at the caller",
    "handover": "from a request's arrival to its hand-over to the engine, which takes requests "
    "between two steps; a part of TTFT",
}
STATISTICS = {
    "mean": "arithmetic mean",
    "p50": "median",
    "p95": "95th percentile",
    "p99": "99th percentile",
}
LATENCY_METRICS = {
    f"{name}_ms_{statistic}": Metric("ms", f"{words}; {text}", is_better_low=True)
    for name, text in LATENCIES.items()
    for statistic, words in STATISTICS.items()
}
RATE_METRICS = {
    "output_tokens_per_s": Metric("tokens/s", "ids that came out / duration"),
    "input_tokens_per_s": Metric("tokens/s", "prompt ids of the finished requests / duration"),
    "total_tokens_per_s": Metric("tokens/s", "the sum of the two"),
    "requests_per_s": Metric("requests/s", "finished requests / duration"),
    "goodput_requests_per_s": Metric(
        "requests/s", "finished requests that met every limit of --slo / duration"
    ),
    "output_tokens_per_s_per_user": Metric(
        "tokens/s", "median over the requests of (ids - 1) / (last id - first id)"
    ),
    "output_tokens_per_s_per_rank": Metric("tokens/s", "output_tokens_per_s / tp"),
    "duration_s": Metric(
        "s",
        "from the pass's start, when the first request is due, to the last id of the last one"
        "; idle time that --max-idle skipped counts",
        is_better_low=True,
    ),
}
RESOURCE_METRICS = {
    "cpu_cores": Metric(
        "cores", "CPU time of all ranks (user + system, spinning included) / real time", True
    ),
    "gpu_busy_percent": Metric(
        "%", "mean over time and GPUs in use of NVML's share of time in which a kernel ran"
    ),
    "gpu_memory_used_gib": Metric(
        "GiB", "most memory that NVML saw used on one GPU, other programs' included", True
    ),
}
METRICS: dict[str, Metric] = {**RATE_METRICS, **LATENCY_METRICS, **RESOURCE_METRICS}

# What a limit of --slo is compared with, for each request.
SLO_DEFINITIONS = {
    "ttft": "its TTFT",
    "tpot": "its TPOT",
    "itl": "the largest gap between two arrivals of its ids",
    "e2e": "its end-to-end time",
}


@dataclass(slots=True)
class RequestRecord:
    """What the caller saw of one request. Owner: the pass's driver."""

    input_tokens: int
    arrival_s: float = math.nan  # when it was due
    handover_s: float = math.nan  # when the engine had it
    token_times_s: list[float] = field(default_factory=list)  # one an id
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length"; whatever else is a failure

    @property
    def is_finished(self) -> bool:
        """Whether it ended as it should."""
        return self.finish_reason in ("stop", "length") and bool(self.token_ids)


def pass_metrics(
    records: Sequence[RequestRecord], duration_s: float, *, tp: int, slo_ms: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the values of one pass and how many samples each has; failed requests count nowhere.

    duration_s must be above 0. slo_ms: what parse_slo() made; {} leaves goodput out.
    """
    done = [record for record in records if record.is_finished]
    num_output = sum(len(record.token_ids) for record in done)
    num_input = sum(record.input_tokens for record in done)
    values = {
        "duration_s": duration_s,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": num_output / duration_s,
        "input_tokens_per_s": num_input / duration_s,
        "total_tokens_per_s": (num_input + num_output) / duration_s,
        "output_tokens_per_s_per_rank": num_output / duration_s / tp,
    }
    samples = {
        "duration_s": 1,
        "requests_per_s": len(done),
        "output_tokens_per_s": num_output,
        "input_tokens_per_s": num_input,
        "total_tokens_per_s": num_input + num_output,
        "output_tokens_per_s_per_rank": num_output,
    }
    latencies = [request_latencies(record) for record in done]
    if slo_ms:
        values["goodput_requests_per_s"] = sum(meets(one, slo_ms) for one in latencies) / duration_s
        samples["goodput_requests_per_s"] = len(done)
    for name in LATENCIES:
        pooled = np.concatenate([one[name] for one in latencies]) if latencies else np.zeros(0)
        if pooled.size:
            for statistic, value in statistics_of(pooled).items():
                values[f"{name}_ms_{statistic}"] = value * MS
                samples[f"{name}_ms_{statistic}"] = int(pooled.size)
        if name == "tpot" and pooled.size and pooled.all():
            values["output_tokens_per_s_per_user"] = float(np.median(1 / pooled))
            samples["output_tokens_per_s_per_user"] = int(pooled.size)
    return values, samples


def request_latencies(record: RequestRecord) -> dict[str, Seconds]:
    """Return a finished request's samples in seconds, by the names of LATENCIES; "itl" has many."""
    times = np.asarray(record.token_times_s, dtype=np.float64)
    gaps, waits = np.diff(times), np.diff(np.unique(times))
    return {
        "ttft": times[:1] - record.arrival_s,
        "tpot": gaps.sum(keepdims=True) / gaps.size if gaps.size else gaps,
        "itl": waits,
        "e2e": times[-1:] - record.arrival_s,
        "handover": np.array([record.handover_s - record.arrival_s]),
    }


def statistics_of(samples: Seconds) -> dict[str, float]:
    """Return the mean and the percentiles of at least one sample, by the names of STATISTICS."""
    p50, p95, p99 = np.percentile(samples, (50, 95, 99)).tolist()
    return {"mean": float(samples.mean()), "p50": p50, "p95": p95, "p99": p99}


def meets(latencies: Mapping[str, Seconds], slo_ms: Mapping[str, float]) -> bool:
    """Return whether a request kept every limit; one that has no such latency keeps it."""
    return all(latencies[name].max(initial=0.0) * MS <= limit for name, limit in slo_ms.items())


def parse_slo(text: str) -> dict[str, float]:
    """Return the limits in ms of "ttft=200,itl=50"; ValueError for an unknown or a bad one."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in SLO_DEFINITIONS:
            raise ValueError(f"slo {name!r}: {did_you_mean(name, SLO_DEFINITIONS)}")
        if name in limits:
            raise ValueError(f"slo {name}: given twice; give it once")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if not (math.isfinite(limits[name]) and limits[name] > 0):
            raise ValueError(f"slo {part.strip()!r}: write milliseconds above 0, as {name}=200")
    return limits


def definitions() -> str:
    """Return the text of --definitions: every metric with its unit, and what the limits mean."""
    lines = ["metric, unit: definition", ""]
    lines += [f"{name}, {metric.unit}: {metric.definition}" for name, metric in METRICS.items()]
    lines += ["", "A request meets --slo when each of these, as far as given, is within its limit:"]
    lines += [f"  {name}, ms: {text}" for name, text in SLO_DEFINITIONS.items()]
    return "\n".join(lines)
