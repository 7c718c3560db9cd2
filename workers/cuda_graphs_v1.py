"""Runner v1's CUDA graphs: one graph a batch size, for decode steps alone.

A graph replays fixed kernels on fixed addresses, so a step copies its inputs into the buffers seen
at capture, pads to the next captured size and replays. A padded row has query length 0, seq_len 0
and slot -1: it reads and writes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.workers.cuda_graphs import (
    CapturedGraph,
    capture_graph,
    capture_sizes,
    replay_graph,
)
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workers.spans import FORWARD, SAMPLE, STAGE

if TYPE_CHECKING:
    from nanorunner.workers.model_runner_v1 import Inputs, ModelRunner


class DecodeGraphs:
    """All decode graphs and the buffers they read.

    Owner: runner v1. Place: the device, at fixed addresses. Lifetime: from capture() to close();
    the contents live one step. Last writer: replay(), on the current stream.
    """

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        self.sizes = capture_sizes(config.max_num_seqs)
        self.dispatched: Counter[str] = Counter()  # "decode 8", "eager": steps so far
        self.padded_rows = 0  # computed in vain
        max_blocks = -(-config.max_model_len // BLOCK_SIZE)
        rows = config.max_num_seqs
        device = runner.device.torch_device
        self.input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((rows, max_blocks), dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.ascending = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.graphs: dict[int, list[CapturedGraph]] = {}  # size -> output [size, local_vocab]
        self._recorder = runner.recorder
        self._capture(runner)

    @torch.inference_mode()
    def _capture(self, runner: ModelRunner) -> None:
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):  # largest first: the smaller ones fit in its memory
            batch = AttentionBatch(
                query_start_loc=self.query_start_loc[: size + 1],
                seq_lens=self.seq_lens[:size],
                block_tables=self.block_tables[:size],
                slot_mapping=self.slot_mapping[:size],
                max_query_len=1,
                max_seq_len=runner.config.max_model_len,
            )

            def forward(size: int = size, batch: AttentionBatch = batch) -> torch.Tensor:
                hidden = runner.model.forward(
                    self.input_ids[:size],
                    self.positions[:size],
                    batch,
                    runner.k_caches,
                    runner.v_caches,
                )
                if self._recorder is not None:
                    self._recorder.lap(FORWARD, on_gpu=True)
                logits = runner.compute_local_logits(hidden)
                if self._recorder is not None:
                    self._recorder.lap(SAMPLE, on_gpu=True)
                return logits

            self.graphs[size] = capture_graph(forward, pool, self._recorder)

    def replay(self, inputs: Inputs) -> torch.Tensor:
        """Return the logits [num_reqs, local_vocab]; valid until the next replay."""
        num_reqs = len(inputs.input_ids)
        size = next(size for size in self.sizes if size >= num_reqs)
        batch = inputs.batch
        self.input_ids[:num_reqs] = inputs.input_ids
        self.positions[:num_reqs] = inputs.positions
        self.query_start_loc[: num_reqs + 1] = batch.query_start_loc
        self.query_start_loc[num_reqs + 1 : size + 1] = num_reqs
        self.seq_lens[:num_reqs] = batch.seq_lens
        self.seq_lens[num_reqs:size] = 0
        self.block_tables[:num_reqs, : batch.block_tables.shape[1]] = batch.block_tables
        self.slot_mapping[:num_reqs] = batch.slot_mapping
        self.slot_mapping[num_reqs:size] = -1
        if self._recorder is not None:
            self._recorder.lap(STAGE, on_gpu=True)
        logits = replay_graph(self.graphs[size], self._recorder)
        self.dispatched[f"decode {size}"] += 1
        self.padded_rows += size - num_reqs
        return logits[:num_reqs]
