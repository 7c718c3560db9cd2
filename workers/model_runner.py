"""Model Runner V2: stable rows, inputs made on the device, nothing on the hot path that waits.

    step(wire)
        apply       rows come and go; what changed is staged: one copy, one kernel, or nothing
        send        who is in the batch: one copy, or nothing when it is the last step's
        prepare     input kernels read the state table (kernels/prepare_inputs.py)
        forward     the decoder; a decode replays a CUDA graph that holds everything from
                    prepare to advance
        sample      on every rank: the best (score, id) of each vocabulary shard, one all-reduce
        advance     num_computed, total_len, last_sampled move on, on the device
        download    ids follow on the copy stream; step() has returned long before

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
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs, prepare_mixed_inputs
from nanorunner.kernels.state_tables import InputBuffers
from nanorunner.kernels.warm_up import warm_up_attention
from nanorunner.workers import kv_cache
from nanorunner.workers.cuda_graphs import PLAIN, Descriptor, GraphManager
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import DRAW, MAX_LOGPROB_ENTRIES, Need
from nanorunner.workers.messages import BLOCK_SIZE, Int32, KvRoom, RunnerConfig, StepInput
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.profile import measure_kv_room
from nanorunner.workers.prompt_logprobs import PromptLogprobs
from nanorunner.workers.prompt_readers import PromptReaders
from nanorunner.workers.request_rows import Int64
from nanorunner.workers.request_states import RequestStates
from nanorunner.workers.sampler_v2 import SamplerV2
from nanorunner.workers.sampler_warm_up import exercise_sampler
from nanorunner.workers.sampling_state import SamplingState
from nanorunner.workers.staged_tensor import StagedWriter
from nanorunner.workers.step_extras import DeviceExtras
from nanorunner.workers.step_inputs import StepInputs
from nanorunner.workers.step_output import OutputRing, PendingStep
from nanorunner.workers.weights import load_weights

Mask = npt.NDArray[np.bool_]
NO_ROWS: Int64 = np.zeros(0, np.int64)
LOGPROB_ENTRY_BYTES = 12  # an int64 id and a float32 value
DRAW_BITS, LOGPROBS_BIT = int(DRAW), int(Need.LOGPROBS)  # & of an IntFlag takes microseconds


class ModelRunner:
    """One rank's executor: its share of the weights, its KV cache, its state table, its graphs."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group, device: Device) -> None:
        self.config = config
        self.rank = rank
        self.group = group
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.memory_before = device.memory() if device.is_cuda else None
        place = device.torch_device
        self.model = Decoder(
            config.model,
            tp=config.tp,
            rank=rank,
            dtype=self.dtype,
            device=place,
            group=group,
            attention_backend=config.attention_backend,
            max_model_len=config.max_model_len,
            batch_invariant=config.batch_invariant,
        )
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
            self.sampling, tables.token_ids, self.states.prompt_len, tables.prefill_len, group
        )
        prompt_logprobs = PromptLogprobs(
            self.model.compute_logits, tables.token_ids, self.model.local_vocab, group
        )
        self.prompts = PromptReaders(config.max_num_reqs, prompt_logprobs)
        self.inputs = StepInputs(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            depth,
            place,
        )
        self.outputs = OutputRing(depth + 2, config.max_num_seqs, place)
        self.graphs = GraphManager(config.max_num_seqs, is_enabled=False)  # until capture()
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
        self._wanted = 0  # all needs together
        self._may_need_less = True  # they must be looked at again

    # The four stages before the first step.

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
        self.outputs.restart()

    @torch.inference_mode()
    def capture_graphs(self) -> GraphManager:
        """Capture every decode graph on a batch of nobody, and return their manager."""
        is_enabled = self.device.is_cuda and not self.config.enforce_eager
        graphs = GraphManager(self.config.max_num_seqs, is_enabled=is_enabled)
        if is_enabled:
            self.inputs.send(NO_ROWS, NO_ROWS, np.zeros(0, np.bool_))
            graphs.capture(self._decode_body)
        return graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every kind of step on rows that nobody owns: no KV and no state is written."""
        config = self.config
        query_len = min(32, config.max_model_len, config.max_num_batched_tokens)
        for count, is_decode in ((query_len, False), (1, False), (1, True)):
            self.idle_step(1, count, is_decode=is_decode)
        self.states.touch()
        self.writer.apply()
        exercise_sampler(self.sampler, self.group, self.dtype, num_rows=2)

    @torch.inference_mode()
    def idle_step(self, num_reqs: int, query_len: int, *, is_decode: bool) -> None:
        """Run a step of num_reqs requests, query_len tokens each, that belong to nobody."""
        rows = np.full(num_reqs, -1, np.int64)
        counts = np.full(num_reqs, query_len, np.int64)
        self.inputs.send(rows, counts, np.ones(num_reqs, np.bool_))
        if is_decode:
            self._decode_body(Descriptor(num_reqs, PLAIN))
        else:
            self._mixed_step(rows, counts, np.ones(num_reqs, np.bool_), max_seq_len=query_len)

    @torch.inference_mode()
    def widest_step(self) -> None:
        """Run the largest prefill, then the largest sampler batch, with full log-probability pools.

        The pools are what steps in flight may hold beside the next one's working memory.
        """
        config = self.config
        pool_bytes = (config.async_depth + 1) * MAX_LOGPROB_ENTRIES * LOGPROB_ENTRY_BYTES
        pools = torch.empty(pool_bytes, dtype=torch.uint8, device=self.device.torch_device)
        query_len = min(config.max_num_batched_tokens, config.max_model_len)
        num_reqs = min(config.max_num_seqs, max(1, config.max_num_batched_tokens // query_len))
        self.idle_step(num_reqs, query_len, is_decode=False)
        self.idle_step(config.max_num_seqs, 1, is_decode=False)
        num_rows = max(2, config.max_num_seqs)
        exercise_sampler(self.sampler, self.group, self.dtype, num_rows, is_widest=True)
        del pools

    # One step.

    @torch.inference_mode()
    def step(self, wire: tuple[Any, ...]) -> PendingStep | None:
        """Enqueue one step; rank 0 gets its handle, before the device has begun."""
        step_input = StepInput.from_wire(wire)
        is_new_batch = self._apply(step_input)
        if is_new_batch:
            self._look_at_batch()
        rows, counts, samples = self._rows, self._counts, self._samples
        extras = None
        if len(rows):
            if is_new_batch:
                self.inputs.send(rows, counts, samples)
            extras = self._run(rows, counts, samples)
            self.states.advance(rows, counts, samples)
        if self.rank != 0:
            return None
        download = None
        num_sampled = len(self._sampled_ids)
        if num_sampled or extras is not None:
            download = self.outputs.download(self._slot, num_sampled, extras)
        return PendingStep(
            step_input.step_id,
            self._sampled_ids,
            download,
            (self.states.rows, rows, self._generations),
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

    def _look_at_batch(self) -> None:
        """Note what a steady decode need not find out again in every step."""
        rows, counts = self._rows, self._counts
        samples = self.states.samples(rows, counts)
        if self.prompts:
            samples &= ~self.prompts.is_pooled[rows]
        self._samples = samples
        self._sampled_ids = self._request_ids[samples]
        self._generations = self.states.rows.generations(rows)
        self._is_decode = bool(samples.all() and (counts == 1).all())
        self._may_need_less = True

    def _run(self, rows: Int64, counts: Int64, samples: Mask) -> DeviceExtras | None:
        """Enqueue everything from the input kernels to the state's advance.

        Return what some rows get beside their ids, None in most steps.
        """
        if self._may_need_less:
            positions = self.states.computed[rows] + counts - 1
            self._needs = self.sampling.needs(rows, positions)
            self._wanted = int(np.bitwise_or.reduce(self._needs))
            self._may_need_less = bool(self._wanted & Need.STOP_IDS)
        needs, wanted = self._needs, self._wanted
        is_plain = not wanted & DRAW_BITS
        graph = self.graphs.dispatch(len(rows), is_decode=self._is_decode, is_plain=is_plain)
        self._slot = self.outputs.next_slot()
        if graph is None:
            max_seq_len = int((self.states.computed[rows] + counts).max())
            return self._mixed_step(rows, counts, samples, max_seq_len, needs)
        num_reqs = len(rows)
        logits = self.graphs.replay(graph)[:num_reqs]
        ids = self.outputs.ids[self._slot, :num_reqs]
        if graph.family != PLAIN:
            buffers = self.inputs.decode_buffers(num_reqs)
            mapping = self.inputs.idx_mapping[:num_reqs]
            ids = self.sampler.sample(logits, mapping, buffers.positions, rows, needs)
            self.sampler.count_sampled(ids, mapping, buffers.positions, needs)
            self._advance(buffers.query_start_loc, ids)
        if not wanted & LOGPROBS_BIT:
            return None
        # now: the next replay writes over the logits
        return DeviceExtras(self.sampler.logprobs(logits, ids, rows), [], [])

    def _decode_body(self, descriptor: Descriptor) -> torch.Tensor:
        """A decode of descriptor.num_reqs rows; what a graph captures. Returns its logits."""
        inputs, size = self.inputs, descriptor.num_reqs
        buffers = inputs.decode_buffers(size)
        prepare_decode_inputs(
            inputs.header, inputs.idx_mapping, self.states.tables, buffers, BLOCK_SIZE
        )
        hidden = self._forward(buffers, max_query_len=1, max_seq_len=self.config.max_model_len)
        logits = self.model.compute_logits(hidden)
        if descriptor.family == PLAIN:
            mapping = inputs.idx_mapping[:size]
            ids = self.sampler.sample_plain(logits, mapping, buffers.positions)
            self._advance(buffers.query_start_loc, ids)
        return logits

    def _mixed_step(
        self,
        rows: Int64,
        counts: Int64,
        samples: Mask,
        max_seq_len: int,
        needs: Int32 | None = None,
    ) -> DeviceExtras | None:
        """Any batch, eagerly: prompts, chunks of prompts and decodes packed one after the other."""
        inputs = self.inputs
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
        hidden = self._forward(buffers, max_query_len, max_seq_len)
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

    # The end.

    def close(self) -> None:
        """Free graphs, cache and weights, and leave the group; a second call does nothing."""
        self.graphs = GraphManager(self.config.max_num_seqs, is_enabled=False)
        self.release_kv()
        self.model.release()
        self.group.close()
        self.device.release()
