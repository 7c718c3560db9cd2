"""What one rank counted while it served, for whoever measures it; read between two passes.

Graph steps and padded rows are counted by the runner's own graphs (cuda_graphs.py and
cuda_graphs_v1.py); the memory peaks are PyTorch's, since the KV cache was sized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

PINNED_PEAK_KEYS = ("allocated_bytes.peak", "reserved_bytes.peak")  # by the version of PyTorch


class RankCounters(NamedTuple):
    """Totals since the start, the same on every rank but for the memory."""

    graph_steps: dict[str, int]  # "plain 8", "logits 8", "layers 192", "eager": steps so far
    padded_rows: int  # of graphs, computed in vain
    gpu_peak_bytes: int | None  # None on a CPU
    pinned_peak_bytes: int | None  # None on a CPU


def read_counters(graph_steps: Mapping[str, int], padded_rows: int) -> RankCounters:
    """Return this rank's counters beside what its graphs have counted."""
    steps = {name: count for name, count in graph_steps.items() if count}
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return RankCounters(steps, padded_rows, None, None)
    pinned = torch.cuda.host_memory_stats()
    peaks = [int(pinned[key]) for key in PINNED_PEAK_KEYS if key in pinned]
    return RankCounters(
        steps, padded_rows, torch.cuda.max_memory_allocated(), peaks[0] if peaks else None
    )
