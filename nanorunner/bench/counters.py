"""What the engine counted while it was measured: the scheduler's books and the ranks' own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any, NamedTuple

from nanorunner.bench.metrics import RequestRecord
from nanorunner.bench.resources import GIB, has_nvml, host_peak_gib
from nanorunner.engine import Engine
from nanorunner.workers.rank_counters import RankCounters


class Reading(NamedTuple):
    """All totals of an engine at one moment, no step in flight."""

    scheduler: dict[str, int]
    ranks: list[RankCounters]
    drafts_meant: list[int]  # by place behind a request's newest token; [] without speculation
    drafts_accepted: list[int]


def read(engine: Engine) -> Reading:
    """Return the totals since the start."""
    drafts = engine.scheduler.drafts.stats
    meant, accepted = drafts.meant.tolist(), drafts.accepted.tolist()
    return Reading(asdict(engine.stats), engine.counters(), meant, accepted)


def count(
    before: Reading,
    after: Reading,
    passes: Sequence[Sequence[RequestRecord]],
    *,
    skipped_idle_s: float,
    num_gpus: int,
) -> dict[str, Any]:
    """Return a result's "counters", of all measured passes together."""
    scheduler = {
        name: total if name.startswith("peak") else total - before.scheduler[name]
        for name, total in after.scheduler.items()
    }
    records = [record for one in passes for record in one]
    finished = [record for record in records if record.is_finished]
    known = scheduler["cached_tokens"] + scheduler["prefill_tokens"]
    not_counted = {}
    if num_gpus and not has_nvml():
        not_counted["GPU use"] = "pynvml is not there; pip install nvidia-ml-py"
    return {
        "requests": len(records),
        "finished": len(finished),
        "failed": len(records) - len(finished),
        "input_tokens": sum(record.input_tokens for record in finished),
        "output_tokens": sum(len(record.token_ids) for record in finished),
        "skipped_idle_s": skipped_idle_s,
        "scheduler": scheduler,
        "prefix_hit_share": scheduler["cached_tokens"] / known if known else 0.0,
        "drafts": _drafts(before, after, scheduler) if after.drafts_meant else None,
        "graphs": _graphs(before.ranks, after.ranks),
        "memory": _memory(after.ranks),
        "not_counted": not_counted,
    }


def _drafts(before: Reading, after: Reading, scheduler: dict[str, int]) -> dict[str, Any]:
    """Return what came of speculation between two readings.

    acceptance: the accepted share of the drafts proposed in each place. mean_accepted_length: ids
    that a request gets from a step in which it has drafts, 1 and those that came true.
    """
    pairs = zip(after.drafts_meant, before.drafts_meant, strict=True)
    meant = [now - then for now, then in pairs]
    pairs = zip(after.drafts_accepted, before.drafts_accepted, strict=True)
    accepted = [now - then for now, then in pairs]
    rows = scheduler["verified_rows"]
    return {
        "meant": meant,
        "accepted": accepted,
        "acceptance": [a / m if m else 0.0 for a, m in zip(accepted, meant, strict=True)],
        "mean_accepted_length": 1 + sum(accepted) / rows if rows else 1.0,
        "verify_steps": scheduler["verify_steps"],
        "steps": scheduler["steps"],
    }


def _graphs(before: list[RankCounters], after: list[RankCounters]) -> dict[str, Any]:
    """Return rank 0's graph steps between two readings; every rank takes the same."""
    steps = Counter(after[0].graph_steps)
    steps.subtract(before[0].graph_steps)
    padded = after[0].padded_rows - before[0].padded_rows
    rows = sum(count * _rows_of(name) for name, count in steps.items())
    return {
        "dispatched": {name: count for name, count in sorted(steps.items()) if count},
        "padded_rows": padded,
        "padded_share": padded / rows if rows else 0.0,
    }


def _rows_of(name: str) -> int:
    """Return the rows that a graph computes: 8 of "plain 8", 40 of "plain 8 x 5", 0 of "eager"."""
    return prod(int(word) for word in name.split() if word.isdecimal()) if " " in name else 0


def _memory(ranks: Sequence[RankCounters]) -> dict[str, Any]:
    gpu = [rank.gpu_peak_bytes / GIB for rank in ranks if rank.gpu_peak_bytes is not None]
    pinned = [rank.pinned_peak_bytes / GIB for rank in ranks if rank.pinned_peak_bytes is not None]
    return {
        "host_peak_gib": host_peak_gib(),
        "gpu_peak_gib": gpu or None,
        "pinned_peak_gib": pinned or None,
    }
