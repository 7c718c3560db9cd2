"""What paged attention must know of a step: whose tokens these are and where their KV lies.

Owner: the runner that built it. Place: the device. Lifetime: one step (or, inside a CUDA graph,
fixed addresses whose contents live one step). Last writer: the runner's input preparation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionBatch(NamedTuple):
    """One step's tokens, packed request after request, and their KV places.

    Padded rows (CUDA graphs): query length 0, seq_len 0, slot -1. A kernel reads and writes
    nothing for them.
    """

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32: request i owns tokens loc[i]..loc[i+1]-1
    seq_lens: torch.Tensor  # [num_reqs] int32: known tokens up to and with this step's last
    block_tables: torch.Tensor  # [num_reqs, max_blocks] int32; entries past the length are junk
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * 256 + offset, -1 writes nothing
    max_query_len: int  # 1: a pure decode
    max_seq_len: int  # an upper bound; inside a graph the model's limit
    # Places of one request, one token each, attend to KV that others of them bring in this step:
    # it must all be written before any is read.
    places_share_kv: bool = False
    is_even: bool = False  # no request is much longer than the others; only a matter of speed
    num_decodes: int = 0  # so many requests in front have one token; 0 is always right, only slower


def assert_layout(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Assert what an attention kernel takes for granted of memory; q's rows may be strided."""
    assert q[0:1].is_contiguous(), "the heads of a q row must lie side by side"
    assert k_cache.is_contiguous(), "the K cache must be contiguous"
    assert v_cache.is_contiguous(), "the V cache must be contiguous"
