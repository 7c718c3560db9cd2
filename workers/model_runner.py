"""Model Runner V2: stable rows, inputs made on the device, nothing on the hot path that waits.

    step(wire)
        apply       rows come and go; what changed is staged: one copy, one kernel, or nothing
        send        who is in the batch: one copy, or nothing when it is the last step's
        prepare     input kernels read the state table (kernels/prepare_inputs.py)
        forward     the decoder; a decode replays a CUDA graph that holds everything from
                    prepare to advance
        sample      on every rank: the best (score, id) of each vocabulary shard, one all-reduce
        advance     num_computed, total_len, last_sampled move on, on the device
        propose     with speculation: drafts for the next step (speculator.py)
        finish      an event: then the ids lie in host memory; step() has returned long before

All kernels are on one stream, so a row's old owner and its new one cannot meet. The CPU never reads
a device value here: what it must know it derives from what it has scheduled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.triton_support import is_compiling_only
from nanorunner.workers import idle_steps
from nanorunner.workers.cuda_graphs import PLAIN, GraphManager
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import DRAW, Need
from nanorunner.workers.layer_graphs import LayerGraphs, relative_speed
from nanorunner.workers.messages import Int32, RunnerConfig, StepInput
from nanorunner.workers.places import NOBODY, Places, lay_out
from nanorunner.workers.request_rows import Int64
from nanorunner.workers.spans import APPLY, DOWNLOAD, STAGE
from nanorunner.workers.step_body import StepBody
from nanorunner.workers.step_extras import DeviceExtras
from nanorunner.workers.step_output import PendingStep

Mask = npt.NDArray[np.bool_]
# The longest request over the average one, up to which a batch counts as even. Chosen, not
# measured: attention's two plans cross somewhere between 1 and the 1.9 of a ragged batch.
EVEN = 1.2
NO_ROWS: Int64 = np.zeros(0, np.int64)
# & of an IntFlag takes microseconds
LOGPROBS_BIT = int(Need.LOGPROBS)
LOGITS_BITS = int(DRAW) | LOGPROBS_BIT


class ModelRunner(StepBody):
    """One rank's executor: its share of the weights, its KV cache, its state table, its graphs."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group, device: Device) -> None:
        super().__init__(config, rank, group, device)
        # until capture()
        self.graphs: GraphManager = GraphManager(config.max_num_seqs, is_enabled=False)
        self._layers: LayerGraphs | None = None  # until capture_layers()
        # the current batch, as the CPU knows it
        self._request_ids: Int32 = np.zeros(0, np.int32)
        self._rows: Int64 = NO_ROWS
        self._counts: Int64 = NO_ROWS
        # and what stays true of it while the same requests go on
        self._places = NOBODY
        self._steps: Int64 = NO_ROWS  # tokens that each moves on by, at least
        self._samples: Mask = np.zeros(0, np.bool_)  # who reaches its last token
        self._sampled_ids: Int32 = np.zeros(0, np.int32)
        self._generations: Int64 = NO_ROWS
        self._is_decode = False
        self._is_even = False  # none of its requests is much longer than the others
        self._needs: Int32 = np.zeros(0, np.int32)
        self._is_plain = True  # nobody wants more of the sampler than temperature and seed
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
        """Capture every decode graph on a batch of nobody, and return their manager.

        It has the layers' graphs too, which are captured where they are not yet.
        """
        graphs = GraphManager(
            self.config.max_num_seqs,
            is_enabled=self.has_graphs,
            recorder=self.recorder,
            max_query_len=self.config.max_query_len,
            differs_when_even=self.model.differs_when_even,
        )
        if self.has_graphs:
            self.inputs.send(NOBODY)
            graphs.capture(self.decode_body)
            self.capture_layers()
            graphs.layers = self._layers
            if self.speculator is not None:
                self.speculator.proposer.capture()
        return graphs

    @torch.inference_mode()
    def capture_layers(self) -> None:
        """Capture the layers' graphs, once: they hold no address of the KV cache."""
        has_layers = self.has_graphs and self.group.tp == 1 and not is_compiling_only()
        if has_layers and self._layers is None:
            speed = relative_speed(self.device.torch_device, self.dtype)
            self._layers = LayerGraphs(self.model, self.inputs.all_ids, speed)
            self._layers.capture()

    def close(self) -> None:
        """Let go of the layers' graphs, and of all that RunnerStages.close() lets go of."""
        self._layers = None
        super().close()

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
            self.states.advance(self._rows, self._steps, self._samples)
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
            self._counts = np.full_like(self._counts, self._places.query_len)
            return True
        return False

    def _begin_batch(self) -> None:
        """Send the batch, and note what a steady decode need not find out again in every step."""
        rows, steps, states = self._rows, self._counts, self.states
        is_decoding = None
        if self.speculator is not None:
            is_decoding = states.computed[rows] >= states.prefill_len[rows]
            steps = np.where(is_decoding, 1, steps)
        samples = states.samples(rows, steps)
        is_read = False
        if self.prompts:
            samples &= ~self.prompts.is_pooled[rows]
            is_read = bool(self.prompts.has_reader[rows].any())
        self._steps, self._samples = steps, samples
        self._places = Places(rows, steps, samples)
        self._sampled_ids = self._request_ids[samples]
        if is_decoding is not None:
            self._places = lay_out(rows, self._counts, samples, is_decoding)
            whose = self._request_ids.repeat(np.where(is_decoding, self._counts, 1))
            self._sampled_ids = whose[self._places.samples]
        self._generations = states.rows.generations(rows)
        # The last token of a prompt looks like a decode; but a graph keeps no hidden states.
        self._is_decode = bool(samples.all() and (steps == 1).all()) and not is_read
        if self._places.query_len > 1:
            self._is_decode &= self._places.is_verified_alone
        # They grow together: even requests stay even. Others may become so before the batch
        # changes, and keep the plan for ragged ones until then.
        if len(rows):
            lengths = states.computed[rows] + steps
            self._is_even = bool(lengths.max() <= EVEN * lengths.mean())
        self._may_need_less = True
        if len(rows):
            self.inputs.send(self._places)

    def _look_at_needs(self) -> None:
        """Note what the batch needs of the sampler; with their min_tokens rows need less."""
        places = self._places
        positions = self.states.computed[places.rows] + places.counts - 1
        self._needs = self.sampling.needs(places.rows, positions)
        wanted = int(np.bitwise_or.reduce(self._needs))
        self._is_plain = not wanted & LOGITS_BITS
        self._may_need_less = bool(wanted & Need.STOP_IDS)

    def _run(self) -> DeviceExtras | None:
        """Enqueue everything from the input kernels to the state's advance.

        Return what some rows get beside their ids, None in most steps.
        """
        if self._may_need_less:
            self._look_at_needs()
        places, num_reqs = self._places, len(self._rows)
        graph = self.graphs.dispatch(
            num_reqs,
            is_decode=self._is_decode,
            is_plain=self._is_plain,
            query_len=places.query_len,
            is_even=self._is_even,
        )
        self.outputs.begin()
        if graph is None:
            if self.speculator is not None:  # the device alone knows how far each has come
                max_seq_len = self.config.max_model_len
            else:
                max_seq_len = int((self.states.computed[places.rows] + places.counts).max())
            return self.mixed_step(places, max_seq_len, self._needs)
        logits = self.graphs.replay(graph)
        if graph.family != PLAIN:
            return self.sample_outside(logits, places, self._needs)
        if self.proposer is not None and not self.proposer.is_in_step_graph:
            self.propose(num_reqs, is_after_plain=places.is_plain_decode)
        return None  # the step is done
