"""Runner v2's CUDA graphs: what is captured, when a graph may serve a step, and how often it did.

    Descriptor(num_reqs, family)
        PLAIN    input kernels, forward, logits, sampling, state advance: a whole step, one replay
        LOGITS   input kernels, forward, logits: for batches in which some row wants more of the
                 sampler than temperature and seed, which then follows outside

A graph serves a batch when it is all decodes, of the family's kind, and not more than num_reqs;
the smallest such graph is taken. Everything else runs eagerly. Every decision is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

PLAIN, LOGITS = "plain", "logits"
FAMILIES = (PLAIN, LOGITS)
EAGER = "eager"


class Descriptor(NamedTuple):
    """One graph: the decode of up to num_reqs requests, padded to exactly that many."""

    num_reqs: int
    family: str


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending; the last one is always max_num_seqs.

    Without a graph at the widest legal batch an engine falls off its fast path at full load.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class GraphManager:
    """All graphs of one rank.

    outputs: descriptor -> what its body returned at capture. Owner: this object. Place: the device,
    in the graphs' shared memory pool. Lifetime: contents until the next replay of any graph. Last
    writer: that replay, on the main stream.
    """

    def __init__(self, max_num_seqs: int, *, is_enabled: bool) -> None:
        self.sizes = capture_sizes(max_num_seqs) if is_enabled else []
        self.dispatched: Counter[str] = Counter()  # "plain 8", "logits 8", "eager": steps so far
        self.padded_rows = 0  # computed in vain
        self._graphs: dict[Descriptor, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[Descriptor, torch.Tensor] = {}

    def capture(self, body: Callable[[Descriptor], torch.Tensor]) -> None:
        """Capture body(descriptor) for every size and family.

        Runs each body once before, because a capture may not compile kernels; the caller sees to
        it that a run writes no live state.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):  # the largest first: the smaller ones fit in its memory
            for family in FAMILIES:
                descriptor = Descriptor(size, family)
                body(descriptor)
                graph = torch.cuda.CUDAGraph()
                # thread_local: the watcher's thread of rank 0 may touch the driver meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self.outputs[descriptor] = body(descriptor)
                self._graphs[descriptor] = graph

    def dispatch(self, num_reqs: int, *, is_decode: bool, is_plain: bool) -> Descriptor | None:
        """Return the graph that serves this batch, None for an eager step; counts the decision."""
        place = bisect_left(self.sizes, num_reqs) if is_decode else len(self.sizes)
        if place == len(self.sizes) or not self._graphs:
            self.dispatched[EAGER] += 1
            return None
        descriptor = Descriptor(self.sizes[place], PLAIN if is_plain else LOGITS)
        self.dispatched[f"{descriptor.family} {descriptor.num_reqs}"] += 1
        self.padded_rows += descriptor.num_reqs - num_reqs
        return descriptor

    def replay(self, descriptor: Descriptor) -> torch.Tensor:
        """Enqueue a graph and return its output; valid until the next replay."""
        self._graphs[descriptor].replay()
        return self.outputs[descriptor]
