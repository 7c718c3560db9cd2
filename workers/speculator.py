"""A rank's speculation: drafts are accepted after sampling, and proposed for the next step.

    sampled ids -> accept_drafts     rows advance by what was accepted; the rest becomes -1
                -> propose           drafts for the rows that sampled (proposer.py)

It takes advance_state's place in every step of an engine with speculation, also in those whose
decodes verify nothing: they too leave drafts behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanorunner.kernels.accept_drafts import accept_drafts
from nanorunner.kernels.state_tables import StateTables
from nanorunner.workers.draft_model import DraftModel
from nanorunner.workers.ngram_proposer import NgramProposer
from nanorunner.workers.proposer import Leaders, Proposer
from nanorunner.workers.step_inputs import StepInputs
from nanorunner.workers.step_output import OutputRing

if TYPE_CHECKING:
    from nanorunner.workers.step_body import StepBody


def open_speculator(body: StepBody) -> Speculator | None:
    """Return this rank's speculator with the proposer that is asked for, None without one."""
    speculation, tables = body.config.speculation, body.states.tables
    if speculation is None:
        return None
    assert body.states.room is not None, "a state table with speculation"
    proposer: Proposer
    if speculation.draft is None:
        proposer = NgramProposer(speculation, tables)
    else:
        proposer = DraftModel(
            body.config,
            body.device.torch_device,
            tables,
            body.sampling,
            body.peers,
            body.states.room,
            leaders_of(body.inputs, body.config.max_num_seqs),
            body.recorder,
        )
    return Speculator(tables, body.inputs, body.outputs, proposer)


def leaders_of(inputs: StepInputs, bucket: int, *, is_after_plain: bool = False) -> Leaders:
    """Return those of the step who get drafts, at most `bucket` rows."""
    (header, rows), (pair_header, pair_rows) = inputs.leaders, inputs.pairs
    return Leaders(header, rows, pair_header, pair_rows, bucket, is_after_plain)


class Speculator:
    """Accepts and proposes for one rank.

    accepted_rows [P] int32: the row of each accepted id, -1 for the others. Owner: this object.
    Place: the device. Lifetime: one step. Last writer: accept_drafts, on the main stream.
    """

    def __init__(
        self,
        tables: StateTables,
        inputs: StepInputs,
        outputs: OutputRing,
        proposer: Proposer,
    ) -> None:
        self.proposer = proposer
        self._tables = tables
        self._inputs = inputs
        self._outputs = outputs
        self._accepted_rows = torch.full_like(inputs.idx_mapping, -1)

    def accept(
        self,
        query_start_loc: torch.Tensor,
        ids: torch.Tensor,
        logits_places: torch.Tensor | None,
    ) -> torch.Tensor:
        """Advance the batch's rows, fill the output ring, and return whose each id [n] is now.

        [n] int32: the row of an accepted id, -1 for one that does not come out.
        """
        accepted_rows = self._accepted_rows[: len(ids)]
        accept_drafts(
            self._inputs.header,
            self._inputs.idx_mapping,
            query_start_loc,
            ids,
            self._tables,
            self._outputs.ids,
            self._outputs.step_counter,
            accepted_rows,
            logits_places,
        )
        return accepted_rows

    def propose(self, bucket: int, *, is_after_plain: bool) -> None:
        """Propose for the rows that sampled, at most `bucket` of them."""
        if bucket:
            leaders = leaders_of(self._inputs, bucket, is_after_plain=is_after_plain)
            self.proposer.propose(leaders)
