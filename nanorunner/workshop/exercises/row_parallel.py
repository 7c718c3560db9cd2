"""Exercise row-parallel: split an MLP and an embedding over the ranks.

    rank r   gate_up  rows of its columns     x -> its part of the hidden units
             down     its columns             its units -> a partial sum of the whole output

    nanorunner check row-parallel my_row_parallel.py

`self` is one rank's Decoder (workers/models/decoder.py): self.linear(x, weight, bias) multiplies,
self.tp is the number of ranks, self.vocab the span of ids whose rows self.embed holds,
self.group.all_reduce(x) sums x over the ranks. A bias is None where this rank must not add it.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.silu_mul import silu_mul
from nanorunner.workers.models.decoder import Decoder, Layer
from nanorunner.workers.shards import EvenShard


def even_shard(size: int, tp: int, rank: int) -> EvenShard:
    """Return rank's share of `size` indices, cut into tp pieces of ceil(size / tp).

    EvenShard(local_size, Span(start, stop)): local_size is the same on every rank, so that one
    program serves all; the span is what this rank really holds, less on the last ones.
    """
    raise NotImplementedError("even_shard: which indices are this rank's?")


def mlp(self: Decoder, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the MLP's output [num_tokens, hidden]: a partial sum.

    layer.gate_up [2 * local_intermediate, hidden] and layer.down [hidden, local_intermediate] are
    this rank's parts; silu_mul() halves the width. Whoever calls this sums over the ranks.
    """
    hidden_units = silu_mul(self.linear(x, layer.gate_up, layer.gate_up_bias))
    raise NotImplementedError(f"mlp: what becomes of {list(hidden_units.shape)} hidden units?")


def embed_tokens(self: Decoder, input_ids: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, hidden]: each rank looks up its own ids, the sum has them all."""
    raise NotImplementedError("embed_tokens: an id of another rank must count as zero here")
