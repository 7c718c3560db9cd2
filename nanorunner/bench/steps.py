"""Prediction beside measurement: what the steps had to move and compute, and what they reached.

    engine.spans() -> step_times.py                 where the time went
    StepFacts -> bounds.step_work() of each step    what it takes at least, and what was reached

Both are of the same steps: those that were scheduled and read within the measured passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from nanorunner.bench.bounds import FORMULA, Limits, bound_s, step_work
from nanorunner.step_times import step_times, whole_steps
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.spans import RankSpans

SHARES = (
    "MBU = bytes / (seconds x bandwidth x tp), MFU = operations / (seconds x rate x tp), of a step"
)


def measured_steps(
    spans: RankSpans, config: RunnerConfig, limits: Limits | None, begin_ns: int, end_ns: int
) -> dict[str, Any]:
    """Return a result's "steps", of the time between the two.

    spans: rank 0's. limits: of one device; None where nobody has measured them.
    """
    steps = step_times(spans, begin_ns, end_ns)
    facts = spans.facts()
    is_ours = np.isin(facts.step, whole_steps(spans, begin_ns, end_ns))
    columns = zip(*(column[is_ours].tolist() for column in facts[2:6]), strict=True)
    works = [
        step_work(
            config.model,
            config.dtype,
            num_tokens=num_tokens,
            kv_positions=kv_positions,
            attended=attended,
            num_logits=num_logits,
        )
        for num_tokens, kv_positions, attended, num_logits in columns
    ]
    num_bytes = fmean(work.num_bytes for work in works)
    num_operations = fmean(work.num_operations for work in works)
    measured_s = steps["step_us"]["mean"] / 1e6
    bandwidth = rate = bound_us = None
    if limits is not None:
        bandwidth, rate = limits.bandwidth_bytes_per_s, limits.operations_per_s
        bound_us = 1e6 * fmean(bound_s(work, limits, config.tp) for work in works)
    return steps | {
        "prediction": {
            "bytes_a_step": num_bytes,
            "operations_a_step": num_operations,
            "requests_a_step": fmean(facts.num_requests[is_ours].tolist()),
            "tokens_a_step": fmean(facts.num_tokens[is_ours].tolist()),
            "bound_us": bound_us,
            "measured_us": 1e6 * measured_s,
            "mbu": None if bandwidth is None else num_bytes / (measured_s * bandwidth * config.tp),
            "mfu": None if rate is None else num_operations / (measured_s * rate * config.tp),
            "limits": None if limits is None else limits.source,
            "formula": f"{FORMULA}; {SHARES}",
        }
    }


def prediction_lines(prediction: Mapping[str, Any]) -> list[str]:
    """Return the prediction as a person reads it."""
    seconds = prediction["measured_us"] / 1e6
    moved, computed = prediction["bytes_a_step"], prediction["operations_a_step"]
    lines = [
        f"a step ({prediction['requests_a_step']:.4g} requests, {prediction['tokens_a_step']:.4g} "
        f"tokens) must move {moved / 1e9:.4g} GB and compute {computed / 1e9:.4g} Gop; measured "
        f"{moved / seconds / 1e9:.4g} GB/s and {computed / seconds / 1e12:.4g} Top/s"
    ]
    if prediction["bound_us"] is None:
        lines.append("no bound: this machine's limits are not known; --bandwidth and --tflops say")
    else:
        shares = [
            f"{name.upper()} {prediction[name]:.1%}"
            for name in ("mbu", "mfu")
            if prediction[name] is not None
        ]
        reached = prediction["bound_us"] / prediction["measured_us"]
        lines.append(
            f"bound {prediction['bound_us']:,.1f} us, measured {prediction['measured_us']:,.1f}: "
            f"{reached:.1%} of what is possible; {', '.join(shares)} ({prediction['limits']})"
        )
    return [*lines, prediction["formula"]]
