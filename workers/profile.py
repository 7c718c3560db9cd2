"""How many KV blocks fit: measured at the widest step that serving allows, not estimated.

On a GPU: one unmeasured pass, so that compilation leaves no trace in the figures and a cold start
gets as many blocks as a warm one; then the widest forward, the widest sampler and all the graphs,
on a one-block cache that is thrown away, as are the graphs that hold its address. What is left of
this instance's share is the cache.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from nanorunner.workers import kv_cache
from nanorunner.workers.device import Device, MemoryUse
from nanorunner.workers.messages import BLOCK_SIZE, KvRoom, RunnerConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.proposer import Proposer

GIB, MIB = 1 << 30, 1 << 20
MARGIN_BYTES = 64 << 20  # fragmentation between the rehearsal and the real thing
MOST_OUTSIDE_BYTES = 4 << 30  # of NCCL, kernels and the like; more is presumably another program's

logger = logging.getLogger("nanorunner")


class Profiled(Protocol):
    """What a runner must offer to have its memory measured."""

    config: RunnerConfig
    rank: int
    device: Device
    dtype: torch.dtype
    model: Decoder
    memory_before: MemoryUse | None

    @property
    def proposer(self) -> Proposer | None:
        """What drafts, and may have a KV cache of its own."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate a KV cache."""

    def release_kv(self) -> None:
        """Give it back."""

    def widest_step(self) -> None:
        """Run the largest prefill and the largest sampler batch, touching no live state."""

    def capture_layers(self) -> None:
        """Capture the graphs that hold no address of the KV cache: they stay."""

    def capture_graphs(self) -> Any:
        """Capture every graph that does, and return what holds them."""


def measure_kv_room(runner: Profiled) -> KvRoom:
    """Return how many blocks this rank can hold, 0 when not even one fits."""
    config = runner.config
    itemsize = torch.empty(0, dtype=runner.dtype).element_size()
    size = kv_cache.block_bytes(
        config.model.num_layers, runner.model.local_kv_heads, config.model.head_dim, itemsize
    )
    drafting = 0 if runner.proposer is None else runner.proposer.block_bytes()
    if drafting:
        logger.info(
            "r%d KV cache: a block of %d tokens takes %.2f MiB for the model and %.2f MiB for the "
            "draft model, %.2f MiB in all",
            runner.rank,
            BLOCK_SIZE,
            size / MIB,
            drafting / MIB,
            (size + drafting) / MIB,
        )
        size += drafting
    blocks_a_request = -(-config.max_model_len // BLOCK_SIZE)
    all_requests = config.max_num_seqs * blocks_a_request
    if config.num_blocks is not None:
        return KvRoom(config.num_blocks, size, config.num_blocks * size)
    if runner.device.is_cuda and not config.share_gpu:
        room = _gpu_room(runner)
        if config.kv_cache_bytes is not None:
            room = min(room, config.kv_cache_bytes)
    else:
        assert config.kv_cache_bytes is not None, "resolve.py sizes what cannot be measured"
        if runner.device.is_cuda:
            _try_widest_step(runner)
        room = config.kv_cache_bytes
    # more blocks than every request at its longest can fill would only cost memory; twice that
    # many keep finished prompts for the prefix cache
    return KvRoom(max(0, min(room // size, 2 * all_requests)), size, room)


def _try_widest_step(runner: Profiled) -> None:
    """Fail here, at the start, when a shared GPU has no memory for the step that takes the most.

    How much it leaves cannot be measured: the other ranks allocate meanwhile.
    """
    runner.allocate_kv(num_blocks=1)
    runner.widest_step()
    runner.device.finish(runner.config.step_timeout_s)
    runner.release_kv()
    runner.device.release()


def _gpu_room(runner: Profiled) -> int:
    """Return the bytes of this instance's share that its widest step leaves for the cache."""
    config, device = runner.config, runner.device
    before = runner.memory_before
    assert before is not None, "a GPU runner records its memory before it allocates"
    runner.allocate_kv(num_blocks=1)
    runner.widest_step()
    device.finish(config.step_timeout_s)
    device.reset_peak()
    runner.widest_step()
    device.finish(config.step_timeout_s)
    peak = device.memory().peak
    layer_bytes = graph_bytes = kept_outside = 0
    allocated = torch.cuda.memory_allocated()
    if not config.enforce_eager:
        device.reset_peak()
        begin = device.memory()
        runner.capture_layers()
        device.reset_peak()
        middle = device.memory()
        layer_bytes = max(0, begin.free - middle.free)
        kept_outside = max(0, layer_bytes - (middle.reserved - begin.reserved))
        graphs = runner.capture_graphs()
        graph_bytes = max(0, middle.free - device.memory().free)
        del graphs
    runner.release_kv()
    device.reset_peak()
    now = device.memory()
    # NCCL, kernels and the like: gone from the driver, not in PyTorch's books
    outside = max(0, (before.free - now.free) - (now.reserved - before.reserved) - kept_outside)
    if outside > MOST_OUTSIDE_BYTES:
        logger.warning(
            "r%d: %.1f GiB of the GPU went while this engine started, and it did not take them: "
            "does another program start on it? Its memory counts as this engine's now, and the KV "
            "cache gets less; start them one after the other",
            runner.rank,
            outside / GIB,
        )
    share = int(now.total * config.gpu_memory_utilization)
    room = share - peak - outside - layer_bytes - graph_bytes - MARGIN_BYTES
    headroom = now.free - (peak - allocated) - graph_bytes - MARGIN_BYTES
    if headroom < room:
        logger.warning(
            "r%d: %.1f GiB of the GPU are used by others, so the KV cache gets %.1f GiB instead "
            "of %.1f",
            runner.rank,
            (now.total - before.free) / GIB,
            max(headroom, 0) / GIB,
            room / GIB,
        )
    logger.info(
        "r%d memory: share %.2f GiB, peak of weights and widest step %.2f, graphs %.2f, "
        "outside PyTorch %.2f, left for the KV cache %.2f",
        runner.rank,
        share / GIB,
        peak / GIB,
        (layer_bytes + graph_bytes) / GIB,
        outside / GIB,
        min(room, headroom) / GIB,
    )
    return min(room, headroom)
