"""Which row of the state table belongs to which request: rows that stay put while a request runs.

    request id -> row    one row from add() to remove(); resuming after a preemption is a new add()
    free rows            a stack: the first request gets the last row, a freed row is the next to go

Reusing the last freed row at once brings a mistake in row lifetimes out early. What a step computed
may come back when its rows belong to others already, so each row counts its owners: whoever builds
a batch keeps the rows' generations and has them checked when the batch's output is consumed.

The runner of every rank keeps one, and all ranks add and remove in the same order, so all agree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class NoFreeRow(RuntimeError):
    """More requests are active than the state table has rows."""


class StaleRow(RuntimeError):
    """An output names a row that has since been given to another request."""


class RequestRows:
    """The rows of a table with num_rows rows; nothing here touches the table itself."""

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"{num_rows} rows: a state table needs at least 1")
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._row_of: dict[int, int] = {}
        self._generations: Int64 = np.zeros(num_rows, np.int64)  # how many owners a row has had

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._row_of

    def add(self, request_id: int) -> int:
        """Return the row that is the request's own until remove().

        Raises NoFreeRow when all rows are taken and ValueError when the request has a row; both
        leave everything as it was.
        """
        if request_id in self._row_of:
            raise ValueError(f"request {request_id} already has row {self._row_of[request_id]}")
        if not self._free:
            raise NoFreeRow(f"request {request_id}: all {self.num_rows} rows are taken")
        row = self._free.pop()
        self._generations[row] += 1
        self._row_of[request_id] = row
        return row

    def remove(self, request_id: int) -> int | None:
        """Free the request's row and return it; None, and nothing done, when it has none."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def row_of(self, request_id: int) -> int:
        """Return the request's row; KeyError when it has none."""
        return self._row_of[request_id]

    def generation(self, row: int) -> int:
        """Return how many requests have had this row, the one that has it now included."""
        return int(self._generations[row])

    def generations(self, rows: Int64) -> Int64:
        """Return a copy of the generations of `rows` [n], to be kept with a batch."""
        return self._generations[rows]

    def check(self, row: int, generation: int) -> None:
        """Raise StaleRow unless the row still has the owner that it had at that generation."""
        now = self.generation(row)
        if now != generation:
            raise StaleRow(
                f"row {row}: an output of its owner {generation} came after owner {now} took it"
            )

    def check_all(self, rows: Int64, generations: Int64) -> None:
        """check() for a whole batch at once: rows [n] and what generations(rows) said then [n]."""
        for place in np.flatnonzero(self._generations[rows] != generations):
            self.check(int(rows[place]), int(generations[place]))
