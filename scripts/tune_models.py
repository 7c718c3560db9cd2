"""The decoders that scripts/tune.py measures, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nanorunner.kernels.attention_batch import AttentionBatch

EPS = 1e-6
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}  # of every tensor
BLOCK_TOKENS = 256  # of a block of the KV cache

Shape = tuple[str, int, int]  # op, out, in


class Model(NamedTuple):
    """The sizes of a decoder that decide its projections' shapes."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int


MODELS = {
    "0.6b": Model(1024, 16, 8, 128, 3072),
    "1.7b": Model(2048, 16, 8, 128, 6144),
    "8b": Model(4096, 32, 8, 128, 12288),
}


def layer_shapes(model: Model, tp: int) -> list[tuple[int, int]]:
    """Return (out, in) of qkv, o, gate_up and down on one rank; heads and columns divide by tp."""
    q_size = model.num_heads * model.head_dim // tp
    kv_size = model.num_kv_heads * model.head_dim // tp
    return [
        (q_size + 2 * kv_size, model.hidden),
        (model.hidden, q_size),
        (2 * model.intermediate // tp, model.hidden),
        (model.hidden, model.intermediate // tp),
    ]


def decode_batch(block_tables: torch.Tensor, length: int) -> AttentionBatch:
    """Return a decode of requests of one length, this step's token included.

    block_tables [requests, blocks] int32, as many blocks as the length needs.
    """
    num_reqs, device = len(block_tables), block_tables.device
    return AttentionBatch(
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((num_reqs,), length, dtype=torch.int32, device=device),
        block_tables=block_tables,
        slot_mapping=block_tables[:, -1].long() * BLOCK_TOKENS + (length - 1) % BLOCK_TOKENS,
        max_query_len=1,
        max_seq_len=length,
    )


def all_shapes(
    models: Iterable[str],
    tps: Iterable[int],
    rows_to_try: Iterable[int],
    ops_of: Callable[[int, int], Iterable[str]],
) -> Iterator[tuple[Shape, int]]:
    """Yield ((op, out, in), rows), each once, the most wanted first.

    ops_of(tp, rows): the ops of qkv, o, gate_up and down on one of so many ranks.
    """
    seen = set()
    for rows in rows_to_try:
        for tp in tps:
            for name in models:
                shapes = zip(ops_of(tp, rows), layer_shapes(MODELS[name], tp), strict=True)
                for op, (num_out, num_in) in shapes:
                    shape = (op, num_out, num_in)
                    if (shape, rows) not in seen:
                        seen.add((shape, rows))
                        yield shape, rows
