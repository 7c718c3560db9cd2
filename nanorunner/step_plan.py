"""A step on its way: filled by the scheduler, frozen when it leaves, kept until it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nanorunner.running_table import Rows
from nanorunner.workers.messages import Int32, NewRequest, StepInput


@dataclass(slots=True)
class StepPlan:
    """The step being scheduled; its decodes are the roster's."""

    budget: int  # tokens that may still be added
    query_len: int = 1  # tokens of each decode: its newest one, and drafts behind it
    num_prefill_tokens: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens), batch order
    completed: list[int] = field(default_factory=list)  # rows whose last chunk this is
    new: list[NewRequest] = field(default_factory=list)
    new_blocks: list[tuple[int, bytes]] = field(default_factory=list)
    writing: set[bytes] = field(default_factory=set)  # digests of prompt blocks being written
    has_preempted: bool = False

    def pack_batch(self, request_ids: Int32) -> bytes:
        """Return the (request id, tokens) pairs of a batch: its decodes, then its chunks."""
        pairs = np.full((len(request_ids), 2), self.query_len, dtype=np.int32)
        pairs[:, 0] = request_ids
        if self.chunks:
            pairs[-len(self.chunks) :, 1] = [count for _, count in self.chunks]
        return pairs.tobytes()


class ScheduledStep(NamedTuple):
    """A step that was scheduled and is not yet read."""

    step_input: StepInput
    rows: Rows  # every row in the batch, in batch order
    sample_rows: Rows  # those that sample
    sample_ids: Int32  # their request ids, a decode's once for each of its tokens
    pooled_rows: Rows  # those whose embedding it completes
    published: list[int]  # blocks whose content this step completes
    query_len: int  # tokens of each decode
    num_decodes: int  # they are the first of rows and of sample_rows
