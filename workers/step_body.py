"""What one step of runner v2 enqueues on the device, from the input kernels to the rows' advance.

    decode_body     places of one token each; what a CUDA graph captures, or the front part of it
    sample_outside  the rest of a decode whose rows want more of the sampler than a graph has
    mixed_step      any batch: prompts, chunks of prompts, decodes; at most its layers have graphs

The tensors are made here, once, at addresses that stay. Who is in the batch and what it needs is
model_runner.py's to know.
"""

from __future__ import annotations

import numpy as np
import torch

from nanorunner.kernels.advance_state import advance_state
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.lm_head_sample import serves
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs, prepare_mixed_inputs
from nanorunner.kernels.state_tables import InputBuffers
from nanorunner.workers.cuda_graphs import PLAIN, Descriptor, GraphManager
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import Need
from nanorunner.workers.messages import BLOCK_SIZE, Int32, RunnerConfig
from nanorunner.workers.places import Places
from nanorunner.workers.prompt_logprobs import PromptLogprobs
from nanorunner.workers.prompt_readers import PromptReaders
from nanorunner.workers.proposer import Proposer
from nanorunner.workers.request_states import RequestStates
from nanorunner.workers.runner_stages import RunnerStages
from nanorunner.workers.sampler_v2 import SamplerV2
from nanorunner.workers.sampling_state import SamplingState
from nanorunner.workers.spans import DRAFT, FORWARD, PREPARE, SAMPLE
from nanorunner.workers.speculator import open_speculator
from nanorunner.workers.staged_tensor import StagedWriter
from nanorunner.workers.step_extras import DeviceExtras
from nanorunner.workers.step_inputs import StepInputs
from nanorunner.workers.step_output import OutputRing


class StepBody(RunnerStages):
    """One rank's device side: state table, sampler, input buffers, output ring, model."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group, device: Device) -> None:
        super().__init__(config, rank, group, device)
        place = device.torch_device
        depth = config.async_depth
        self.writer = StagedWriter(place, depth, timeout_s=config.step_timeout_s)
        self.states = RequestStates(
            config.max_num_reqs,
            config.max_model_len,
            self.writer,
            place,
            speculates=config.speculation is not None,
        )
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
            self.sampling,
            tables.token_ids,
            self.states.prompt_len,
            tables.prefill_len,
            self.peers,
            tables.total_len if config.speculation is not None else None,
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
            config.max_query_len,
        )
        max_places = config.max_num_seqs * config.max_query_len
        self.outputs = OutputRing(depth + 2, max_places, place, self.recorder)
        self.speculator = open_speculator(self)  # None: a step brings each request one token

    @property
    def proposer(self) -> Proposer | None:
        """What drafts for the next step."""
        return None if self.speculator is None else self.speculator.proposer

    def decode_body(self, descriptor: Descriptor) -> torch.Tensor:
        """A decode of descriptor.num_places places; what a graph captures.

        Returns its logits, of a plain one its ids.
        """
        inputs, size, recorder = self.inputs, descriptor.num_places, self.recorder
        buffers = inputs.decode_buffers(size)
        prepare_decode_inputs(
            inputs.header,
            inputs.idx_mapping,
            self.states.tables,
            buffers,
            BLOCK_SIZE,
            offsets=inputs.offsets,
        )
        if recorder is not None:
            recorder.lap(PREPARE, on_gpu=True)
        batch = self._attention_batch(
            buffers, 1, self.config.max_model_len, descriptor.query_len, is_even=descriptor.is_even
        )
        hidden = self._forward(buffers, batch)
        if recorder is not None:
            recorder.lap(FORWARD, on_gpu=True)
        if descriptor.family != PLAIN:
            output = self.model.compute_logits(hidden)
        else:
            mapping = inputs.idx_mapping[:size]
            output = self._sample_plain(hidden, mapping, buffers.positions)
            self._advance(buffers.query_start_loc, output, mapping)
        if recorder is not None:
            recorder.lap(SAMPLE, on_gpu=True)
        proposer = self.proposer
        if descriptor.family == PLAIN and proposer is not None and proposer.is_in_step_graph:
            self.propose(descriptor.num_reqs, is_after_plain=descriptor.query_len == 1)
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
    def sample_outside(
        self, logits: torch.Tensor, places: Places, needs: Int32
    ) -> DeviceExtras | None:
        """Do for a decode what its graph left: the full sampler, advance, log-probabilities.

        logits [graph's places, local_vocab]; needs [p] of each place.
        """
        num_places = len(places.rows)
        logits = logits[:num_places]
        buffers = self.inputs.decode_buffers(num_places)
        mapping = self.inputs.idx_mapping[:num_places]
        ids = self.sampler.sample(logits, mapping, buffers.positions, places.rows, needs)
        whose = self._advance(buffers.query_start_loc, ids, mapping)
        self.sampler.count_sampled(ids, whose, buffers.positions, needs)
        extras = None
        if (needs & np.int32(Need.LOGPROBS)).any():  # now: the next replay writes over the logits
            extras = DeviceExtras(self.sampler.logprobs(logits, ids, places.rows), [], [])
        if self.recorder is not None:
            self.recorder.lap(SAMPLE, on_gpu=True)
        if places.leaders is not None:
            self.propose(len(places.leaders), is_after_plain=places.is_plain_decode)
        return extras

    @torch.inference_mode()
    def mixed_step(
        self, places: Places, max_seq_len: int, needs: Int32 | None = None
    ) -> DeviceExtras | None:
        """Any batch: prompts, chunks of prompts and decodes packed one after the other."""
        inputs, recorder, proposer = self.inputs, self.recorder, self.proposer
        rows, counts, samples = places[:3]
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
            offsets=inputs.offsets,
        )
        if recorder is not None:
            recorder.lap(PREPARE, on_gpu=True)
        batch = self._attention_batch(
            buffers, max_query_len, max_seq_len, places.query_len, num_decodes=places.num_single
        )
        hidden = self._mixed_forward(buffers, batch)
        if recorder is not None:
            recorder.lap(FORWARD, on_gpu=True)
        # where all sample their only token, propose() writes what follow() would
        if proposer is not None and not (max_query_len == 1 and num_sampled == len(rows)):
            proposer.follow(buffers, batch, hidden)
            if recorder is not None:
                recorder.lap(DRAFT, on_gpu=True)
        extras = DeviceExtras([], [], [])
        if self.prompts:
            results = self.prompts.collect(hidden, rows, counts, self.states.computed)
            extras = DeviceExtras([], results.logprobs, results.embeddings)
        ids, mapping, positions = sampled.indices[:0], sampled.idx_mapping, sampled.positions
        their_needs = np.zeros(num_sampled, np.int32) if needs is None else needs[samples]
        if num_sampled:
            logits = self.model.compute_logits(hidden[sampled.indices])
            sampled_rows = rows[samples]
            ids = self.sampler.sample(logits, mapping, positions, sampled_rows, their_needs)
            if (their_needs & np.int32(Need.LOGPROBS)).any():
                groups = self.sampler.logprobs(logits, ids, sampled_rows)
                extras = extras._replace(groups=groups)
        whose = self._advance(buffers.query_start_loc, ids, mapping, inputs.logits_places)
        self.sampler.count_sampled(ids, whose, positions, their_needs)
        if recorder is not None:
            recorder.lap(SAMPLE, on_gpu=True)
        if places.leaders is not None:
            self.propose(len(places.leaders), is_after_plain=places.is_plain_decode)
        return extras if any(extras) else None

    def propose(self, num_rows: int, *, is_after_plain: bool) -> None:
        """Let the proposer draft for the rows that have sampled, at most so many."""
        if self.speculator is None:
            return
        self.speculator.propose(num_rows, is_after_plain=is_after_plain)
        if self.recorder is not None:
            self.recorder.lap(DRAFT, on_gpu=True)

    def _attention_batch(
        self,
        buffers: InputBuffers,
        max_query_len: int,
        max_seq_len: int,
        query_len: int,
        *,
        is_even: bool = False,
        num_decodes: int = 0,
    ) -> AttentionBatch:
        return AttentionBatch(
            query_start_loc=buffers.query_start_loc,
            seq_lens=buffers.seq_lens,
            block_tables=buffers.block_tables,
            slot_mapping=buffers.slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            places_share_kv=query_len > 1,
            is_even=is_even,
            num_decodes=num_decodes,
        )

    def _forward(self, buffers: InputBuffers, batch: AttentionBatch) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden]; writes the step's K and V."""
        return self.model.forward(
            buffers.input_ids, buffers.positions, batch, self.k_caches, self.v_caches
        )

    def _mixed_forward(self, buffers: InputBuffers, batch: AttentionBatch) -> torch.Tensor:
        """_forward() of a mixed step, by its layers' graphs where there are some."""
        graphs: GraphManager = self.graphs
        size = graphs.dispatch_layers(len(buffers.input_ids), batch.max_query_len)
        if size is None:
            return self._forward(buffers, batch)
        assert graphs.layers is not None, "they have this size"
        return graphs.layers.forward(size, buffers.positions, batch, self.k_caches, self.v_caches)

    def _advance(
        self,
        query_start_loc: torch.Tensor,
        ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        logits_places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Move the batch's rows on and put the ids into the output ring.

        Returns the row [n] of each id, idx_mapping but for drafts that were not accepted.
        """
        if self.speculator is not None:
            return self.speculator.accept(query_start_loc, ids, logits_places)
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
        return idx_mapping
