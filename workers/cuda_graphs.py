"""Runner v2's CUDA graphs: what is captured, when a graph may serve a step, and how often it did.

    Descriptor(num_reqs, family, query_len, is_even)
        PLAIN    input kernels, forward, logits, sampling, state advance: a whole step, one replay
        LOGITS   input kernels, forward, logits: for batches in which some row wants more of the
                 sampler than temperature and seed, which then follows outside

A graph serves a batch when it is all decodes, of the family's kind, of query_len places each (1:
plain; more: they verify drafts), and not more than num_reqs; the smallest such graph is taken. At
sizes at which attention goes another way for requests of even lengths there is a graph for them
beside the other (kernels/fused_decode.py).
A short step that a prompt joins replays graphs of what lies between its attentions, "layers 192"
(layer_graphs.py). Everything else runs eagerly. Every decision is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nanorunner.kernels.triton_support import is_compiling_only
from nanorunner.workers.gpu_spans import GraphMarks
from nanorunner.workers.layer_graphs import LayerGraphs
from nanorunner.workers.spans import SpanRecorder

PLAIN, LOGITS = "plain", "logits"
FAMILIES = (PLAIN, LOGITS)
EAGER, LAYERS = "eager", "layers"
# A verify step wider than this is as long on the GPU as its launches take, so it needs no graph.
MAX_VERIFY_PLACES = 512


class Descriptor(NamedTuple):
    """One graph: the decode of up to num_reqs requests, padded to exactly that many."""

    num_reqs: int
    family: str
    query_len: int = 1  # places of each (places.py)
    is_even: bool = False  # for requests of which none is much longer than the others

    @property
    def num_places(self) -> int:
        """Rows of the forward."""
        return self.num_reqs * self.query_len

    def __str__(self) -> str:
        """Return the name that a dispatch is counted under."""
        drafts = f" x {self.query_len}" if self.query_len > 1 else ""
        return f"{self.family} {self.num_reqs}{drafts}{' even' if self.is_even else ''}"


class CapturedGraph(NamedTuple):
    """A graph, what its body returned, and in an engine that records spans the events in it."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    marks: GraphMarks | None


def capture_graph(
    body: Callable[[], torch.Tensor], pool: Any, recorder: SpanRecorder | None
) -> list[CapturedGraph]:
    """Capture a body; several equal copies where their events must take turns (gpu_spans.py).

    Runs it once before: libraries set themselves up at the first call, which a capture forbids.
    While kernels are only compiled (kernels/compile_ahead.py) that is all, and no copy comes back.
    """
    body()
    if is_compiling_only():
        return []
    gpu = None if recorder is None else recorder.gpu
    copies = []
    for _ in range(1 if gpu is None else gpu.graph_copies):
        graph = torch.cuda.CUDAGraph()
        # thread_local: the watcher's thread of rank 0 may touch the driver meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            if gpu is not None:
                gpu.begin_capture()
            output = body()
        copies.append(CapturedGraph(graph, output, None if gpu is None else gpu.end_capture()))
    return copies


def replay_graph(copies: Sequence[CapturedGraph], recorder: SpanRecorder | None) -> torch.Tensor:
    """Enqueue a graph and return its output."""
    if recorder is not None:
        output: torch.Tensor = recorder.replay(copies).output
        return output
    copies[0].graph.replay()
    return copies[0].output


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending; the last one is always max_num_seqs.

    Without a graph at the widest legal batch an engine falls off its fast path at full load.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class GraphManager:
    """All graphs of one rank.

    Their outputs, what the bodies returned at capture: Owner: this object. Place: the device, in
    the graphs' shared memory pool. Lifetime: contents until the next replay of any graph. Last
    writer: that replay, on the main stream.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        is_enabled: bool,
        recorder: SpanRecorder | None = None,
        max_query_len: int = 1,
        differs_when_even: Callable[[int], bool] = lambda num_reqs: False,
    ) -> None:
        """Make it empty; differs_when_even: whether a plain decode of so many requests does."""
        self.sizes = capture_sizes(max_num_seqs) if is_enabled else []
        self.query_lens = (1,) if max_query_len == 1 else (1, max_query_len)
        self._even_sizes = {size for size in self.sizes if differs_when_even(size)}
        # "plain 8", "logits 8", "plain 64 even", "plain 8 x 5", "layers 192", "eager": steps so far
        self.dispatched: Counter[str] = Counter()
        self.padded_rows = 0  # computed in vain
        self._recorder = recorder
        self._graphs: dict[Descriptor, list[CapturedGraph]] = {}
        self.layers: LayerGraphs | None = None  # the runner's

    def capture(self, body: Callable[[Descriptor], torch.Tensor]) -> None:
        """Capture body(descriptor) for every size and family.

        Each runs once before; the caller sees to it that a run writes no live state.
        """
        pool = torch.cuda.graph_pool_handle()
        for descriptor in self._descriptors():
            self._graphs[descriptor] = capture_graph(
                partial(body, descriptor), pool, self._recorder
            )

    def _descriptors(self) -> list[Descriptor]:
        """Return all graphs, the largest first: the smaller ones fit in its memory."""
        all_of_them = [
            Descriptor(size, family, query_len, is_even)
            for size in self.sizes
            for family in FAMILIES
            for query_len in self.query_lens
            for is_even in (False, True)
            if query_len == 1 or size * query_len <= MAX_VERIFY_PLACES
            if not is_even or self._has_even(size, query_len)
        ]
        return sorted(all_of_them, key=lambda descriptor: -descriptor.num_places)

    def _has_even(self, size: int, query_len: int) -> bool:
        """Return whether even requests have a graph of their own."""
        return query_len == 1 and size in self._even_sizes

    def dispatch(
        self,
        num_reqs: int,
        *,
        is_decode: bool,
        is_plain: bool,
        query_len: int = 1,
        is_even: bool = False,
    ) -> Descriptor | None:
        """Return the graph that serves all of this batch, None for none; counts it."""
        place = bisect_left(self.sizes, num_reqs) if is_decode else len(self.sizes)
        descriptor = None
        if place < len(self.sizes):
            family = PLAIN if is_plain else LOGITS
            size = self.sizes[place]
            is_even = is_even and self._has_even(size, query_len)
            descriptor = Descriptor(size, family, query_len, is_even)
        if descriptor not in self._graphs:
            return None
        self.dispatched[str(descriptor)] += 1
        self.padded_rows += descriptor.num_places - num_reqs * query_len
        return descriptor

    def dispatch_layers(self, num_tokens: int, max_query_len: int) -> int | None:
        """Return the size of the graphs that serve the layers of a batch that dispatch() refused.

        None for an eager step; counts the decision.
        """
        size = None
        if self.layers is not None and max_query_len > 1:  # else the decoder has lean launches
            size = self.layers.size_for(num_tokens)
        if size is None:
            self.dispatched[EAGER] += 1
            return None
        self.dispatched[f"{LAYERS} {size}"] += 1
        self.padded_rows += size - num_tokens
        return size

    def replay(self, descriptor: Descriptor) -> torch.Tensor:
        """Enqueue a graph and return its output; valid until the next replay."""
        return replay_graph(self._graphs[descriptor], self._recorder)
