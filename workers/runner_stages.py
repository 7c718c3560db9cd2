"""What both runners hold and do before their first step, and after their last.

    load_model     this rank's share of the weights
    profile        how many KV blocks fit beside the widest step (profile.py)
    allocate_kv    the cache, and one K and one V view a layer
    capture        kernels compiled, decode graphs captured
    ... steps: model_runner_v1.py, model_runner.py ...
    close

Each is a call on the wire (messages.Runner), so every rank makes them in this order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from nanorunner.kernels.warm_up import warm_up_attention
from nanorunner.workers import kv_cache
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import KvRoom, RunnerConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.profile import measure_kv_room
from nanorunner.workers.rank_counters import RankCounters, read_counters
from nanorunner.workers.weights import load_weights


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
        self.model = Decoder(
            config.model,
            tp=config.tp,
            rank=rank,
            dtype=self.dtype,
            device=device.torch_device,
            group=group,
            attention_backend=config.attention_backend,
            max_model_len=config.max_model_len,
            batch_invariant=config.batch_invariant,
        )
        self.graphs: Any = None  # what capture_graphs() returned

    def load_model(self) -> None:
        """Fill this rank's share of the weights."""
        load_weights(self.model, self.config)

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

    def release_kv(self) -> None:
        """Give the cache's memory back."""
        self.k_caches = self.v_caches = []
        self.kv_cache = torch.empty(0)

    def capture(self) -> None:
        """Compile the kernels that serving will use, then capture the decode graphs."""
        if self.config.attention_backend == "triton":
            warm_up_attention(
                qkv_width=self.model.layers[0].qkv.shape[0],
                num_heads=self.model.local_heads,
                k_cache=self.k_caches[0],
                v_cache=self.v_caches[0],
                dtype=self.dtype,
                max_num_reqs=self.config.max_num_seqs,
            )
        self.warm_up()
        self.graphs = self.capture_graphs()

    @abstractmethod
    def warm_up(self) -> None:
        """Run every kind of step once; no KV and no live state is written."""

    @abstractmethod
    def widest_step(self) -> None:
        """Run the largest prefill and the largest sampler batch, touching no live state."""

    @abstractmethod
    def capture_graphs(self) -> Any:
        """Return what holds the decode graphs, captured if has_graphs."""

    def counters(self) -> RankCounters:
        """Return what this rank has counted since its start; for between two steps."""
        if self.graphs is None:
            return read_counters({}, 0)
        return read_counters(self.graphs.dispatched, self.graphs.padded_rows)

    def close(self) -> None:
        """Free graphs, cache and weights, and leave the group; a second call does nothing."""
        self.graphs = None
        self.release_kv()
        self.model.release()
        self.group.close()
        self.device.release()
