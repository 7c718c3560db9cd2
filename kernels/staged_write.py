"""Many small ragged writes into many tables, as one launch.

A packed buffer of int32 words brings n writes up in one copy:

    word 0        n         2n         3n            4n
         | table | row     | start    | end         | values ................. |

Write p puts values[end[p - 1] : end[p]] (end[-1] = 0) into its table's row, from word `start` on.
Everything is counted in 32-bit words, so that tables of int32, float32 and int64 (two words an
element) share one buffer and one launch.

    table_places [num_tables, 2] int64: where each table begins (an address), words in its row

workers/staged_tensor.py packs, and checks that writes stay inside their rows and do not overlap:
programs run in any order, so the kernel could not say which of two values stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanorunner.kernels.triton_support import jit, tl

HEADER_WORDS = 4  # a write, before its values
TILE = 1024  # words a program moves at a time


def staged_write(
    tables: Sequence[torch.Tensor],
    table_places: torch.Tensor,
    packed: torch.Tensor,
    num_writes: int,
) -> None:
    """Do the num_writes writes of `packed` (see above); no launch when there are none.

    tables: the tables as flat int32 views; table_places says on the device where they are. Places
    are computed in 64 bits: a row of a million words passes 2**31 at row 2148.
    """
    function = staged_write_triton if packed.is_cuda else staged_write_reference
    function(tables, table_places, packed, num_writes)


def staged_write_reference(
    tables: Sequence[torch.Tensor],
    table_places: torch.Tensor,
    packed: torch.Tensor,
    num_writes: int,
) -> None:
    """staged_write by plain indexing; table_places is read for its row lengths only."""
    header = packed[: HEADER_WORDS * num_writes].view(HEADER_WORDS, num_writes)
    values = packed[HEADER_WORDS * num_writes :]
    row_words = table_places[:, 1].tolist()
    begin = 0
    for table, row, start, end in header.T.tolist():
        place = row * row_words[table] + start
        tables[table][place : place + end - begin] = values[begin:end]
        begin = end


def staged_write_triton(
    tables: Sequence[torch.Tensor],
    table_places: torch.Tensor,
    packed: torch.Tensor,
    num_writes: int,
) -> None:
    """staged_write as one launch, a program a write; `tables` is not read, only kept alive."""
    if num_writes > 0:
        _staged_write_kernel[(num_writes,)](table_places, packed, TILE=TILE)


@jit()
def _staged_write_kernel(table_places: tl.tensor, packed: tl.tensor, TILE: tl.constexpr) -> None:
    """Program p does write p."""
    write = tl.program_id(0)
    num_writes = tl.num_programs(0)
    table = tl.load(packed + write)
    row = tl.load(packed + num_writes + write).to(tl.int64)
    start = tl.load(packed + 2 * num_writes + write)
    begin = tl.load(packed + 3 * num_writes + write - 1, mask=write > 0, other=0)
    end = tl.load(packed + 3 * num_writes + write)
    row_words = tl.load(table_places + 2 * table + 1)
    base = tl.load(table_places + 2 * table).to(tl.pointer_type(tl.int32))
    target = base + row * row_words + start
    values = packed + 4 * num_writes + begin
    for first in range(0, end - begin, TILE):
        word = first + tl.arange(0, TILE)
        inside = word < end - begin
        tl.store(target + word, tl.load(values + word, mask=inside), mask=inside)
