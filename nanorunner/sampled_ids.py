"""What a step sampled, looked at before and after it is stored: is it ours, and does it stop?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanorunner.running_table import Rows, RunningTable
from nanorunner.step_plan import ScheduledStep
from nanorunner.workers.messages import Int32, StepOutput

Flags = npt.NDArray[np.bool_]


class SampledIds:
    """The rules of one vocabulary: which ids exist, and which of them end a request."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        # Configurations name ids beyond the vocabulary, or -1 for none; neither can be sampled.
        self._is_eos[[token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]] = True

    def check(self, step: ScheduledStep, output: StepOutput) -> Int32:
        """Return the output's ids; RuntimeError if they are not this step's.

        Also found here: an id that no token has, such as a placeholder that was never filled.
        """
        due, came = step.step_input.step_id, output.step_id
        ids = np.asarray(output.token_ids, dtype=np.int32)
        if came != due:
            raise RuntimeError(f"the runner answered step {came}; step {due} was due")
        if ids.size != step.sample_ids.size or not np.array_equal(
            output.request_ids, step.sample_ids
        ):
            raise RuntimeError(f"step {due}: the runner sampled for other requests than told")
        # As unsigned numbers, so that one comparison finds negative ids as well.
        if ids.size and int(ids.view(np.uint32).max()) >= self._is_eos.size:
            raise RuntimeError(f"step {due}: a sampled id is not in the vocabulary")
        return ids

    def are_stops(self, table: RunningTable, rows: Rows, ids: Int32) -> Flags:
        """Whether each id, the last one of its row, ends the row's request; [len(rows)]."""
        is_stop = self._is_eos[ids] & table.obeys_eos[rows]
        for at in np.flatnonzero(table.has_stop_ids[rows]).tolist():
            is_stop[at] |= int(ids[at]) in table.request(int(rows[at])).stop_token_ids
        result: Flags = is_stop & (table.known[rows] >= table.min_len[rows])
        return result
