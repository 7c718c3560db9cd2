"""Device tables that the CPU changes a little at a time: staged writes, applied together.

    table.stage(row, start, values)   any number of times, on any table of the writer: host lists
    writer.apply()                    one copy, one launch, in front of the kernels that read

A step changes a few cells of large tables, in rows of different lengths: the block ids of requests
that grew, all columns of a request that came. A copy and a launch per table would take the CPU as
long as the step itself; so one StagedWriter serves all tables of a rank, whatever their types
(kernels/staged_write.py has the packed form).

Two writes to one cell: the later one counts. They are merged before they are sent. In debug mode
they are an error instead, since no caller has a reason to stage a cell twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.staged_write import HEADER_WORDS, staged_write
from nanorunner.workers.pinned_ring import PinnedRing

Int64 = npt.NDArray[np.int64]
Values = bytes | Sequence[int] | Sequence[float] | npt.NDArray[np.generic]


class Format(NamedTuple):
    """How a type is packed."""

    dtype: np.dtype[Any]
    code: str  # of the array module, whose arrays refuse what does not fit
    bytes: int  # an element


FORMATS = {
    torch.int32: Format(np.dtype(np.int32), "i", 4),
    torch.int64: Format(np.dtype(np.int64), "q", 8),
    torch.float32: Format(np.dtype(np.float32), "f", 4),
}
WORD_BYTES = 4


class StagedWriteConflict(RuntimeError):
    """Debug mode: two writes of one apply() meet in a cell; all of its writes were dropped."""


class Writes(NamedTuple):
    """n writes in the order of their staging; starts and lengths in 32-bit words."""

    tables: Int64  # [n] which table of the writer
    rows: Int64  # [n]
    starts: Int64  # [n]
    lengths: Int64  # [n]
    values: npt.NDArray[np.int32]  # [sum of lengths]


class StagedWriteTensor:
    """One table [R, C] or [R]. Made by StagedWriter.table().

    tensor: owned here; on the device, or pinned host memory that kernels reach; as long as this
    object, at one address for good (graphs and the writer's list of places hold it); written last
    by apply()'s kernel or by a kernel of the step, both on the main stream, never by the CPU.
    """

    def __init__(self, writer: StagedWriter, index: int, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.num_rows = tensor.shape[0]
        self.row_capacity = tensor.shape[1] if tensor.dim() == 2 else 1
        self._writer = writer
        self._index = index
        self._format = FORMATS[tensor.dtype]
        self.element_words = self._format.bytes // WORD_BYTES

    def stage(self, row: int, start: int, values: Values) -> None:
        """Stage `values` for the cells [row, start], [row, start + 1], ...; none is nothing.

        The values are copied now. An array must have the table's type and the numbers of a sequence
        must fit it; bytes are packed values of that type, as they come over the wire. Raises
        ValueError, with nothing staged, when they do not fit or when they leave the row.
        """
        data = self._packed(values)
        count = len(data) // self._format.bytes
        if count == 0:
            return
        end = start + count
        if start < 0 or not 0 <= row < self.num_rows:
            raise ValueError(
                f"{self.name}: row {row}, column {start}: the table has rows 0 to"
                f" {self.num_rows - 1} and columns from 0"
            )
        if end > self.row_capacity:
            raise ValueError(
                f"{self.name}: row {row} has room for {self.row_capacity}, but {count} more from"
                f" column {start} exceed it ({end} > {self.row_capacity})"
            )
        self._writer.add(self._index, row, start, data)

    def stage_elem(self, row: int, value: int | float) -> None:
        """Stage one value for the row's first cell; the same errors as stage()."""
        self.stage(row, 0, (value,))

    def _packed(self, values: Values) -> bytes:
        """Return the values' bytes in the table's type; ValueError where that would change them."""
        if isinstance(values, np.ndarray):
            if values.dtype != self._format.dtype or values.ndim != 1:
                raise ValueError(
                    f"{self.name}: an array of {values.dtype} {list(values.shape)}; a flat one of"
                    f" {self._format.dtype} is needed"
                )
            return values.tobytes()
        try:
            return array(self._format.code, values).tobytes()
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{self.name} holds {self._format.dtype}: {error}") from error


class StagedWriter:
    """All staged tables of one rank. depth: steps in flight at most."""

    def __init__(
        self,
        device: torch.device,
        depth: int,
        *,
        debug: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self.num_launches = 0  # since the start
        self._device = device
        self._debug = debug
        self._ring = PinnedRing(device, depth + 2, timeout_s=timeout_s)
        self._tables: list[StagedWriteTensor] = []
        self._flat: list[torch.Tensor] = []  # the tables as int32 words
        # [num_tables, 2] int64: address and words a row; a copy on the device for the kernel, made
        # anew when a table joins, which happens before the first step only
        self._places: Int64 = np.zeros((0, 2), np.int64)
        self._device_places = torch.zeros((0, 2), dtype=torch.int64, device=device)
        self._staged: list[tuple[int, int, int, int]] = []  # table, row, start, length in words
        self._pieces: list[bytes] = []

    def table(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        base: torch.Tensor | None = None,
    ) -> StagedWriteTensor:
        """Return a new table of this writer: [R, C] or [R], int32, int64 or float32.

        It is zero-filled device memory, or `base`: a tensor of that shape and type which kernels
        can reach, such as kernels/uva.py's view of pinned host memory.
        """
        if dtype not in FORMATS or len(shape) not in (1, 2):
            raise ValueError(
                f"{name}: {dtype} {list(shape)}: staged tables are [R] or [R, C] of"
                " int32, int64 or float32"
            )
        if base is None:
            base = torch.zeros(*shape, dtype=dtype, device=self._device)
        if base.shape != tuple(shape) or base.dtype != dtype or not base.is_contiguous():
            raise ValueError(
                f"{name}: the base is {base.dtype} {list(base.shape)}, strides"
                f" {base.stride()}; contiguous {dtype} {list(shape)} is needed"
            )
        table = StagedWriteTensor(self, len(self._tables), name, base)
        self._tables.append(table)
        self._flat.append(base.view(-1).view(torch.int32))
        place = (base.data_ptr(), table.row_capacity * table.element_words)
        self._places = np.vstack((self._places, np.array([place], np.int64)))
        self._device_places = torch.from_numpy(self._places).to(self._device)
        return table

    def add(self, table: int, row: int, start: int, data: bytes) -> None:
        """Stage one write that a table has checked; start in elements."""
        words = self._tables[table].element_words
        self._staged.append((table, row, start * words, len(data) // WORD_BYTES))
        self._pieces.append(data)

    def staged(self) -> Writes:
        """Return what is staged, in the order of staging."""
        columns = np.array(self._staged, np.int64).reshape(-1, 4)
        return _writes(columns, np.frombuffer(b"".join(self._pieces), np.int32))

    def apply(self) -> int:
        """Enqueue everything staged, one copy and one launch; return 1, or 0 when there is nothing.

        Afterwards nothing is staged, also after StagedWriteConflict (debug mode) and after
        TimeoutError (no staging buffer came free); in both cases nothing was written.
        """
        if not self._staged:
            return 0
        writes = self.staged()
        self._staged, self._pieces = [], []
        order, groups = self._overlaps(writes)
        if groups is not None:
            if self._debug:
                raise StagedWriteConflict(self._conflict_text(writes, order, groups))
            writes = _merge(writes, order, groups)

        num_writes, num_values = len(writes.rows), len(writes.values)
        num_words = HEADER_WORDS * num_writes + num_values
        slot = self._ring.take(num_words)
        header = slot.words[: HEADER_WORDS * num_writes].reshape(HEADER_WORDS, num_writes)
        header[0], header[1], header[2] = writes.tables, writes.rows, writes.starts
        np.cumsum(writes.lengths, out=header[3])
        slot.words[HEADER_WORDS * num_writes : num_words] = writes.values
        packed = self._ring.send(slot, num_words)
        staged_write(self._flat, self._device_places, packed, num_writes)
        self.num_launches += 1
        return 1

    def _overlaps(self, writes: Writes) -> tuple[Int64, Int64 | None]:
        """Return the writes by address, and for each the number of its group of meeting writes.

        None for the groups when no two writes share a cell.
        """
        place = self._places[writes.tables]
        begin = place[:, 0] + WORD_BYTES * (writes.rows * place[:, 1] + writes.starts)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], (begin + WORD_BYTES * writes.lengths)[order]
        is_first = begin[1:] >= np.maximum.accumulate(end)[:-1]
        if is_first.all():
            return order, None
        return order, np.concatenate(([0], np.cumsum(is_first)))

    def _conflict_text(self, writes: Writes, order: Int64, groups: Int64) -> str:
        second = int(np.flatnonzero(groups[1:] == groups[:-1])[0]) + 1
        group = np.sort(order[groups == groups[second]])
        table = self._tables[int(writes.tables[group[0]])]
        words = table.element_words
        ranges = ", ".join(
            f"columns {writes.starts[w] // words} to"
            f" {(writes.starts[w] + writes.lengths[w]) // words - 1}"
            for w in group
        )
        return f"{table.name}: row {writes.rows[group[0]]} is written twice in one step: {ranges}"


def _merge(writes: Writes, order: Int64, groups: Int64) -> Writes:
    """Return writes that do not overlap and leave the same cells as these done in their order.

    order, groups: from StagedWriter._overlaps. A group's writes overlap, so together they cover one
    range without gaps: each group becomes one write.
    """
    ends = np.cumsum(writes.lengths)
    merged, pieces = [], []
    for number in range(int(groups[-1]) + 1):
        members = order[groups == number]
        leader = members[0]  # the lowest address
        low = writes.starts[leader]
        high = (writes.starts[members] + writes.lengths[members]).max()
        values = np.zeros(high - low, np.int32)
        for write in np.sort(members):  # in the order of staging: the last one stays
            at = writes.starts[write] - low
            length = writes.lengths[write]
            values[at : at + length] = writes.values[ends[write] - length : ends[write]]
        merged.append((writes.tables[leader], writes.rows[leader], low, high - low))
        pieces.append(values)
    return _writes(np.array(merged, np.int64), np.concatenate(pieces))


def _writes(columns: Int64, values: npt.NDArray[np.int32]) -> Writes:
    """Return Writes from one line [table, row, start, length] a write."""
    return Writes(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3], values)
