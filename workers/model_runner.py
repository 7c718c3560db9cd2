"""Model Runner V2: stable rows, inputs made on the device, nothing on the hot path that waits.

    step(wire)
        apply       rows come and go; what changed is staged: one copy, one kernel, or nothing
        send        who is in the batch: one copy, or nothing when it is the last step's
        prepare     input kernels read the state table (kernels/prepare_inputs.py)
        forward     the decoder; a decode replays a CUDA graph that holds everything from
                    prepare to advance
        sample      on every rank: the best (score, id) of each vocabulary shard, one all-reduce
        advance     num_computed, total_len, last_sampled move on, on the device
        finish      an event: then the ids lie in host memory; step() has returned long before

All kernels are on one stream, so a row's old owner and its new one cannot meet. The CPU never reads
a device value here: what it must know it derives from what it has scheduled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.advance_state import advance_state
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.lm_head_sample import serves
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs, prepare_mixed_inputs
from nanorunner.kernels.state_tables import InputBuffers
from nanorunner.workers import idle_steps
from nanorunner.workers.cuda_graphs import PLAIN, Descriptor, GraphManager
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import DRAW, Need
from nanorunner.workers.messages import BLOCK_SIZE, Int32, RunnerConfig, StepInput
from nanorunner.workers.prompt_logprobs import PromptLogprobs
from nanorunner.workers.prompt_readers import PromptReaders
from nanorunner.workers.request_rows import Int64
from nanorunner.workers.request_states import RequestStates
from nanorunner.workers.runner_stages import RunnerStages
from nanorunner.workers.sampler_v2 import SamplerV2
from nanorunner.workers.sampling_state import SamplingState
from nanorunner.workers.spans import APPLY, DOWNLOAD, FORWARD, PREPARE, SAMPLE, STAGE
from nanorunner.workers.staged_tensor import StagedWriter
from nanorunner.workers.step_extras import DeviceExtras
from nanorunner.workers.step_inputs import StepInputs
from nanorunner.workers.step_output import OutputRing, PendingStep

Mask = npt.NDArray[np.bool_]
NO_ROWS: Int64 = np.zeros(0, np.int64)
# & of an IntFlag takes microseconds
LOGPROBS_BIT = int(Need.LOGPROBS)
LOGITS_BITS = int(DRAW) | LOGPROBS_BIT


class ModelRunner(RunnerStages):
    """One rank's executor: its share of the weights, its KV cache, its state table, its graphs."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group, device: Device) -> None:
        super().__init__(config, rank, group, device)
        place = device.torch_device
        depth = config.async_depth
        self.writer = StagedWriter(place, depth, timeout_s=config.step_timeout_s)
        self.states = RequestStates(config.max_num_reqs, config.max_model_len, self.writer, place)
        self.sampling = SamplingState(
            self.writer,
            config.max_num_reqs,
            self.model.local_vocab,
            self.model.local_vocab * rank,
            device.upload,
            place,
        )
        tables = self.states.tables
        self.sampler = SamplerV2(
            self.sampling, tables.token_ids, self.states.prompt_len, tables.prefill_len, self.peers
        )
        prompt_logprobs = PromptLogprobs(
            self.model.compute_logits, tables.token_ids, self.model.local_vocab, self.peers
        )
        self.prompts = PromptReaders(config.max_num_reqs, prompt_logprobs)
        self.inputs = StepInputs(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            depth,
            place,
        )
        self.outputs = OutputRing(depth + 2, config.max_num_seqs, place, self.recorder)
        # until capture()
        self.graphs: GraphManager = GraphManager(config.max_num_seqs, is_enabled=False)
        # the current batch, as the CPU knows it
        self._request_ids: Int32 = np.zeros(0, np.int32)
        self._rows: Int64 = NO_ROWS
        self._counts: Int64 = NO_ROWS
        # and what stays true of it while the same requests go on, one token each
        self._samples: Mask = np.zeros(0, np.bool_)  # who reaches its last token
        self._sampled_ids: Int32 = np.zeros(0, np.int32)
        self._generations: Int64 = NO_ROWS
        self._is_decode = False
        self._needs: Int32 = np.zeros(0, np.int32)
        self._is_plain = True  # nobody wants more of the sampler than temperature and seed
        self._has_logprobs = False  # of output tokens
        self._may_need_less = True  # the needs must be looked at again

    # Its part of the stages before the first step (runner_stages.py).

    def warm_up(self) -> None:
        """Run every kind of step once, so that serving compiles nothing."""
        idle_steps.warm_up(self)

    def widest_step(self) -> None:
        """Run the largest prefill and the largest sampler batch, touching no live state."""
        idle_steps.widest_step(self)

    @torch.inference_mode()
    def capture_graphs(self) -> GraphManager:
        """Capture every decode graph on a batch of nobody, and return their manager."""
        graphs = GraphManager(
            self.config.max_num_seqs, is_enabled=self.has_graphs, recorder=self.recorder
        )
        if self.has_graphs:
            self.inputs.send(NO_ROWS, NO_ROWS, np.zeros(0, np.bool_))
            graphs.capture(self.decode_body)
        return graphs

    def capture(self) -> None:
        """Compile, capture, and forget the steps that took."""
        super().capture()
        self.outputs.restart()

    # One step. A decode that a graph does as a whole needs no inference mode, which takes a few
    # microseconds to enter; what runs PyTorch's operations enters it by itself.

    def step(self, wire: tuple[Any, ...]) -> PendingStep | None:
        """Enqueue one step; rank 0 gets its handle, before the device has begun."""
        self.group.check()  # a replay raises nothing when its all-reduce has given up
        step_input = StepInput.from_wire(wire)
        recorder = self.recorder
        if recorder is not None:
            recorder.begin_step(step_input.step_id)
        if self._apply(step_input):
            self._begin_batch()
        if recorder is not None:
            recorder.lap(STAGE, on_gpu=True)
            computed = self.states.computed[self._rows]
            recorder.note_batch(self._counts, computed, len(self._sampled_ids))
        extras = None
        if len(self._rows):
            extras = self._run()
            self.states.advance(self._rows, self._counts, self._samples)
        handle = self._handle(step_input.step_id, extras) if self.rank == 0 else None
        if recorder is not None:
            recorder.lap(DOWNLOAD)
            recorder.end_step()
        return handle

    def _handle(self, step_id: int, extras: DeviceExtras | None) -> PendingStep:
        """Return what rank 0 reads the step's results from."""
        arrival = None
        num_sampled = len(self._sampled_ids)
        if num_sampled or extras is not None:
            arrival = self.outputs.finish(num_sampled, extras)
        return PendingStep(
            step_id,
            self._sampled_ids,
            self.outputs,
            arrival,
            (self.states.rows, self._rows, self._generations),
            self.config.step_timeout_s,
            extras,
        )

    def _apply(self, step: StepInput) -> bool:
        """Bring rows and batch up to date; return whether the batch differs from the last one."""
        states = self.states
        for request_id in np.frombuffer(step.removed, np.int32).tolist():
            row = states.remove(request_id)
            assert row is not None, f"request {request_id} has no row to give back"
            self.sampling.remove(row)
            self.prompts.remove(row, request_id)
        for new in step.new:
            row = states.add(new)
            self.sampling.add(row, new.sampling, new.prompt_len, int(states.total[row]))
            self.prompts.add(row, new)
        for request_id, block_ids in step.new_blocks:
            states.append_blocks(request_id, block_ids)
        if self.recorder is not None:
            self.recorder.lap(APPLY)
            if step.new_blocks or step.batch is not None or not self._is_decode:
                self.recorder.begin_gpu()  # else nothing is sent
        self.writer.apply()
        tables = states.tables
        self.sampling.fill_slots(tables.token_ids, states.prompt_len, tables.prefill_len)
        if step.batch is not None:
            pairs = np.frombuffer(step.batch, np.int32).reshape(-1, 2)
            self._request_ids = pairs[:, 0]
            self._rows = np.array([states.rows.row_of(i) for i in pairs[:, 0].tolist()], np.int64)
            self._counts = pairs[:, 1].astype(np.int64)
            return True
        if not self._is_decode:
            self._counts = np.ones_like(self._counts)
            return True
        return False

    def _begin_batch(self) -> None:
        """Send the batch, and note what a steady decode need not find out again in every step."""
        rows, counts = self._rows, self._counts
        samples = self.states.samples(rows, counts)
        is_read = False
        if self.prompts:
            samples &= ~self.prompts.is_pooled[rows]
            is_read = bool(self.prompts.has_reader[rows].any())
        self._samples = samples
        self._sampled_ids = self._request_ids[samples]
        self._generations = self.states.rows.generations(rows)
        # The last token of a prompt looks like a decode; but a graph keeps no hidden states.
        self._is_decode = bool(samples.all() and (counts == 1).all()) and not is_read
        self._may_need_less = True
        if len(rows):
            self.inputs.send(rows, counts, samples)

    def _look_at_needs(self) -> None:
        """Note what the batch needs of the sampler; with their min_tokens rows need less."""
        positions = self.states.computed[self._rows] + self._counts - 1
        self._needs = self.sampling.needs(self._rows, positions)
        wanted = int(np.bitwise_or.reduce(self._needs))
        self._is_plain = not wanted & LOGITS_BITS
        self._has_logprobs = bool(wanted & LOGPROBS_BIT)
        self._may_need_less = bool(wanted & Need.STOP_IDS)

    def _run(self) -> DeviceExtras | None:
        """Enqueue everything from the input kernels to the state's advance.

        Return what some rows get beside their ids, None in most steps.
        """
        if self._may_need_less:
            self._look_at_needs()
        rows, counts = self._rows, self._counts
        graph = self.graphs.dispatch(len(rows), is_decode=self._is_decode, is_plain=self._is_plain)
        self.outputs.begin()
        if graph is None:
            max_seq_len = int((self.states.computed[rows] + counts).max())
            return self.mixed_step(rows, counts, self._samples, max_seq_len, self._needs)
        logits = self.graphs.replay(graph)
        if graph.family == PLAIN:
            return None  # the step is done
        return self._sample_outside(logits)

    @torch.inference_mode()
    def _sample_outside(self, logits: torch.Tensor) -> DeviceExtras | None:
        """Do for a decode what its graph left: the full sampler, advance, log-probabilities.

        logits [graph's requests, local_vocab].
        """
        rows, needs, num_reqs = self._rows, self._needs, len(self._rows)
        logits = logits[:num_reqs]
        buffers = self.inputs.decode_buffers(num_reqs)
        mapping = self.inputs.idx_mapping[:num_reqs]
        ids = self.sampler.sample(logits, mapping, buffers.positions, rows, needs)
        self.sampler.count_sampled(ids, mapping, buffers.positions, needs)
        self._advance(buffers.query_start_loc, ids)
        extras = None
        if self._has_logprobs:  # now: the next replay writes over the logits
            extras = DeviceExtras(self.sampler.logprobs(logits, ids, rows), [], [])
        if self.recorder is not None:
            self.recorder.lap(SAMPLE, on_gpu=True)
        return extras

    def decode_body(self, descriptor: Descriptor) -> torch.Tensor:
        """A decode of descriptor.num_reqs rows; what a graph captures.

        Returns its logits, of a plain one its ids.
        """
        inputs, size, recorder = self.inputs, descriptor.num_reqs, self.recorder
        buffers = inputs.decode_buffers(size)
        prepare_decode_inputs(
            inputs.header, inputs.idx_mapping, self.states.tables, buffers, BLOCK_SIZE
        )
        if recorder is not None:
            recorder.lap(PREPARE, on_gpu=True)
        hidden = self._forward(buffers, max_query_len=1, max_seq_len=self.config.max_model_len)
        if recorder is not None:
            recorder.lap(FORWARD, on_gpu=True)
        if descriptor.family != PLAIN:
            output = self.model.compute_logits(hidden)
        else:
            mapping = inputs.idx_mapping[:size]
            output = self._sample_plain(hidden, mapping, buffers.positions)
            self._advance(buffers.query_start_loc, output)
        if recorder is not None:
            recorder.lap(SAMPLE, on_gpu=True)
        return output

    def _sample_plain(
        self, hidden: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the ids [n] of rows that want temperature and seed alone."""
        model = self.model
        if model.has_few_rows and serves(len(hidden), model.lm_head):
            return self.sampler.sample_head(
                hidden, model.lm_head, model.vocab.size, idx_mapping, positions
            )
        return self.sampler.sample_plain(model.compute_logits(hidden), idx_mapping, positions)

    @torch.inference_mode()
    def mixed_step(
        self,
        rows: Int64,
        counts: Int64,
        samples: Mask,
        max_seq_len: int,
        needs: Int32 | None = None,
    ) -> DeviceExtras | None:
        """Any batch, eagerly: prompts, chunks of prompts and decodes packed one after the other."""
        inputs, recorder = self.inputs, self.recorder
        if recorder is not None:
            recorder.begin_gpu()
        num_sampled, max_query_len = int(samples.sum()), int(counts.max())
        buffers = inputs.mixed_buffers(len(rows), int(counts.sum()))
        sampled = inputs.logits_rows(num_sampled)
        prepare_mixed_inputs(
            inputs.header,
            inputs.idx_mapping,
            inputs.logits_places,
            self.states.tables,
            buffers,
            sampled,
            max_query_len,
            BLOCK_SIZE,
        )
        if recorder is not None:
            recorder.lap(PREPARE, on_gpu=True)
        hidden = self._forward(buffers, max_query_len, max_seq_len)
        if recorder is not None:
            recorder.lap(FORWARD, on_gpu=True)
        extras = DeviceExtras([], [], [])
        if self.prompts:
            results = self.prompts.collect(hidden, rows, counts, self.states.computed)
            extras = DeviceExtras([], results.logprobs, results.embeddings)
        ids = sampled.indices[:0]
        if num_sampled:
            logits = self.model.compute_logits(hidden[sampled.indices])
            sampled_rows = rows[samples]
            their_needs = np.zeros(num_sampled, np.int32) if needs is None else needs[samples]
            mapping, positions = sampled.idx_mapping, sampled.positions
            ids = self.sampler.sample(logits, mapping, positions, sampled_rows, their_needs)
            self.sampler.count_sampled(ids, mapping, positions, their_needs)
            if (their_needs & np.int32(Need.LOGPROBS)).any():
                groups = self.sampler.logprobs(logits, ids, sampled_rows)
                extras = extras._replace(groups=groups)
        self._advance(buffers.query_start_loc, ids, inputs.logits_places)
        if recorder is not None:
            recorder.lap(SAMPLE, on_gpu=True)
        return extras if any(extras) else None

    def _forward(self, buffers: InputBuffers, max_query_len: int, max_seq_len: int) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden]; writes the step's K and V."""
        batch = AttentionBatch(
            query_start_loc=buffers.query_start_loc,
            seq_lens=buffers.seq_lens,
            block_tables=buffers.block_tables,
            slot_mapping=buffers.slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return self.model.forward(
            buffers.input_ids, buffers.positions, batch, self.k_caches, self.v_caches
        )

    def _advance(
        self,
        query_start_loc: torch.Tensor,
        ids: torch.Tensor,
        logits_places: torch.Tensor | None = None,
    ) -> None:
        """Move the batch's rows on and put the ids into the output ring."""
        advance_state(
            self.inputs.header,
            self.inputs.idx_mapping,
            query_start_loc,
            ids,
            self.states.tables,
            self.outputs.ids,
            self.outputs.step_counter,
            logits_places,
        )
