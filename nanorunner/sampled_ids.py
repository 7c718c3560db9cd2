"""What a step sampled, looked at before it is stored: is it ours, and where does a request stop?

A verify step samples q ids a decode. Those that came true stand first in its group; what stands
behind them is REJECTED or NOT_MEANT, both negative, and is no id:

    flat        7 3 9 -1 -1 | 4 -2 -2 -2 -2 | 8      two decodes, q = 5, and a prompt that ended
    [n, q]      7 3 9 -1 -1
                4 -2 -2 -2 -2
                8 -2 -2 -2 -2
"""

from __future__ import annotations

import numpy as np

from nanorunner.request import Request
from nanorunner.running_table import Rows, RunningTable
from nanorunner.step_plan import ScheduledStep
from nanorunner.workers.messages import Int32, StepOutput

REJECTED = -1  # a draft was proposed here and did not come true
NOT_MEANT = -2  # nor was one proposed


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

    def check(self, step: ScheduledStep, output: StepOutput, table: RunningTable) -> Int32:
        """Return the output's ids, [n, q] of a verify step; RuntimeError if they are not this's.

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
        if step.query_len > 1:
            ids = _in_groups(step, ids)
        # As unsigned numbers, so that one comparison finds negative ids as well.
        if ids.size and np.maximum.reduce(ids.view(np.uint32), axis=None) >= self._may_stop.size:
            self._check_negative(step, ids, table)
        return ids

    def _check_negative(self, step: ScheduledStep, ids: Int32, table: RunningTable) -> None:
        """Raise RuntimeError unless all ids that are none are in the place of drafts.

        A request that goes on has one id at least. One that reached its limit in a step not read
        when this one left gets none, even if this one is a plain step.
        """
        due = step.step_input.step_id
        if table.stride == 1 or ids.min() < NOT_MEANT or ids.max() >= self._may_stop.size:
            raise RuntimeError(f"step {due}: a sampled id is not in the vocabulary")
        is_id = (ids >= 0).reshape(len(step.sample_rows), step.query_len)
        if np.count_nonzero(table.alive[step.sample_rows] > is_id[:, 0]):
            raise RuntimeError(f"step {due}: a request that goes on got no id")
        if np.count_nonzero(is_id[:, 1:] > is_id[:, :-1]):
            raise RuntimeError(f"step {due}: a draft was accepted behind one that was not")

    def stopped(self, table: RunningTable, rows: Rows, ids: Int32) -> list[int]:
        """Return those of the rows whose request ends with the id that it is about to get."""
        may_stop = self._may_stop[ids]
        if not np.count_nonzero(may_stop):
            return []
        found = zip(rows[may_stop].tolist(), ids[may_stop].tolist(), strict=True)
        return [row for row, token_id in found if self._is_stop(table, row, 1, token_id)]

    def cut(self, table: RunningTable, rows: Rows, ids: Int32, counts: Rows) -> list[int]:
        """Lower counts[i], in place, to end at the id among ids[i] that stops row i.

        Return the rows that stop. ids is [n, q]; counts: how many of each row's are ids.
        """
        may_stop = self._may_stop[ids] & (ids >= 0)
        if not np.count_nonzero(may_stop):
            return []
        rows_that_stop = []
        for index in np.flatnonzero(may_stop.any(axis=1)).tolist():
            row = int(rows[index])
            for place in np.flatnonzero(may_stop[index]).tolist():
                if self._is_stop(table, row, place + 1, int(ids[index, place])):
                    counts[index] = place + 1
                    rows_that_stop.append(row)
                    break
        return rows_that_stop

    def _is_stop(self, table: RunningTable, row: int, nth: int, token_id: int) -> bool:
        """Whether token_id, the nth id behind those that the row has, ends its request."""
        request = table.request(row)
        if table.known[row] + nth < request.min_len:
            return False
        is_eos = token_id in self._eos_token_ids and not request.ignore_eos
        return is_eos or token_id in request.stop_token_ids


def place_ids(request_ids: Int32, num_decodes: int, query_len: int) -> Int32:
    """Return whose the places of a step are that sample: each decode has query_len, a prompt 1."""
    decodes = np.repeat(request_ids[:num_decodes], query_len)
    return np.concatenate((decodes, request_ids[num_decodes:]))


def _in_groups(step: ScheduledStep, ids: Int32) -> Int32:
    """Return [n, q]: the decodes' groups, and each prompt's id with NOT_MEANT behind it."""
    num_rows, num_decodes = len(step.sample_rows), step.num_decodes
    if num_rows == num_decodes:
        return ids.reshape(num_rows, step.query_len)
    groups = np.full((num_rows, step.query_len), NOT_MEANT, dtype=np.int32)
    num_places = num_decodes * step.query_len
    groups[:num_decodes] = ids[:num_places].reshape(num_decodes, step.query_len)
    groups[num_decodes:, 0] = ids[num_places:]
    return groups
