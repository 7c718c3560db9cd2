"""The request state table of runner v2: one stable row a request, on the device, and its mirror.

    StepInput -> add, append_blocks, remove   cells are staged
              -> apply()                      one copy, one kernel: the tables are up to date
    advance_state (a kernel of the step)      moves the rows of the batch on, on the device

The device is the truth for num_computed, total_len and last_sampled. The CPU keeps a lower bound of
the first two (without speculation they are equal) so that it can say who samples without asking the
device. A preemption is a removal; whoever comes back is a new request with a new row.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.state_tables import StateTables
from nanorunner.kernels.uva import uva_problem, uva_zeros
from nanorunner.workers.messages import BLOCK_SIZE, NewRequest
from nanorunner.workers.request_rows import RequestRows
from nanorunner.workers.staged_tensor import StagedWriter

Int64 = npt.NDArray[np.int64]

logger = logging.getLogger("nanorunner")


class RequestStates:
    """All rows of one rank.

    tables: Owner: this object. Place: the device (token_ids perhaps in pinned host memory).
    Lifetime: the engine's; a row is valid from add() to remove(). Last writer: the staged-write
    kernel, then advance_state, both on the main stream.
    computed, total, prefill_len [R]: the CPU's mirror, written by the CPU alone. A step that
    verifies drafts counts as one token there, which it brings at least.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        writer: StagedWriter,
        device: torch.device,
        *,
        speculates: bool = False,
    ) -> None:
        """speculates: kernels look for drafts in the token table, and no row passes its limit."""
        self.rows = RequestRows(num_rows)
        self._writer = writer
        max_blocks = -(-max_model_len // BLOCK_SIZE)
        tokens_shape = (num_rows, max_model_len)
        base = None if speculates else _token_table(tokens_shape, device)
        self._token_ids = writer.table("token_ids", tokens_shape, torch.int32, base)
        names = ["num_computed", "total_len", "prefill_len", "prompt_len"]
        names += ["token_limit", "room"] if speculates else []
        columns = {name: writer.table(name, (num_rows,), torch.int32) for name in names}
        self._columns = columns
        self._block_tables = writer.table("block_tables", (num_rows, max_blocks), torch.int32)
        self.prompt_len = columns["prompt_len"].tensor
        self.tables = StateTables(
            token_ids=self._token_ids.tensor,
            num_computed=columns["num_computed"].tensor,
            total_len=columns["total_len"].tensor,
            prefill_len=columns["prefill_len"].tensor,
            last_sampled=torch.zeros(num_rows, dtype=torch.int64, device=device),
            block_tables=self._block_tables.tensor,
        )
        # [R] int32: positions that its blocks have room for, at most its token limit
        self.room = columns["room"].tensor if speculates else None
        if speculates:
            self.tables = self.tables._replace(
                num_drafts=torch.zeros(num_rows, dtype=torch.int32, device=device),
                token_limit=columns["token_limit"].tensor,
            )
        self.computed: Int64 = np.zeros(num_rows, np.int64)
        self.total: Int64 = np.zeros(num_rows, np.int64)
        self.prefill_len: Int64 = np.zeros(num_rows, np.int64)
        self._num_blocks: Int64 = np.zeros(num_rows, np.int64)
        self._token_limit: Int64 = np.zeros(num_rows, np.int64)

    def add(self, new: NewRequest) -> int:
        """Give a request a row and stage all that the device must know of it; return the row."""
        row = self.rows.add(new.request_id)
        prefill_len = len(new.token_ids) // 4
        self._token_ids.stage(row, 0, new.token_ids)
        self._columns["num_computed"].stage_elem(row, new.num_computed)
        self._columns["total_len"].stage_elem(row, prefill_len)
        self._columns["prefill_len"].stage_elem(row, prefill_len)
        self._columns["prompt_len"].stage_elem(row, new.prompt_len)
        if "token_limit" in self._columns:
            self._columns["token_limit"].stage_elem(row, new.token_limit)
        self.computed[row] = new.num_computed
        self.total[row] = self.prefill_len[row] = prefill_len
        self._num_blocks[row], self._token_limit[row] = 0, new.token_limit
        self.append_blocks(new.request_id, new.block_ids)
        return row

    def touch(self) -> None:
        """Stage a zero for a row that nobody has, so that warm-up compiles the staged write."""
        assert len(self.rows) == 0, "only before the first request"
        self._columns["num_computed"].stage_elem(0, 0)

    def append_blocks(self, request_id: int, block_ids: bytes) -> None:
        """Stage more KV blocks (int32) behind those that the request has."""
        row = self.rows.row_of(request_id)
        start = int(self._num_blocks[row])
        self._block_tables.stage(row, start, block_ids)
        self._num_blocks[row] = start + len(block_ids) // 4
        if "room" in self._columns:
            room = int(self._num_blocks[row]) * BLOCK_SIZE
            self._columns["room"].stage_elem(row, min(room, int(self._token_limit[row])))

    def remove(self, request_id: int) -> int | None:
        """Free the request's row and return it; a second call returns None.

        Nothing is cleared on the device: every reader is bounded by lengths that a new owner's
        staged writes set before its first step.
        """
        return self.rows.remove(request_id)

    def samples(self, rows: Int64, counts: Int64) -> npt.NDArray[np.bool_]:
        """Return which of rows [n], with counts [n] tokens this step, reach their last token."""
        is_last: npt.NDArray[np.bool_] = self.computed[rows] + counts == self.total[rows]
        return is_last

    def advance(self, rows: Int64, counts: Int64, samples: npt.NDArray[np.bool_]) -> None:
        """Move the mirror on by one step, as advance_state moves the device."""
        self.computed[rows] += counts
        self.total[rows] += samples


def _token_table(shape: tuple[int, int], device: torch.device) -> torch.Tensor | None:
    """Return pinned host memory that kernels address, or None for a table in device memory.

    Prompts are read once, in the step that computes them; so they need no room on the GPU.
    """
    if device.type != "cuda":
        return None
    problem = uva_problem(device)
    megabytes = shape[0] * shape[1] * 4 / 1e6
    if problem:
        logger.warning("token table: %.0f MB of GPU memory, because %s", megabytes, problem)
        return None
    logger.info("token table: %.0f MB of pinned host memory, read by kernels (UVA)", megabytes)
    return uva_zeros(shape, torch.int32, device)
