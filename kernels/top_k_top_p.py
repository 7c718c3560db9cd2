"""Leave only the likeliest tokens: top-k first, then top-p over what k kept.

Sampler calls this for the rows that ask, before gumbel_argmax. Sort-based, on any device:

    sort descending, lowest id first among equals -> keep the first k
    -> weights exp(x - max) as 40-bit integers -> running sum -> keep until it reaches p of the sum

Integers, because a float sum depends on the order of its terms, and so on how many rows a kernel
was launched over: the kept set of a row must not depend on its neighbours.
"""

from __future__ import annotations

import torch

WEIGHT_BITS = 40  # a vocabulary of 2**22 such weights still sums within int64
CHUNK_ELEMENTS = 1 << 22  # logits sorted at a time: 64 bytes of scratch for each


def uses_top_k_top_p(top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return [n] bool: which rows ask for a filter. k of 0 or -1 is off, and so is p of 1."""
    return (top_k > 0) | (top_p < 1)


def mask_top_k_top_p(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return a copy of logits [n, V] with every token that a row's k or p drops at -inf.

    temperature [n] float32 (0: greedy; the best token always stays), top_k [n] integers (larger
    than V means V), top_p [n] float32. Exactly k tokens stay, the lower ids among equals, and never
    fewer than one.
    """
    masked = torch.empty_like(logits)
    num_rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, len(logits), num_rows):
        part = slice(start, start + num_rows)
        masked[part] = _mask_rows(logits[part], temperature[part], top_k[part], top_p[part])
    return masked


def _mask_rows(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return logits [rows, V] masked, for so few rows that the scratch memory is small."""
    num_ids = logits.shape[1]
    # a NaN would sort as the largest; to gumbel_argmax it is the smallest
    known = torch.where(logits.isnan(), float("-inf"), logits.float())
    ordered, ids = torch.sort(known, dim=-1, descending=True, stable=True)
    rank = torch.arange(num_ids, device=logits.device)
    k = torch.where(top_k > 0, top_k, num_ids).clamp(max=num_ids)[:, None]

    distance = ordered - ordered[:, :1]  # NaN where both are infinite
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    weights = torch.exp(distance / heat).nan_to_num(0.0).double() * float(1 << WEIGHT_BITS)
    weights = torch.where(rank < k, weights.round().to(torch.int64), 0)
    before = weights.cumsum(dim=-1) - weights
    total = weights.sum(dim=-1, keepdim=True)
    p = top_p.double()[:, None]
    in_p = (before < p * total) | (p >= 1)

    keep = (rank == 0) | ((rank < k) & in_p)
    return logits.masked_fill(~torch.empty_like(keep).scatter_(-1, ids, keep), float("-inf"))
