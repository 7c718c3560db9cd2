"""Drafts from a small model that runs ahead of the target; the target verifies what it guesses.

    follow     a step with prompt tokens: its inputs go through the small model too, for their KV
    propose    pairs     offsets -1, 0    the token before the newest, the newest -> draft 0
               leaders   offset 1         draft 0                                 -> draft 1
               ...
               leaders   offset K - 1     draft K - 2                             -> draft K - 1

Why pairs: the last draft of a chain is never the small model's input. When all drafts are right,
the KV of that one is missing when the next chain begins, so the token before the newest is always
written again: a place more, where a pass reads all weights once for any few places.

After a plain decode step the first pass alone is made: drafts do not pay just then, but where they
are tried again the KV must be there.

A draft is drawn with the request's own temperature and with the very noise that the target's draw
at that position has. That couples the two: where the models agree, so do their draws (Daliri,
Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024).

The model lies whole on every rank, which all draft for themselves; a maximum over the ranks makes
one id of their best ones, so that no rounding can part them.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.lm_head_sample import lm_head_sample, serves
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs
from nanorunner.kernels.sample_keys import sample_keys
from nanorunner.kernels.state_tables import InputBuffers, StateTables
from nanorunner.kernels.token_keys import key_ids
from nanorunner.kernels.write_drafts import write_drafts
from nanorunner.workers import kv_cache
from nanorunner.workers.attention_warm_up import exercise_attention
from nanorunner.workers.cuda_graphs import (
    CapturedGraph,
    capture_graph,
    capture_sizes,
    replay_graph,
)
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import BLOCK_SIZE, RunnerConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.proposer import Leaders
from nanorunner.workers.sampler_v2 import SamplerGroup
from nanorunner.workers.sampling_state import SamplingState
from nanorunner.workers.spans import SpanRecorder
from nanorunner.workers.step_inputs import first_places, make_buffers
from nanorunner.workers.weights import WeightSource, load_weights


class DraftModel:
    """The small model of one rank, its KV cache, its inputs and its graphs.

    kv_cache [2, layers, blocks, 256, kv_heads, head_dim], over the target's block tables. Owner:
    this object. Place: the device. Lifetime: from allocate_kv() to release_kv(). Last writer:
    follow() or propose(), on the main stream.
    _buffers, of 2 * max_num_seqs places. Owner: this object. Place: the device, at fixed addresses.
    Lifetime: this object's, contents one pass. Last writer: prepare_decode_inputs, on the main
    stream.
    """

    is_in_step_graph = False  # graphs of its own serve every kind of step

    def __init__(
        self,
        config: RunnerConfig,
        device: torch.device,
        tables: StateTables,
        sampling: SamplingState,
        peers: SamplerGroup,
        room: torch.Tensor,
        everyone: Leaders,
        recorder: SpanRecorder | None,
    ) -> None:
        """everyone: the step's leaders, as many as a step may have; their addresses stay.

        room [R] int32: positions that a row's blocks have room for, at most its token limit.
        """
        speculation = config.speculation
        assert speculation is not None, "an engine that drafts"
        assert speculation.draft is not None, "with a model"
        self._config, self._device = config, device
        self._sampling, self._peers = sampling, peers
        # A chain may outrun the row's blocks: the scheduler gives what the next step needs. There a
        # place is nobody, and its draft is not written.
        self._bounded = tables._replace(token_limit=room)
        self._everyone, self._recorder = everyone, recorder
        self._source = WeightSource(speculation.checkpoint, speculation.load_format, config.seed)
        self.decoder = Decoder(
            speculation.draft,
            tp=1,
            rank=0,
            dtype=getattr(torch, config.dtype),
            device=device,
            group=Group(None, 0, 1, device, config.step_timeout_s),
            attention_backend=config.attention_backend,
            max_model_len=config.max_model_len,
            batch_invariant=config.batch_invariant,
        )
        size = config.max_num_seqs
        self._buffers = make_buffers(2 * size, 2 * size, config.max_model_len, device)
        # [2 * max_num_seqs] int32: -1, 0, -1, 0, ...
        self._pair_offsets = torch.arange(2 * size, dtype=torch.int32, device=device) % 2 - 1
        # [K, max_num_seqs] int32: a row a pass
        passes = torch.arange(speculation.num_tokens, dtype=torch.int32, device=device)
        self._offsets = passes[:, None].repeat(1, size)
        self._sizes = capture_sizes(size)
        # by bucket and is_after_plain; none: all runs eagerly
        self._graphs: dict[tuple[int, bool], list[CapturedGraph]] = {}

    def load(self) -> None:
        """Fill the weights."""
        load_weights(self.decoder, self._source)

    def block_bytes(self) -> int:
        """Return the bytes of KV that a block takes here, beside the target's."""
        model, itemsize = self.decoder.model, self.decoder.dtype.itemsize
        return kv_cache.block_bytes(model.num_layers, model.num_kv_heads, model.head_dim, itemsize)

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV cache: as many blocks as the target's."""
        model = self.decoder.model
        self.kv_cache = kv_cache.allocate(
            model.num_layers,
            num_blocks,
            model.num_kv_heads,
            model.head_dim,
            self.decoder.dtype,
            self._device,
        )
        self._k_caches, self._v_caches = list(self.kv_cache[0]), list(self.kv_cache[1])

    def release_kv(self) -> None:
        """Give the cache's memory back, and the graphs, which hold its address."""
        self._graphs = {}
        self._k_caches = self._v_caches = []
        self.kv_cache = torch.empty(0)

    def exercise(self) -> None:
        """Launch the attention kernels once a plan, over no data."""
        exercise_attention(
            self.decoder,
            self._k_caches[0],
            self._v_caches[0],
            2 * self._config.max_num_seqs,
            beside_prompts=False,  # follow() keeps to the prompts' launch
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture each bucket's graphs; the block holds rows of nobody."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # the smaller ones fit in the largest one's memory
            for is_after_plain in (False, True):
                leaders = self._everyone._replace(bucket=size, is_after_plain=is_after_plain)
                body = partial(self._draft, leaders)
                self._graphs[size, is_after_plain] = capture_graph(body, pool, self._recorder)

    @torch.inference_mode()
    def follow(self, buffers: InputBuffers, batch: AttentionBatch, hidden: torch.Tensor) -> None:
        """Write the KV of a step's tokens, prompts and chunks of them; hidden is not used."""
        # never the ways of a pure decode: they are compiled for as many places as _draft() has
        batch = batch._replace(max_query_len=max(batch.max_query_len, 2), num_decodes=0)
        self.decoder.forward(
            buffers.input_ids, buffers.positions, batch, self._k_caches, self._v_caches
        )

    def propose(self, leaders: Leaders) -> None:
        """Write drafts for the rows; they have advanced already."""
        if self._graphs:
            size = self._sizes[bisect_left(self._sizes, leaders.bucket)]
            replay_graph(self._graphs[size, leaders.is_after_plain], self._recorder)
        else:
            self._draft(leaders)

    def close(self) -> None:
        """Let go of every tensor; a second call does nothing."""
        self.release_kv()
        self.decoder.release()

    @torch.inference_mode()
    def _draft(self, leaders: Leaders) -> torch.Tensor:
        """Write each row's drafts, one a pass; return the last ones [bucket] int64."""
        size, num_passes = leaders.bucket, 1 if leaders.is_after_plain else len(self._offsets)
        pairs = leaders.pair_header, leaders.pair_rows
        hidden, positions = self._run(*pairs, self._pair_offsets, 2 * size)
        ids = self._draw(hidden[1::2].contiguous(), positions[1::2].contiguous(), leaders, 0)
        for index in range(1, num_passes):
            rows = leaders.header, leaders.rows
            hidden, positions = self._run(*rows, self._offsets[index], size)
            ids = self._draw(hidden, positions, leaders, index)
        return ids

    def _run(
        self, header: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one token a place, `size` places; return hidden states [size, hidden], positions."""
        buffers = first_places(self._buffers, size)
        prepare_decode_inputs(header, rows, self._bounded, buffers, BLOCK_SIZE, offsets)
        batch = AttentionBatch(
            query_start_loc=buffers.query_start_loc,
            seq_lens=buffers.seq_lens,
            block_tables=buffers.block_tables,
            slot_mapping=buffers.slot_mapping,
            max_query_len=1,
            max_seq_len=self._config.max_model_len,
            places_share_kv=offsets is self._pair_offsets,
        )
        hidden = self.decoder.forward(
            buffers.input_ids, buffers.positions, batch, self._k_caches, self._v_caches
        )
        return hidden, buffers.positions

    def _draw(
        self, hidden: torch.Tensor, positions: torch.Tensor, leaders: Leaders, index: int
    ) -> torch.Tensor:
        """Draw draft `index` from hidden [bucket, hidden], write it, and return the ids."""
        decoder, column = self.decoder, self._sampling.column
        rows = leaders.rows[: leaders.bucket]
        heat, seed = column("temperature"), column("seed")
        if decoder.has_few_rows and serves(len(hidden), decoder.lm_head):
            num_ids = decoder.vocab.size
            keys = lm_head_sample(
                hidden, decoder.lm_head, rows, positions, heat, seed, num_ids=num_ids
            )
        else:
            keys = sample_keys(decoder.compute_logits(hidden), rows, positions, heat, seed)
        ids = key_ids(self._peers.all_reduce_max(keys))
        write_drafts(leaders.header, rows, ids, index, self._bounded)
        return ids
