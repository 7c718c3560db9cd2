"""What the CPU sends up for one step, and the fixed buffers that the step's kernels fill from it.

    block [words] int32, one pinned copy a step, none when the batch is the last one's:
        header (requests, tokens) | idx_mapping [P] | query_start_loc [P + 1] | logits_places [P]
        with speculation also
        offsets [P] | header and rows [S] of those who get drafts | header and rows of them twice

P places (places.py), S requests; without speculation a request is one place. The block's device
copy lies at one address, so the input kernels of a captured graph read it too.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.state_tables import (
    NUM_REQS,
    NUM_TOKENS,
    NUM_VERIFIED,
    QUERY_LEN,
    InputBuffers,
    LogitsRows,
)
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workers.pinned_ring import PinnedRing
from nanorunner.workers.places import Places

HEADER_WORDS = 4

Words = npt.NDArray[np.int32]


def make_buffers(
    max_tokens: int, max_places: int, max_model_len: int, device: torch.device
) -> InputBuffers:
    """Return zeroed buffers for steps of so many tokens and places at most."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return InputBuffers(
        input_ids=zeros(max_tokens, dtype=torch.int64),
        positions=zeros(max_tokens, dtype=torch.int64),
        query_start_loc=zeros(max_places + 1, dtype=torch.int32),
        seq_lens=zeros(max_places, dtype=torch.int32),
        slot_mapping=zeros(max_tokens, dtype=torch.int64),
        block_tables=zeros(max_places, -(-max_model_len // BLOCK_SIZE), dtype=torch.int32),
    )


def first_places(whole: InputBuffers, size: int) -> InputBuffers:
    """Return the part of the buffers that a step of `size` places of one token has."""
    return InputBuffers(
        whole.input_ids[:size],
        whole.positions[:size],
        whole.query_start_loc[: size + 1],
        whole.seq_lens[:size],
        whole.slot_mapping[:size],
        whole.block_tables[:size],
    )


class StepInputs:
    """The input block and the input buffers of one rank.

    Owner: the runner. Place: the device, at fixed addresses. Lifetime: the engine's; contents one
    step. Last writers, on the main stream: the copy of send(), then the prepare_* kernels.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        depth: int,
        device: torch.device,
        max_query_len: int = 1,
    ) -> None:
        """max_query_len: places that a decoding request takes at most; above 1 with speculation."""
        self.has_offsets = max_query_len > 1
        size = max_num_seqs * max_query_len
        lengths = [HEADER_WORDS, size, size + 1, size]
        if self.has_offsets:
            lengths += [size, HEADER_WORDS, max_num_seqs, HEADER_WORDS, 2 * max_num_seqs]
        self._starts = np.cumsum([0, *lengths]).tolist()
        self._num_words = self._starts[-1]
        self._ring = PinnedRing(device, depth + 2, self._num_words)
        self.block = torch.zeros(self._num_words, dtype=torch.int32, device=device)
        pieces = [self.block[a:b] for a, b in pairwise(self._starts)]
        self.header, self.idx_mapping, self.query_start_loc, self.logits_places = pieces[:4]
        self.offsets: torch.Tensor | None = pieces[4] if self.has_offsets else None
        # (header, rows) of those who get drafts, and the same with every row twice
        self.leaders, self.pairs = (tuple(pieces[i : i + 2]) for i in (5, 7))

        self._buffers = make_buffers(max_num_tokens, size, max_model_len, device)
        self._decodes: dict[int, InputBuffers] = {}  # decode_buffers() so far, by size
        self._logits = LogitsRows(
            indices=torch.zeros(size, dtype=torch.int64, device=device),
            idx_mapping=torch.zeros(size, dtype=torch.int32, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
        )

    def send(self, batch: Places) -> None:
        """Enqueue the copy of a batch."""
        slot = self._ring.take(self._num_words)
        _, mapping, loc, places = self._starts[:4]
        rows, words = batch.rows, slot.words
        num_places, num_tokens = len(rows), int(batch.counts.sum())
        words[NUM_REQS], words[NUM_TOKENS] = num_places, num_tokens
        words[NUM_VERIFIED], words[QUERY_LEN] = batch.num_verified, batch.query_len
        words[mapping : mapping + num_places] = rows
        words[mapping + num_places : loc] = -1
        words[loc] = 0
        np.cumsum(batch.counts, out=words[loc + 1 : loc + 1 + num_places])
        words[loc + 1 + num_places : places] = num_tokens
        ends = np.where(batch.samples, np.cumsum(batch.samples) - 1, -1)
        words[places : places + num_places] = ends
        if self.has_offsets:
            self._fill_speculation(words, batch)
        self._ring.send(slot, self._num_words, self.block)

    def _fill_speculation(self, words: Words, batch: Places) -> None:
        offsets, leader_header, leaders, pair_header, pairs, end = self._starts[4:]
        words[offsets:end] = 0
        if batch.offsets is not None:
            words[offsets : offsets + len(batch.rows)] = batch.offsets
        words[leaders:pair_header] = words[pairs:end] = -1
        if batch.leaders is not None:
            count = len(batch.leaders)
            words[leader_header + NUM_REQS] = words[leader_header + NUM_TOKENS] = count
            words[pair_header + NUM_REQS] = words[pair_header + NUM_TOKENS] = 2 * count
            words[leaders : leaders + count] = batch.leaders
            words[pairs : pairs + 2 * count] = batch.leaders.repeat(2)

    @property
    def all_ids(self) -> torch.Tensor:
        """Where a step's input ids lie [most tokens]; behind them are those of older steps."""
        return self._buffers.input_ids

    def decode_buffers(self, size: int) -> InputBuffers:
        """Return the buffers of a decode of `size` places, padding included."""
        if size not in self._decodes:
            self._decodes[size] = first_places(self._buffers, size)
        return self._decodes[size]

    def mixed_buffers(self, num_reqs: int, num_tokens: int) -> InputBuffers:
        """Return the buffers of a mixed batch; its query_start_loc is the block's."""
        buffers = self.decode_buffers(num_reqs)
        whole = self._buffers
        return buffers._replace(
            input_ids=whole.input_ids[:num_tokens],
            positions=whole.positions[:num_tokens],
            slot_mapping=whole.slot_mapping[:num_tokens],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
        )

    def logits_rows(self, num_sampled: int) -> LogitsRows:
        """Return which tokens of a mixed batch are sampled from."""
        return LogitsRows(*(tensor[:num_sampled] for tensor in self._logits))
