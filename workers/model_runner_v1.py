"""Runner v1, the textbook runner: prepare, run, sample, one step at a time.

    step(wire) -> Sequences.apply -> run(seqs, is_prefill)
        prepare_prefill | prepare_decode    Python loops over sequences -> input tensors
        prepare_sample                      rank 0 alone
        run_model                           eager for prefill, CUDA graph replay for decode
        sampler                             rank 0 alone, from the gathered logits

A step that holds any prefill token is one packed forward, decodes being rows of length 1; a step
of decodes alone takes the decode path and its graphs. The step is synchronous: step() returns when
rank 0 has read the ids. Runner v2 exists to remove exactly those waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.few_rows_plans import MAX_ROWS
from nanorunner.workers.cuda_graphs import EAGER, capture_sizes
from nanorunner.workers.cuda_graphs_v1 import DecodeGraphs
from nanorunner.workers.device import Device, Download
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import BLOCK_SIZE, RunnerConfig, StepInput, StepOutput
from nanorunner.workers.runner_stages import RunnerStages
from nanorunner.workers.sampler import Sampler
from nanorunner.workers.sequences_v1 import Sequence, Sequences
from nanorunner.workers.spans import (
    APPLY,
    DOWNLOAD,
    FORWARD,
    PREPARE,
    SAMPLE,
    WAIT,
    SpanRecorder,
)


class Inputs(NamedTuple):
    """What one forward takes, on the device."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    batch: AttentionBatch
    logits_rows: torch.Tensor | None  # [num_sampled] int64; None: every row samples


class FinishedStep:
    """The handle of a step that is already over: v1 has waited for it."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        """Return what the step sampled, at once."""
        return self._output


class ModelRunner(RunnerStages):
    """One rank's executor: its share of the weights, its KV cache, its graphs."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group, device: Device) -> None:
        super().__init__(config, rank, group, device)
        self.sampler = Sampler()
        self.sequences = Sequences()
        self.graphs: DecodeGraphs | None = None

    # ---- before the first step: its part of the stages (runner_stages.py) ----------------------

    def capture_graphs(self) -> DecodeGraphs | None:
        """Capture a graph for every decode batch size, None when graphs are off."""
        return DecodeGraphs(self) if self.has_graphs else None

    @torch.inference_mode()
    def widest_step(self) -> None:
        """Run the largest prefill, then the largest sampler batch, without touching live state."""
        config = self.config
        query_len = min(config.max_num_batched_tokens, config.max_model_len)
        num_reqs = min(config.max_num_seqs, max(1, config.max_num_batched_tokens // query_len))
        self.run_eager(self.dummy_inputs(num_reqs, query_len))
        decode = self.dummy_inputs(config.max_num_seqs, 1)
        logits = self.run_model(decode._replace(logits_rows=None), is_prefill=True)
        if logits is not None:
            self.sampler(logits, **self.dummy_sampling(len(logits), top_k=50, top_p=0.9))

    @torch.inference_mode()
    def warm_up(self, num_tokens: int = 32) -> None:
        """Run one prefill, one decode and the sampler on no live state: every slot is -1.

        Reads block 0, whatever it holds, and throws the result away.
        """
        for query_len in (min(num_tokens, self.config.max_model_len), 1):
            logits = self.run_model(self.dummy_inputs(1, query_len), is_prefill=True)
            if logits is not None:
                for top_k in (0, 2):  # the plain path, and the one that masks
                    self.sampler(logits, **self.dummy_sampling(1, top_k, top_p=1.0))
        if self.model.has_few_rows and not self.has_graphs:  # graphs run these before capture
            most = max(MAX_ROWS, self.model.max_medium_rows)
            for num_reqs in capture_sizes(min(most, self.config.max_num_seqs)):
                self.run_eager(self.dummy_inputs(num_reqs, 1))

    def dummy_sampling(self, rows: int, top_k: int, top_p: float) -> dict[str, torch.Tensor]:
        """Return prepare_sample()'s tensors for `rows` requests that all ask for the same."""
        device = self.device.torch_device
        return {
            "temperature": torch.ones(rows, device=device),
            "top_k": torch.full((rows,), top_k),
            "top_p": torch.full((rows,), top_p),
            "seed": torch.zeros(rows, dtype=torch.int64, device=device),
            "position": torch.zeros(rows, dtype=torch.int64, device=device),
        }

    def dummy_inputs(self, num_reqs: int, query_len: int) -> Inputs:
        """Return inputs of num_reqs requests, query_len tokens each, that write nothing."""
        num_tokens = num_reqs * query_len
        max_blocks = -(-self.config.max_model_len // BLOCK_SIZE)
        up = self.device.upload
        batch = AttentionBatch(
            query_start_loc=up(np.arange(num_reqs + 1, dtype=np.int32) * query_len),
            seq_lens=up(np.full(num_reqs, query_len, np.int32)),
            block_tables=up(np.zeros((num_reqs, max_blocks), np.int32)),
            slot_mapping=up(np.full(num_tokens, -1, np.int64)),
            max_query_len=query_len,
            max_seq_len=query_len,
        )
        positions = np.tile(np.arange(query_len, dtype=np.int64), num_reqs)
        rows = up(np.arange(1, num_reqs + 1, dtype=np.int64) * query_len - 1)
        return Inputs(up(np.zeros(num_tokens, np.int64)), up(positions), batch, rows)

    # ---- one step ------------------------------------------------------------------------------

    def step(self, wire: tuple[Any, ...]) -> FinishedStep | None:
        """Apply one StepInput, run it to its end and return rank 0's handle."""
        self.group.check()  # a replay raises nothing when its all-reduce has given up
        step_input = StepInput.from_wire(wire)
        recorder = self.recorder
        if recorder is not None:
            recorder.begin_step(step_input.step_id)
        seqs = self.sequences.apply(step_input)
        if recorder is not None:
            recorder.lap(APPLY)
            self._note_batch(recorder, seqs)
        is_prefill = any(seq.num_scheduled_tokens > 1 or not seq.samples for seq in seqs)
        token_ids = self.run(seqs, is_prefill) if seqs else []
        sampled = self.sequences.finish_step()
        if recorder is not None:
            recorder.end_step()
        if self.rank != 0:
            return None
        request_ids = np.array([seq.request_id for seq in sampled], np.int32)
        return FinishedStep(
            StepOutput(step_input.step_id, request_ids, np.array(token_ids, np.int32))
        )

    @torch.inference_mode()
    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int] | None:
        """Do one whole step and return the sampled ids on rank 0, None on the others."""
        recorder = self.recorder
        inputs = self.prepare_prefill(seqs) if is_prefill else self.prepare_decode(seqs)
        if recorder is not None:
            recorder.lap(PREPARE)
            recorder.begin_gpu()  # not before: until here the GPU waited for Python
        sampling = [seq for seq in seqs if seq.samples]
        if not sampling:  # every row is inside an unfinished prompt
            self.run_eager(inputs)
            return [] if self.rank == 0 else None
        logits = self.run_model(inputs, is_prefill)
        token_ids = None
        if logits is not None:
            token_ids = self.sampler(logits, **self.prepare_sample(sampling))
        if recorder is not None:
            recorder.lap(SAMPLE, on_gpu=True)
        if token_ids is None:
            return None
        download = Download(token_ids)
        if recorder is not None:
            recorder.lap(DOWNLOAD, on_gpu=True)
        ids: list[int] = download.result(self.config.step_timeout_s).tolist()
        if recorder is not None:
            recorder.lap(WAIT)
        return ids

    def _note_batch(self, recorder: SpanRecorder, seqs: list[Sequence]) -> None:
        """Tell the recorder what the step computes."""
        counts = np.array([seq.num_scheduled_tokens for seq in seqs], np.int64)
        computed = np.array([seq.num_cached_tokens for seq in seqs], np.int64)
        recorder.note_batch(counts, computed, sum(seq.samples for seq in seqs))

    def prepare_prefill(self, seqs: list[Sequence]) -> Inputs:
        """Pack each sequence's scheduled tokens one after the other."""
        input_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        query_start_loc = [0]
        logits_rows: list[int] = []
        for seq in seqs:
            start = seq.num_cached_tokens
            end = start + seq.num_scheduled_tokens
            input_ids.extend(seq.token_ids[start:end])
            positions.extend(range(start, end))
            slot_mapping.extend(
                seq.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(start, end)
            )
            query_start_loc.append(query_start_loc[-1] + end - start)
            if seq.samples:
                logits_rows.append(query_start_loc[-1] - 1)
        batch = self.prepare_batch(seqs, query_start_loc, slot_mapping)
        up = self.device.upload
        return Inputs(
            up(np.array(input_ids, np.int64)),
            up(np.array(positions, np.int64)),
            batch,
            up(np.array(logits_rows, np.int64)),
        )

    def prepare_decode(self, seqs: list[Sequence]) -> Inputs:
        """One token a sequence: the last known one, whose K and V are computed now."""
        input_ids = [seq.token_ids[-1] for seq in seqs]
        positions = [len(seq) - 1 for seq in seqs]
        slot_mapping = [
            seq.block_table[-1] * BLOCK_SIZE + position % BLOCK_SIZE
            for seq, position in zip(seqs, positions, strict=True)
        ]
        batch = self.prepare_batch(seqs, list(range(len(seqs) + 1)), slot_mapping)
        up = self.device.upload
        return Inputs(
            up(np.array(input_ids, np.int64)), up(np.array(positions, np.int64)), batch, None
        )

    def prepare_batch(
        self, seqs: list[Sequence], query_start_loc: list[int], slot_mapping: list[int]
    ) -> AttentionBatch:
        """Return the attention metadata: whose tokens these are and where their K and V lie."""
        seq_lens = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
        up = self.device.upload
        return AttentionBatch(
            query_start_loc=up(np.array(query_start_loc, np.int32)),
            seq_lens=up(np.array(seq_lens, np.int32)),
            block_tables=up(self.prepare_block_tables(seqs)),
            slot_mapping=up(np.array(slot_mapping, np.int64)),
            max_query_len=max(seq.num_scheduled_tokens for seq in seqs),
            max_seq_len=max(seq_lens),
        )

    def prepare_block_tables(self, seqs: list[Sequence]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return [num_reqs, longest table] int32, rows padded with 0."""
        width = max(len(seq.block_table) for seq in seqs)
        tables = np.zeros((len(seqs), width), np.int32)
        for row, seq in enumerate(seqs):
            tables[row, : len(seq.block_table)] = seq.block_table
        return tables

    def prepare_sample(self, seqs: list[Sequence]) -> dict[str, torch.Tensor]:
        """Return each sampling sequence's settings as tensors [num_sampled]; rank 0 alone.

        top_k and top_p stay on the host: the sampler decides from them what to launch.
        """
        up = self.device.upload
        settings = [seq.sampling for seq in seqs]
        return {
            "temperature": up(np.array([s.temperature for s in settings], np.float32)),
            "top_k": torch.tensor([s.top_k for s in settings], dtype=torch.int64),
            "top_p": torch.tensor([s.top_p for s in settings], dtype=torch.float32),
            "seed": up(np.array([s.seed for s in settings], np.int64)),
            "position": up(np.array([len(seq) - 1 for seq in seqs], np.int64)),
        }

    def run_model(self, inputs: Inputs, is_prefill: bool) -> torch.Tensor | None:
        """Return the logits [num_sampled, vocab_size] on rank 0, None on the others."""
        if is_prefill or self.graphs is None:
            hidden = self.run_eager(inputs)
            if inputs.logits_rows is not None:
                hidden = hidden[inputs.logits_rows]
            local_logits = self.compute_local_logits(hidden)
            if self.graphs is not None:
                self.graphs.dispatched[EAGER] += 1
        else:
            local_logits = self.graphs.replay(inputs)
        parts = self.peers.gather(local_logits)
        if parts is None:
            return None
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return whole[:, : self.config.model.vocab_size]  # the padded ids are last

    def run_eager(self, inputs: Inputs) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden]."""
        hidden = self.model.forward(
            inputs.input_ids, inputs.positions, inputs.batch, self.k_caches, self.v_caches
        )
        if self.recorder is not None:
            self.recorder.lap(FORWARD, on_gpu=True)
        return hidden

    def compute_local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the logits [rows, local_vocab]."""
        return self.model.compute_logits(hidden)
