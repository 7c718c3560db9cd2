"""Exercise staged-write: apply many small ragged writes that came up in one packed copy.

    word 0        n         2n         3n            4n
         | table | row     | start    | end         | values ................. |

    nanorunner check staged-write my_staged_write.py

Write p puts values[end[p - 1] : end[p]] (end[-1] = 0) into its table's row, from word `start` on.
A step changes a few cells of large tables; this is how they reach the device in one copy and one
launch (workers/staged_tensor.py packs, kernels/staged_write.py does what you write here).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def staged_write(
    tables: Sequence[torch.Tensor],
    table_places: torch.Tensor,
    packed: torch.Tensor,
    num_writes: int,
) -> None:
    """Do the num_writes writes of `packed` (see above).

    tables: each flat, in 32-bit words, row behind row. table_places [num_tables, 2]: in column 1
    how many words a row of each table has (column 0 is an address, which only a kernel needs).
    """
    raise NotImplementedError("staged_write: which words are write p's, and where do they go?")
