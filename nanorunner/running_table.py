"""The requests that hold KV blocks, one row each, as numpy columns.

A steady decode step of 256 requests must cost microseconds on rank 0, so what every step reads of
every request is a column, and a step is a few vector operations over the rows in its batch.

    row   request_id  known  computed  limit  block_end  publish_end  due_at  last_step  alive ...
     0            17    300       299    812        512          512     511       1041   True
     1            -1      (free)

known     ids the host has; the row's ids are token_ids[row, :known]
computed  positions whose KV is written by a step that has been enqueued
          decoding: computed == known + samples in flight - 1; prefilling: computed < known
due_at    a decoding row with fewer computed positions than this needs no look: no new block, no
          end by length, no block to publish; so one comparison passes over nearly all rows
A row is reused only when the last step that contains it has been read.

With speculation nobody knows, before a step is read, how many of its drafts the device accepted:

computed  of a decoding row is the most that it can be: each step in flight counts with all its
          positions, and what was not accepted is taken off again when the step is read
sure      the least that `known` will be when all steps in flight are read: one id from each; at
          the limit, or beyond, the row takes no further step

Both are exact when no step is in flight. Without speculation `sure` would be computed + 1, and
nobody keeps it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanorunner.request import NO_ROW, Request
from nanorunner.workers.messages import Int32

Rows = npt.NDArray[np.int64]
NO_IDS: Int32 = np.empty(0, dtype=np.int32)
NEVER = 1 << 62  # beyond every position


class RunningTable:
    """Columns of the running requests. Owner and only writer: the scheduler, on rank 0's host."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, stride: int = 1) -> None:
        """Make an empty table; stride: most positions that a step computes of a decoding row."""
        self.num_rows = num_rows
        self.block_size = block_size
        self.stride = stride
        self.requests: list[Request | None] = [None] * num_rows
        self.request_id: Int32 = np.full(num_rows, -1, dtype=np.int32)
        self.known = np.zeros(num_rows, dtype=np.int64)
        self.computed = np.zeros(num_rows, dtype=np.int64)
        self.sure = np.zeros(num_rows, dtype=np.int64)  # kept only where stride > 1
        self.limit = np.zeros(num_rows, dtype=np.int64)  # ids at which it ends by length
        self.block_end = np.zeros(num_rows, dtype=np.int64)  # positions its blocks have room for
        self.publish_end = np.zeros(num_rows, dtype=np.int64)  # end of its next block to publish
        self.due_at = np.zeros(num_rows, dtype=np.int64)
        self.last_step = np.full(num_rows, -1, dtype=np.int64)  # id of the last that contains it
        self.alive = np.zeros(num_rows, dtype=np.bool_)  # False: ended, or free
        self.is_quiet = np.zeros(num_rows, dtype=np.bool_)  # tells nothing before its end
        # [num_rows, max_model_len]; memory is committed only where ids are written.
        self.token_ids: Int32 = np.empty((num_rows, max_model_len), dtype=np.int32)
        self._places = np.arange(stride)  # of a step's ids
        self.last_read = -1  # id of the last step whose output is here
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that occupy() can hand out."""
        return len(self._free)

    def occupy(self, request: Request, num_cached: int, publishes: bool) -> int:
        """Move a waiting request, its blocks already set, into a free row and return the row.

        publishes: whether its full blocks go to the prefix cache.
        """
        row = self._free.pop()
        ids = request.token_ids
        self.requests[row] = request
        self.request_id[row] = request.request_id
        self.known[row] = self.sure[row] = len(ids)
        self.computed[row] = num_cached
        self.limit[row] = request.limit
        self.block_end[row] = len(request.blocks) * self.block_size
        self.publish_end[row] = num_cached + self.block_size if publishes else NEVER
        self.set_due(row)
        self.last_step[row] = -1
        self.alive[row] = True
        self.is_quiet[row] = request.is_quiet
        self.token_ids[row, : len(ids)] = ids
        request.token_ids = NO_IDS
        request.row = row
        return row

    def request(self, row: int) -> Request:
        """The request in an occupied row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def ids(self, row: int) -> Int32:
        """The row's known ids, a view."""
        return self.token_ids[row, : self.known[row]]

    def output_ids(self, row: int) -> list[int]:
        """The row's generated ids, a copy."""
        output: list[int] = self.ids(row)[self.request(row).prompt_len :].tolist()
        return output

    def is_unread(self, row: int) -> bool:
        """Whether a step in flight contains the row."""
        return bool(self.last_step[row] > self.last_read)

    def set_due(self, row: int) -> None:
        """Note when the row needs a look; to be called after each change of what that depends on.

        Seen from before the step that makes `computed` up to `stride` more: from block_end -
        stride + 1 on its last block may not hold them, it samples its last id at limit - 2 or
        later, and it may publish from publish_end - 1 on.
        """
        self.due_at[row] = self.when_due(row)

    def when_due(self, row: int) -> int:
        """How many computed positions make a decoding row due."""
        # item(): arithmetic with numpy's own numbers takes twice as long
        needs_block_at = self.block_end.item(row) - self.stride + 1
        return min(needs_block_at, self.limit.item(row) - 2, self.publish_end.item(row) - 1)

    def sure_ids(self, rows: Rows) -> Rows:
        """How many ids these decoding rows have at least once all steps in flight are read."""
        return self.sure[rows] if self.stride > 1 else self.computed[rows] + 1

    def vacate(self, row: int) -> Request:
        """Free the row and return its request, which has no row and no ids any more."""
        request = self.request(row)
        assert not self.is_unread(row), f"row {row} is freed while a step in flight reads it"
        self.requests[row] = None
        self.request_id[row] = -1
        self.alive[row] = False
        self._free.append(row)
        request.row = NO_ROW
        return request

    def append(self, rows: Rows, new_ids: Int32) -> Rows:
        """Append one id to each row; a row grows here or in extend(). Returns the new lengths."""
        known = self.known[rows]
        self.token_ids[rows, known] = new_ids
        known += 1
        self.known[rows] = known
        return known

    def extend(self, rows: Rows, ids: Int32, counts: Rows) -> Rows:
        """Append the first counts[i] of ids[i] to each row; ids is [n, q]. Returns the lengths."""
        known = self.known[rows]
        is_new = self._places < counts[:, np.newaxis]
        columns = known[:, np.newaxis] + self._places
        self.token_ids[rows.repeat(counts), columns[is_new]] = ids[is_new]
        known += counts
        self.known[rows] = known
        return known

    def check_bounds(self, rows: Rows, is_exact: bool) -> None:
        """Raise AssertionError unless known <= sure <= computed + 1; is_exact: unless all agree."""
        known, sure, most = self.known[rows], self.sure_ids(rows), self.computed[rows] + 1
        assert (known <= sure).all(), "a row has more ids than was sure"
        assert (sure <= most).all(), "more ids are sure than positions can be computed"
        assert not is_exact or (known == most).all(), "nothing is in flight, but a bound is loose"
