"""What a step sampled, looked at before and after it is stored: is it ours, and does it stop?"""

from __future__ import annotations

import numpy as np

from nanorunner.request import Request
from nanorunner.running_table import Rows, RunningTable
from nanorunner.step_plan import ScheduledStep
from nanorunner.workers.messages import Int32, StepOutput


class SampledIds:
    """The rules of one vocabulary: which ids exist, and which of them end a request."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        # [vocab_size]: the ids that end some request, now or before; most steps have none of them.
        self._may_stop = np.zeros(vocab_size, dtype=np.bool_)
        # Configurations name ids beyond the vocabulary, or -1 for none; neither can be sampled.
        known = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        self._may_stop[known] = True

    def add(self, request: Request) -> None:
        """Know the request's own stop ids."""
        if request.stop_token_ids:
            self._may_stop[list(request.stop_token_ids)] = True

    def check(self, step: ScheduledStep, output: StepOutput) -> Int32:
        """Return the output's ids; RuntimeError if they are not this step's.

        Also found here: an id that no token has, such as a placeholder that was never filled.
        """
        due, came = step.step_input.step_id, output.step_id
        ids = np.asarray(output.token_ids, dtype=np.int32)
        request_ids = np.asarray(output.request_ids, dtype=np.int32)
        if came != due:
            raise RuntimeError(f"the runner answered step {came}; step {due} was due")
        # As bytes: a tenth of what array_equal takes.
        is_same = request_ids.tobytes() == step.sample_ids.tobytes()
        if ids.size != step.sample_ids.size or not is_same:
            raise RuntimeError(f"step {due}: the runner sampled for other requests than told")
        # As unsigned numbers, so that one comparison finds negative ids as well.
        if ids.size and int(ids.view(np.uint32).max()) >= self._may_stop.size:
            raise RuntimeError(f"step {due}: a sampled id is not in the vocabulary")
        return ids

    def stopped(self, table: RunningTable, rows: Rows, ids: Int32) -> list[int]:
        """Return those of the rows whose request ends with its id, the last one of the row."""
        may_stop = self._may_stop[ids]
        if not np.count_nonzero(may_stop):
            return []
        pairs = zip(rows[may_stop].tolist(), ids[may_stop].tolist(), strict=True)
        return [row for row, token_id in pairs if self._is_stop(table, row, token_id)]

    def _is_stop(self, table: RunningTable, row: int, token_id: int) -> bool:
        request = table.request(row)
        if table.known[row] < request.min_len:
            return False
        is_eos = token_id in self._eos_token_ids and not request.ignore_eos
        return is_eos or token_id in request.stop_token_ids
