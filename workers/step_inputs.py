"""What the CPU sends up for one step, and the fixed buffers that the step's kernels fill from it.

    block [words] int32, one pinned copy a step, none when the batch is the last one's:
        header (requests, tokens) | idx_mapping [S] | query_start_loc [S + 1] | logits_places [S]

The block's device copy lies at one address, so the input kernels of a captured graph read it too.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.state_tables import NUM_REQS, NUM_TOKENS, InputBuffers, LogitsRows
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workers.pinned_ring import PinnedRing

HEADER_WORDS = 4

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
    ) -> None:
        self.max_num_seqs = max_num_seqs
        size = max_num_seqs
        starts = np.cumsum([0, HEADER_WORDS, size, size + 1, size])
        self._num_words = int(starts[-1])
        self._ring = PinnedRing(device, depth + 2, self._num_words)
        self.block = torch.zeros(self._num_words, dtype=torch.int32, device=device)
        pieces = [self.block[a:b] for a, b in pairwise(starts)]
        self.header, self.idx_mapping, self.query_start_loc, self.logits_places = pieces
        self._starts = starts

        max_blocks = -(-max_model_len // BLOCK_SIZE)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._buffers = InputBuffers(
            input_ids=zeros(max_num_tokens, dtype=torch.int64),
            positions=zeros(max_num_tokens, dtype=torch.int64),
            query_start_loc=zeros(size + 1, dtype=torch.int32),
            seq_lens=zeros(size, dtype=torch.int32),
            slot_mapping=zeros(max_num_tokens, dtype=torch.int64),
            block_tables=zeros(size, max_blocks, dtype=torch.int32),
        )
        self._decodes: dict[int, InputBuffers] = {}  # decode_buffers() so far, by size
        self._logits = LogitsRows(
            indices=zeros(size, dtype=torch.int64),
            idx_mapping=zeros(size, dtype=torch.int32),
            positions=zeros(size, dtype=torch.int64),
        )

    def send(self, rows: Int64, counts: Int64, samples: Mask) -> None:
        """Enqueue the copy of a batch: rows [n], tokens each [n], who samples [n]."""
        slot = self._ring.take(self._num_words)
        _, mapping, loc, places, _ = self._starts
        num_reqs, num_tokens, words = len(rows), int(counts.sum()), slot.words
        words[NUM_REQS], words[NUM_TOKENS] = num_reqs, num_tokens
        words[mapping : mapping + num_reqs] = rows
        words[mapping + num_reqs : loc] = -1
        words[loc] = 0
        np.cumsum(counts, out=words[loc + 1 : loc + 1 + num_reqs])
        words[loc + 1 + num_reqs : places] = num_tokens
        words[places : places + num_reqs] = np.where(samples, np.cumsum(samples) - 1, -1)
        self._ring.send(slot, self._num_words, self.block)

    def decode_buffers(self, size: int) -> InputBuffers:
        """Return the buffers of a decode of `size` requests, padding included."""
        if size not in self._decodes:
            whole = self._buffers
            self._decodes[size] = InputBuffers(
                whole.input_ids[:size],
                whole.positions[:size],
                whole.query_start_loc[: size + 1],
                whole.seq_lens[:size],
                whole.slot_mapping[:size],
                whole.block_tables[:size],
            )
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
