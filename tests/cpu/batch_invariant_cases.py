"""What the batch-invariance tests of both machines share: any part of a batch as its own batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_cases import BLOCK_TOKENS, AttentionCase

from nanorunner.kernels.attention_batch import AttentionBatch


def attend(function: Callable[..., torch.Tensor], case: AttentionCase) -> torch.Tensor:
    """Return the attention of a case."""
    return function(case.q, case.k_cache, case.v_cache, case.batch, case.scale)


def part(case: AttentionCase, i: int, first: int, last: int, seq_len: int) -> AttentionCase:
    """Return tokens first to last - 1 of request i, whose last sees seq_len tokens, alone."""
    start = int(case.batch.query_start_loc[i])
    num_blocks = -(-seq_len // BLOCK_TOKENS)
    batch = AttentionBatch(
        torch.tensor([0, last - first], dtype=torch.int32, device=case.q.device),
        torch.tensor([seq_len], dtype=torch.int32, device=case.q.device),
        case.batch.block_tables[i : i + 1, :num_blocks].contiguous(),
        case.batch.slot_mapping[: last - first],
        last - first,
        seq_len,
    )
    return case._replace(q=case.q[start + first : start + last], batch=batch)
