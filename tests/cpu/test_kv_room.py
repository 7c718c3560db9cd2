"""How the KV cache is sized on a GPU: the books of workers/profile.py over a GPU of figures.

The GPU has 100 GiB. The engine's weights take 10, its widest step 8 more, its graphs 1, those of
its layers 0.5, half of it in PyTorch's books, and NCCL and kernels 2; other programs take what a
case says, before the start or in the middle of it.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanorunner.build import _agree_on_blocks
from nanorunner.workers.device import MemoryUse
from nanorunner.workers.messages import KvRoom
from nanorunner.workers.profile import GIB, MARGIN_BYTES, measure_kv_room

TOTAL, WEIGHTS, STEP, GRAPHS, OUTSIDE = (gib * GIB for gib in (100, 10, 8, 1, 2))
LAYERS_INSIDE = LAYERS_OUTSIDE = GIB // 4
LAYERS = LAYERS_INSIDE + LAYERS_OUTSIDE


class Gpu:
    """A device whose memory is a few numbers; what is foreign moves when the first step runs."""

    is_cuda = True

    def __init__(self, foreign_before: int, foreign_meanwhile: int) -> None:
        self.foreign, self.foreign_meanwhile = foreign_before, foreign_meanwhile
        self.reserved, self.outside, self.peak, self.kept = 0, 0, 0, 0

    def memory(self) -> MemoryUse:
        used = self.foreign + self.reserved + self.outside
        return MemoryUse(TOTAL, TOTAL - used, self.reserved, self.peak)

    def finish(self, timeout_s: float) -> None:
        """Nothing is under way."""

    def reset_peak(self) -> None:
        self.reserved = self.peak = WEIGHTS + self.kept


class Runner:
    """What measure_kv_room() asks of a runner."""

    rank, dtype, proposer = 0, torch.bfloat16, None

    def __init__(self, gpu: Gpu, *, utilization: float, enforce_eager: bool = False) -> None:
        self.device: Any = gpu
        self.model: Any = SimpleNamespace(local_kv_heads=8)
        self.config: Any = SimpleNamespace(
            model=SimpleNamespace(num_layers=36, head_dim=128),
            gpu_memory_utilization=utilization,
            enforce_eager=enforce_eager,
            share_gpu=False,
            num_blocks=None,
            kv_cache_bytes=None,
            max_model_len=40960,
            max_num_seqs=256,
            step_timeout_s=1.0,
        )
        self.memory_before: MemoryUse | None = gpu.memory()
        gpu.reserved, gpu.outside = WEIGHTS, OUTSIDE

    def allocate_kv(self, num_blocks: int) -> None:
        assert num_blocks == 1

    def release_kv(self) -> None:
        """It was of one block."""

    def widest_step(self) -> None:
        self.device.foreign += self.device.foreign_meanwhile
        self.device.foreign_meanwhile = 0
        self.device.peak = self.device.reserved = WEIGHTS + STEP

    def capture_layers(self) -> None:
        self.device.kept = LAYERS_INSIDE
        self.device.reserved += LAYERS_INSIDE
        self.device.outside += LAYERS_OUTSIDE

    def capture_graphs(self) -> object:
        self.device.outside += GRAPHS
        gpu = self.device

        class Graphs:
            def __del__(self) -> None:
                gpu.outside -= GRAPHS

        return Graphs()


@pytest.fixture(autouse=True)
def _allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: WEIGHTS)


def room_of(
    caplog: pytest.LogCaptureFixture,
    *,
    utilization: float = 0.9,
    before: int = 0,
    meanwhile: int = 0,
    **settings: Any,
) -> tuple[KvRoom, list[str]]:
    """Return the room, and the warnings that came with it."""
    caplog.set_level(logging.WARNING, "nanorunner")
    caplog.clear()
    runner = Runner(Gpu(before * GIB, meanwhile * GIB), utilization=utilization, **settings)
    return measure_kv_room(runner), [record.getMessage() for record in caplog.records]


def test_what_the_engine_itself_takes_leaves_its_share(caplog: pytest.LogCaptureFixture) -> None:
    room, warnings = room_of(caplog)
    left = int(0.9 * TOTAL) - WEIGHTS - STEP - GRAPHS - LAYERS - OUTSIDE - MARGIN_BYTES
    assert room.room_bytes == left
    assert room.num_blocks == left // room.block_bytes
    assert not warnings
    eager, _ = room_of(caplog, enforce_eager=True)
    assert eager.room_bytes == left + GRAPHS + LAYERS


def test_a_second_engine_gets_its_share_beside_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """What others held before the start is not billed, as long as the share is free."""
    alone, _ = room_of(caplog, utilization=0.4)
    beside, warnings = room_of(caplog, utilization=0.4, before=40)
    assert beside == alone
    assert not warnings


def test_others_that_leave_too_little_are_named(caplog: pytest.LogCaptureFixture) -> None:
    room, warnings = room_of(caplog, before=60)
    free = TOTAL - 60 * GIB - WEIGHTS - OUTSIDE
    assert room.room_bytes == free - STEP - GRAPHS - LAYERS - MARGIN_BYTES
    assert len(warnings) == 1
    assert "60.0 GiB of the GPU are used by others" in warnings[0]


def test_memory_that_goes_meanwhile_is_named(caplog: pytest.LogCaptureFixture) -> None:
    alone, _ = room_of(caplog, utilization=0.35)
    room, warnings = room_of(caplog, utilization=0.35, meanwhile=15)
    assert room.room_bytes == alone.room_bytes - 15 * GIB
    assert len(warnings) == 1
    assert "17.0 GiB of the GPU went while this engine started" in warnings[0]
    nothing, _ = room_of(caplog, utilization=0.2, meanwhile=40)
    assert nothing.num_blocks == 0, "never a negative count"


def test_every_rank_gets_what_the_poorest_has_room_for() -> None:
    config: Any = SimpleNamespace(
        gpu_memory_utilization=0.9, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
    )
    rooms = [KvRoom(blocks, 1 << 20, blocks << 20) for blocks in (9, 7, 8)]
    assert _agree_on_blocks(rooms, config) == 7
    rooms[1] = KvRoom(0, 1 << 20, -5)
    with pytest.raises(ValueError, match=r"no room for the KV cache on rank 1: .* 0\.000 GiB"):
        _agree_on_blocks(rooms, config)
