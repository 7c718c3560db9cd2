"""Who proposes drafts: the one interface between the runner and every way of guessing ahead.

    a step       inputs -> forward -> sample -> accept_drafts
                             |                       |
                          follow()               propose()   drafts for the next step

A proposer leaves its drafts in the token table, from each row's total_len on, and their number in
num_drafts; the next step's input kernels find them there, and the CPU never sees them. A draft is
only ever a guess: whatever stands there, the ids that come out are those of plain decoding. So a
proposer that has no guess does nothing, and one that is wrong costs time alone.

follow() gets the target's inputs and last hidden states, which is what heads on top of the target
(EAGLE-3, MTP) would read; the two proposers here are ngram_proposer.py and draft_model.py.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.state_tables import InputBuffers
from nanorunner.workers.models.decoder import Decoder


class Leaders(NamedTuple):
    """The rows that get drafts after a step, as the device has them (step_inputs.py)."""

    header: torch.Tensor  # [>= 2] int32: how many
    rows: torch.Tensor  # [>= bucket] int32
    pair_header: torch.Tensor  # [>= 2] int32: twice as many
    pair_rows: torch.Tensor  # [>= 2 * bucket] int32: every row twice
    bucket: int  # at least as many as there are: what is launched
    # The step was plain decodes, as steps are while drafts do not pay: the next one hardly needs
    # any. A proposer whose drafts cost time may make one alone, and must keep its KV complete.
    is_after_plain: bool = False


class Proposer(Protocol):
    """What every way of proposing offers; the same on every rank, so that all draft alike."""

    # Whether propose() may stand inside the verify step's own graph; else it has graphs of its own.
    is_in_step_graph: bool

    @property
    def decoder(self) -> Decoder | None:
        """Return its own model, whole on this rank; None without one."""

    def load(self) -> None:
        """Fill weights, if there are any."""

    def block_bytes(self) -> int:
        """Return the bytes of KV that a block takes here, beside the target's."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate a KV cache over the target's block tables, if one is needed."""

    def release_kv(self) -> None:
        """Give it back."""

    def exercise(self) -> None:
        """Launch its own model's attention kernels once a plan, over no data."""

    def capture(self) -> None:
        """Capture graphs of its own, if it has any; rows of nobody are in the block."""

    def follow(self, buffers: InputBuffers, batch: AttentionBatch, hidden: torch.Tensor) -> None:
        """Read a step with prompt tokens in it: its inputs and the target's last hidden states."""

    def propose(self, leaders: Leaders) -> None:
        """Write drafts for the rows; they have advanced already."""

    def close(self) -> None:
        """Let go of every tensor."""
