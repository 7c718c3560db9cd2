"""Drafts from the request's own text: what followed the last time its newest tokens stood there.

Prompt lookup decoding (Saxena, 2023): no model, no weights, one small kernel a step. It pays where
output repeats input: editing, summarising, answering from a document.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.ngram_drafts import ngram_drafts
from nanorunner.kernels.state_tables import InputBuffers, StateTables
from nanorunner.workers.messages import Speculation
from nanorunner.workers.proposer import Leaders


class NgramProposer:
    """Looks suffixes of ngram_max down to ngram_min tokens up in the token table."""

    is_in_step_graph = True
    decoder = None

    def __init__(self, speculation: Speculation, tables: StateTables) -> None:
        self._speculation = speculation
        self._tables = tables

    def load(self) -> None:
        """There are no weights."""

    def block_bytes(self) -> int:
        """There is no KV."""
        return 0

    def allocate_kv(self, num_blocks: int) -> None:
        """There is no KV."""

    def release_kv(self) -> None:
        """There is no KV."""

    def exercise(self) -> None:
        """There is no model."""

    def capture(self) -> None:
        """The step's own graph has it."""

    def follow(self, buffers: InputBuffers, batch: AttentionBatch, hidden: torch.Tensor) -> None:
        """The token table is all that is read."""

    def propose(self, leaders: Leaders) -> None:
        """Write drafts for the rows; they have advanced already."""
        speculation = self._speculation
        ngram_drafts(
            leaders.header,
            leaders.rows[: leaders.bucket],
            self._tables,
            max_drafts=speculation.num_tokens,
            min_n=speculation.ngram_min,
            max_n=speculation.ngram_max,
        )

    def close(self) -> None:
        """Nothing is held."""
