"""Log-probabilities of a few tokens of each row, without a log-softmax of all of them.

    row_statistics   logsumexp of the row; the value and the rank of one given token
    top_keys         the N best tokens, best first, as keys (kernels/token_keys.py)
    logprob          = value - logsumexp

They are those of the logits as the model gave them, before temperature, penalties and filters. The
rank of a token is the number of logits that are at least its own: 1 is the best, ties count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.token_keys import KEEP_ALL, LOWEST_KEY, key_ids, token_key, token_keys
from nanorunner.kernels.top_k_top_p_triton import top_k_top_p_cut_triton
from nanorunner.kernels.triton_support import jit, tl

TILE = 4096  # logits that a program holds at once
CHUNK_BYTES = 64 << 20  # of scratch: logits of a chunk of a prompt, keys while they are sorted
MAX_CHUNK_ROWS = 1024


class Logprobs(NamedTuple):
    """m rows of N + 1 tokens: the given token, then the N best; on the logits' device."""

    token_ids: torch.Tensor  # [m, N + 1] int64
    logprobs: torch.Tensor  # [m, N + 1] float32
    ranks: torch.Tensor  # [m] int32: of the given token


def chunk_rows(num_ids: int, itemsize: int) -> int:
    """Return how many rows of num_ids elements to handle at a time: 64 MiB, at most 1024 rows."""
    return max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // (num_ids * itemsize)))


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of one given token a row and of the row's num_top best.

    logits [m, V] float32, bfloat16 or float16: whole rows. token_ids [m] int64. num_top: 0 to V
    (more is V), one number for all rows. Equal logits: the lower id first.
    """
    num_top = min(num_top, logits.shape[1])
    logsumexp, value, ranks = row_statistics(logits, token_ids)
    ids, values = [token_ids[:, None]], [value[:, None]]
    if num_top > 0:
        top_ids = key_ids(top_keys(logits, num_top))
        ids.append(top_ids)
        values.append(logits.gather(1, top_ids).float())
    return Logprobs(torch.cat(ids, 1), torch.cat(values, 1) - logsumexp[:, None], ranks)


def row_statistics(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logsumexp [m] and the given tokens' values [m], float32, and their ranks [m] int32.

    logits [m, V], token_ids [m] int64. A NaN counts as -inf.
    """
    function = row_statistics_triton if logits.is_cuda else row_statistics_reference
    return function(logits, token_ids)


def row_statistics_reference(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute row_statistics in plain PyTorch, a chunk of rows at a time."""
    logsumexp = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    value, ranks = torch.empty_like(logsumexp), torch.empty_like(logsumexp, dtype=torch.int32)
    num_rows = chunk_rows(logits.shape[1], 4)
    for start in range(0, len(logits), num_rows):
        part = slice(start, start + num_rows)
        rows = logits[part].float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
        logsumexp[part] = rows.logsumexp(dim=-1)
        own = rows.gather(1, token_ids[part, None])
        value[part] = own[:, 0]
        ranks[part] = (rows >= own).sum(dim=-1).int()
    return logsumexp, value, ranks


def row_statistics_triton(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute row_statistics in one launch, a program a row."""
    num_rows, num_ids = logits.shape
    logsumexp = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    value, ranks = torch.empty_like(logsumexp), torch.empty_like(logsumexp, dtype=torch.int32)
    if num_rows > 0:
        assert logits.stride(1) == 1, "the ids of a row lie next to each other"
        _statistics[(num_rows,)](
            logits,
            token_ids,
            logsumexp,
            value,
            ranks,
            logits.stride(0),
            num_ids,
            TILE=TILE,
            num_warps=8,
        )
    return logsumexp, value, ranks


@jit(tables=("token_ids",))
def _statistics(
    logits: tl.tensor,
    token_ids: tl.tensor,
    logsumexp: tl.tensor,
    value: tl.tensor,
    ranks: tl.tensor,
    row_stride: tl.tensor,
    num_ids: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (row): one pass for the maximum and the rank, one for the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
    own = tl.where(own == own, own, float("-inf"))
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    rank = tl.zeros((TILE,), tl.int32)
    for start in range(0, num_ids, TILE):
        inside = start + lane < num_ids
        values = tl.load(logits + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        values = tl.where(values == values, values, float("-inf"))
        best = tl.maximum(best, values)
        rank += (inside & (values >= own)).to(tl.int32)
    maximum = tl.max(best, axis=0)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, num_ids, TILE):
        inside = start + lane < num_ids
        values = tl.load(logits + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.exp(values - maximum)
        total += tl.where(share == share, share, 0.0)
    # an infinite maximum has no finite distance to anything
    is_finite = tl.abs(maximum) < float("inf")
    log_total = tl.where(is_finite, tl.log(tl.sum(total, axis=0)), 0.0)
    tl.store(logsumexp + row, maximum + log_total)
    tl.store(value + row, own)
    tl.store(ranks + row, tl.sum(rank, axis=0))


def top_keys(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [m, count] int64: the keys of the best tokens of logits [m, V], best first.

    count: 1 to V. A chunk of rows is sorted at a time, so that the scratch memory stays small.
    """
    function = top_keys_triton if logits.is_cuda else top_keys_reference
    return function(logits, count)


def top_keys_reference(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Compute top_keys in plain PyTorch, on any device."""
    keys = torch.empty(len(logits), count, dtype=torch.int64, device=logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    num_rows = chunk_rows(logits.shape[1], keys.element_size())
    for start in range(0, len(logits), num_rows):
        part = slice(start, start + num_rows)
        keys[part] = token_keys(logits[part], ids).topk(count, dim=-1).values
    return keys


def top_keys_triton(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Compute top_keys: find the least of a row's keys, collect those that reach it, sort."""
    num_rows, num_ids = logits.shape
    device = logits.device
    keys = torch.full((num_rows, count), LOWEST_KEY, dtype=torch.int64, device=device)
    if num_rows == 0:
        return keys
    cut = torch.full((num_rows,), KEEP_ALL, dtype=torch.int64, device=device)
    if count < num_ids:
        off = torch.ones(num_rows, dtype=torch.float32, device=device)
        top_k = torch.full((num_rows,), count, dtype=torch.int32, device=device)
        cut = top_k_top_p_cut_triton(logits, off, top_k, off)
    counters = torch.zeros(num_rows, dtype=torch.int32, device=device)
    _collect_keys[(num_rows, -(-num_ids // TILE))](
        logits, cut, keys, counters, logits.stride(0), num_ids, count, TILE=TILE, num_warps=8
    )
    chunk = chunk_rows(4 * count, keys.element_size())  # a sort needs copies of what it sorts
    for start in range(0, num_rows, chunk):
        part = keys[start : start + chunk]
        part.copy_(part.sort(dim=-1, descending=True).values)
    return keys


@jit(counts=("count",))
def _collect_keys(
    logits: tl.tensor,
    cut: tl.tensor,
    keys: tl.tensor,
    counters: tl.tensor,
    row_stride: tl.tensor,
    num_ids: tl.tensor,
    count: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile): copy the keys that reach the row's cut, in any order."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < num_ids
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
    found = token_key(values.to(tl.float32), ids.to(tl.int64))
    is_kept = inside & (found >= tl.load(cut + row))
    place = tl.atomic_add(
        counters + row + tl.zeros((TILE,), tl.int32), 1, mask=is_kept, sem="relaxed"
    )
    tl.store(keys + row * count + place, found, mask=is_kept & (place < count))
