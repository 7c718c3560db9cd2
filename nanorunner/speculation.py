"""Drafts in the scheduler's books: how many rows a decode has in a step, and what came of them.

    query_len() -> 1, or q = 1 + K         schedule(): a step of q positions a decode leaves
                                           `computed` and `sure` run ahead (running_table.py)
    settle()    <- ids [n, q] of a step    update(): what was not accepted is taken off again

Every id of a verify step is the one that plain decoding would have sampled in its place, so
nothing here chooses ids; it only counts how many came.
"""

from __future__ import annotations

import numpy as np

from nanorunner.draft_control import DraftController
from nanorunner.running_table import Rows, RunningTable
from nanorunner.sampled_ids import SampledIds
from nanorunner.scheduler_stats import DraftStats, SchedulerStats
from nanorunner.step_plan import ScheduledStep
from nanorunner.workers.messages import Int32


def check_drafts(
    num_speculative_tokens: int, max_num_seqs: int, max_num_batched_tokens: int, is_v1: bool
) -> None:
    """Raise ValueError, naming the numbers, for drafts that no step or no runner could take."""
    if num_speculative_tokens < 0 or (is_v1 and num_speculative_tokens):
        raise ValueError(
            f"num_speculative_tokens {num_speculative_tokens}: use 0 or more, and 0 with runner "
            f"v1, which does not speculate"
        )
    query_len = 1 + num_speculative_tokens
    if max_num_batched_tokens < max_num_seqs * query_len:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} is less than max_num_seqs "
            f"{max_num_seqs} times {query_len}: a step could not hold one token and "
            f"{num_speculative_tokens} drafts of each; raise the first, or lower the second or "
            f"num_speculative_tokens"
        )


class DraftBooks:
    """The drafts of one scheduler. Without speculation every step is a plain one.

    controller: says before each step whether drafts pay; None: always.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        controller: DraftController | None,
        stats: SchedulerStats,
    ) -> None:
        self.max_query_len = 1 + num_speculative_tokens
        self.controller = controller
        self.stats = DraftStats(num_speculative_tokens)  # by place
        self._totals = stats

    def query_len(self, num_decodes: int) -> int:
        """How many rows each of the next step's decodes should have."""
        if num_decodes == 0:
            return 1
        if self.controller is None:
            return self.max_query_len
        return self.controller.query_len(num_decodes)

    def settle(
        self, table: RunningTable, sampled: SampledIds, rows: Rows, ids: Int32, num_decodes: int
    ) -> tuple[Rows, list[int]]:
        """Set the bounds right after a verify step; return what is to be appended, and who stops.

        rows [n], all alive, the first num_decodes of which had drafts; ids [n, q]. Returns how many
        of each row's ids it keeps [n], and the rows that end with the last of them.
        """
        counts: Rows = np.add.reduce(ids >= 0, axis=1, dtype=np.int64)
        decodes = rows[:num_decodes]
        room = table.limit[decodes] - table.known[decodes]
        self.stats.count(ids[:num_decodes], room, self._totals)
        table.computed[decodes] -= ids.shape[1] - counts[:num_decodes]
        table.sure[decodes] += counts[:num_decodes] - 1
        num_ids = int(counts.sum())
        rows_that_stop = sampled.cut(table, rows, ids, counts)
        self._totals.dropped_ids += num_ids - int(counts.sum())
        return counts, rows_that_stop

    def note_read(self, step: ScheduledStep, num_new_ids: int) -> None:
        """Let the controller know that a step has come back, and with how many ids of use."""
        assert self.controller is not None, "there is nobody to be told"
        num_decodes = step.num_decodes if len(step.rows) == step.num_decodes else 0
        step_id = step.step_input.step_id
        self.controller.step_read(step_id, num_decodes, step.query_len, num_new_ids)
