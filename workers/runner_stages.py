"""What both runners hold and do before their first step, and after their last.

    load_model     this rank's share of the weights; on a GPU all kernels compile meanwhile
    profile        how many KV blocks fit beside the widest step (profile.py); graphs of the layers
    allocate_kv    the cache, and one K and one V view a layer
    capture        every kind of step once, decode graphs captured
    ... steps: model_runner_v1.py, model_runner.py ...
    close

Each is a call on the wire (messages.Runner), so every rank makes them in this order.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import torch

from nanorunner.kernels.compile_ahead import compile_ahead, threads_of_rank
from nanorunner.kernels.triton_support import triton
from nanorunner.workers import kv_cache
from nanorunner.workers.attention_warm_up import exercise_attention
from nanorunner.workers.check_ranks import RankCheck
from nanorunner.workers.checked_group import CheckedGroup
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import KvRoom, RunnerConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.profile import measure_kv_room
from nanorunner.workers.proposer import Proposer
from nanorunner.workers.rank_counters import RankCounters, read_counters
from nanorunner.workers.shard_checksums import Checksums, shard_checksums
from nanorunner.workers.span_recording import open_recorder
from nanorunner.workers.spans import RankSpans
from nanorunner.workers.trace_file import write_trace
from nanorunner.workers.traced_group import TracedGroup
from nanorunner.workers.weights import load_weights

logger = logging.getLogger("nanorunner")

REHEARSED_LAYERS = 2  # the first one has no residual yet, all others launch what the second does
LAST_EVENTS_WAIT_S = 2.0  # for the last steps' GPU spans; after a failure they may never come


class RunnerStages(ABC):
    """One rank's share of the model and its KV cache. A runner adds the steps.

    kv_cache [2, layers, blocks, 256, local_kv_heads, head_dim]. Owner: this object. Place: the
    device. Lifetime: from allocate_kv() to release_kv(). Last writer: a step, on the main stream.
    """

    def __init__(self, config: RunnerConfig, rank: int, group: Group, device: Device) -> None:
        self.config = config
        self.rank = rank
        self.group = group
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.has_graphs = device.is_cuda and not config.enforce_eager
        self.memory_before = device.memory() if device.is_cuda else None
        self.recorder = open_recorder(config, rank, device)  # None: no spans are wanted
        self.check = RankCheck(config, group) if config.check_ranks else None
        # the ranks as model and sampler see them; at tp 1 there is nothing to time
        self.peers: Group | TracedGroup | CheckedGroup = group
        if self.recorder is not None and config.tp > 1:
            self.peers = TracedGroup(group, self.recorder)
        if self.check is not None:
            self.peers = CheckedGroup(group, self.check)
        self.model = Decoder(
            config.model,
            tp=config.tp,
            rank=rank,
            dtype=self.dtype,
            device=device.torch_device,
            group=self.peers,
            attention_backend=config.attention_backend,
            max_model_len=config.max_model_len,
            batch_invariant=config.batch_invariant,
        )
        self.graphs: Any = None  # what capture_graphs() returned

    @property
    def proposer(self) -> Proposer | None:
        """What drafts for this runner, and goes through the stages with it; None: nothing does."""
        return None

    def load_model(self) -> None:
        """Fill this rank's share of the weights; kernels compile meanwhile (compile_ahead.py)."""
        start = time.perf_counter()
        if not self.device.is_cuda or triton is None:
            self._load_weights()
            return
        device, threads = self.device.torch_device, threads_of_rank(self.config.tp)
        with compile_ahead(device, threads, self.config.start_timeout_s) as compilers:
            with compilers.rehearsal():
                self._rehearse()
            rehearsed = time.perf_counter()
            self._load_weights()
            self.device.finish(self.config.start_timeout_s)
            loaded = time.perf_counter()
            num_kernels = len(compilers.futures)
        logger.info(
            "r%d start: rehearsal of %d kernels %.1f s, weights %.1f, then %.1f until all were "
            "compiled, on %d threads",
            self.rank,
            num_kernels,
            rehearsed - start,
            loaded - rehearsed,
            time.perf_counter() - loaded,
            threads,
        )

    def profile(self) -> KvRoom:
        """Return how many KV blocks this rank has room for."""
        return measure_kv_room(self)

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV cache and bind one K and one V view to each layer."""
        model = self.config.model
        self.kv_cache = kv_cache.allocate(
            model.num_layers,
            num_blocks,
            self.model.local_kv_heads,
            model.head_dim,
            self.dtype,
            self.device.torch_device,
        )
        self.k_caches = list(self.kv_cache[0])  # layer -> [num_blocks, 256, heads, dim]
        self.v_caches = list(self.kv_cache[1])
        if self.proposer is not None:
            self.proposer.allocate_kv(num_blocks)

    def release_kv(self) -> None:
        """Give the cache's memory back."""
        self.k_caches = self.v_caches = []
        self.kv_cache = torch.empty(0)
        if self.proposer is not None:
            self.proposer.release_kv()

    def capture(self) -> None:
        """Run every kind of step once, then capture the decode graphs."""
        self._exercise()
        self.graphs = self.capture_graphs()
        if self.check is not None:
            self.check.watch(self.model)

    def _load_weights(self) -> None:
        """Fill the model, and the draft model if there is one."""
        load_weights(self.model, self.config)
        if self.proposer is not None:
            self.proposer.load()

    def _rehearse(self) -> None:
        """Make every launch of the later stages, on few layers and a cache of one block."""
        drafting = None if self.proposer is None else self.proposer.decoder
        with ExitStack() as stack:
            self.allocate_kv(num_blocks=1)
            stack.callback(self.release_kv)
            for decoder in (self.model, drafting):
                if decoder is not None:
                    stack.callback(setattr, decoder, "layers", decoder.layers)
                    decoder.layers = decoder.layers[:REHEARSED_LAYERS]
            self._exercise()
            self.widest_step()
            self.capture_graphs()

    def _exercise(self) -> None:
        """Launch every attention kernel over no data, then run every kind of step once."""
        if self.config.attention_backend == "triton":
            max_places = self.config.max_num_seqs * self.config.max_query_len
            exercise_attention(
                self.model,
                self.k_caches[0],
                self.v_caches[0],
                max_places,
                beside_prompts=self.config.runner == "v2",  # v1 leaves num_decodes at 0
            )
            if self.proposer is not None:
                self.proposer.exercise()
        self.warm_up()

    @abstractmethod
    def warm_up(self) -> None:
        """Run every kind of step once; no KV and no live state is written."""

    @abstractmethod
    def widest_step(self) -> None:
        """Run the largest prefill and the largest sampler batch, touching no live state."""

    @abstractmethod
    def capture_graphs(self) -> Any:
        """Return what holds the decode graphs, captured if has_graphs."""

    def capture_layers(self) -> None:
        """Capture the graphs that are captured once and stay, if the runner has such."""
        return None

    def checksums(self) -> dict[str, Checksums]:
        """Return the checksums of the weights that this rank holds; for between two steps."""
        return shard_checksums(self.model)

    def counters(self) -> RankCounters:
        """Return what this rank has counted since its start; for between two steps."""
        if self.graphs is None:
            return read_counters({}, 0)
        return read_counters(self.graphs.dispatched, self.graphs.padded_rows)

    def spans(self) -> RankSpans:
        """Return what this rank has recorded since its start; for between two steps."""
        if self.recorder is None:
            raise RuntimeError("this engine records no spans; start it with step_times or trace")
        return self.recorder.collect(self.config.step_timeout_s)

    def close(self) -> None:
        """Write the trace if one is wanted, free graphs, cache and weights, and leave the group.

        A second call does nothing.
        """
        recorder, self.recorder = self.recorder, None
        try:
            if recorder is not None and self.config.trace is not None:
                write_trace(self.config, recorder.collect(LAST_EVENTS_WAIT_S))
        except (OSError, RuntimeError) as error:
            logger.error("the trace of rank %d is lost: %s", self.rank, error)
            if isinstance(error, OSError):
                raise  # a broken device, else: the step that broke it has said so
        finally:
            self.graphs = None
            self.release_kv()
            if self.proposer is not None:
                self.proposer.close()
            self.model.release()
            self.group.close()
            self.device.release()
