"""Decode attention (one query token a request) over the paged cache, split over the KV length.

A decode is a read of the KV cache, so every byte is read once: a program takes one request, one KV
head and one share ("split") of the length, and its whole group of query heads at once, as the rows
of a small matrix product. Few requests need many splits to fill the device; their partial results
meet in a second kernel.

    program (request, kv head, split)   tokens [split * share, (split + 1) * share)
        -> out [requests, num_heads, D]                                       one split
        -> partial [requests, num_heads, splits, D], log_sum [.., splits]     more: combine

The number of splits is fixed on the host from the batch size, so a captured graph stays valid; each
share follows from the length, which only the device knows. Splits left without tokens end at once.
A large batch fills the device with one program a request, but then the longest request is still
read when all others have ended; there a split has a least share, so that long requests alone are
cut, and a request of one share writes its result itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, num_processors, tl

LOG2_E = 1.4426950408889634


class DecodePlan(NamedTuple):
    """How one decode launch is cut up; it depends on shapes alone, never on lengths."""

    num_splits: int
    tile_tokens: int  # KV tokens a loop turn; divides the block, so a tile lies in one block
    num_warps: int
    num_stages: int
    min_share: int = 0  # tokens that a split has at least, where the request has that many


# (splits, least share) of a batch that fills the device with one split a request, and of one that
# nearly does. Above their product the shares grow again.
FULL, NEARLY_FULL = (4, 1024), (8, 512)
MAX_SEQ_LENS = (0, NEARLY_FULL[1] + 1, FULL[1] + 1)  # the lengths at which plans change


def plan_decode(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    item_bytes: int,
    processors: int,
    max_seq_len: int = 0,
) -> DecodePlan:
    """Return the plan for a batch; the figures were measured on an H200 (132 processors).

    max_seq_len: no request will be longer; 0: unknown, and long requests are not cut to balance.
    """
    programs = num_reqs * num_kv_heads
    # About 4 programs a processor keep the memory busy; more splits only add to the combine.
    wanted = max(4 * processors // programs, 1)
    num_splits = min(1 << (wanted.bit_length() - 1), 64 if programs <= 2 else 32)
    group, load = num_heads // num_kv_heads, programs / processors
    splits, min_share = FULL if load >= 3 else NEARLY_FULL
    if load >= 1 and max_seq_len > min_share:
        return _plan_tile(splits, group, head_dim, item_bytes, 0)._replace(min_share=min_share)
    return _plan_tile(num_splits, group, head_dim, item_bytes, load)


def _plan_tile(
    num_splits: int, group: int, head_dim: int, item_bytes: int, load: float
) -> DecodePlan:
    """Return the plan of so many splits; load: whole requests' programs a processor, 0 for cut."""
    rows, columns = tile_shape(group, head_dim)
    if item_bytes == 4:
        # Full float32 products run without tensor cores: small tiles, or registers spill.
        return DecodePlan(num_splits, 16, 4, 2)
    if rows > 16 or columns > 128:
        return DecodePlan(num_splits, 32, 4, 2)
    if load >= 8:
        return DecodePlan(num_splits, 32, 1, 2)
    if load * num_splits >= 3:
        return DecodePlan(num_splits, 64, 2, 2)
    return DecodePlan(num_splits, 64, 4, 3)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Return the attention output [requests, num_heads, head_dim]; see kernels/attention.py.

    Row i of q belongs to request i. A request of length 0 (padding) gets zeros. `plan` replaces
    plan_decode's choice, for measurements.
    """
    num_reqs, num_heads, head_dim = q.shape
    _, block_tokens, num_kv_heads, _ = k_cache.shape
    assert q[0:1].is_contiguous(), "the heads of a q row must lie side by side"
    assert k_cache.is_contiguous(), "the K cache must be contiguous"
    assert v_cache.is_contiguous(), "the V cache must be contiguous"
    out = torch.empty((num_reqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_reqs == 0:
        return out
    plan = plan or plan_decode(
        num_reqs, num_heads, num_kv_heads, head_dim, q.element_size(), num_processors(q.device),
        batch.max_seq_len,
    )  # fmt: skip
    is_split = plan.num_splits > 1
    partial = log_sum = out  # never touched when one program does a whole request
    if is_split:
        shape = (num_reqs, num_heads, plan.num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        log_sum = torch.empty(shape, dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    rows, columns = tile_shape(group, head_dim)
    _decode_kernel[(num_reqs, num_kv_heads, plan.num_splits)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.seq_lens,
        out,
        partial,
        log_sum,
        scale * LOG2_E,
        q.stride(0),
        batch.block_tables.stride(0),
        plan.num_splits,
        MIN_SHARE=plan.min_share,
        GROUP=group,
        ROWS=rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BLOCK_TOKENS=block_tokens,
        TILE=plan.tile_tokens,
        IS_SPLIT=is_split,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if is_split:
        combine_splits(partial, log_sum, batch.seq_lens, out, plan)
    return out


def combine_splits(
    partial: torch.Tensor,
    log_sum: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    *,
    use_pdl: bool = False,
) -> None:
    """Fill out [requests, num_heads, head_dim] from the splits' partial [.., splits, head_dim].

    log_sum [requests, num_heads, splits]. use_pdl only after a kernel that kept the rule of
    kernels/pdl.py.
    """
    num_reqs, num_heads, head_dim = out.shape
    columns = next_power_of_two(head_dim)
    _combine_kernel[(num_reqs, num_heads)](
        partial,
        log_sum,
        seq_lens,
        out,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        SPLITS=plan.num_splits,
        MIN_SHARE=plan.min_share,
        TILE=plan.tile_tokens,
        num_warps=min(max(plan.num_splits * columns // 1024, 1), 8),
        **launch_options(use_pdl),
    )


def tile_shape(group: int, head_dim: int) -> tuple[int, int]:
    """Rows and columns of a query tile; 16 rows are the least of a matrix instruction."""
    return max(next_power_of_two(group), 16), next_power_of_two(head_dim)


@jit()
def share_of_split(
    length: tl.tensor, num_splits: tl.tensor, MIN_SHARE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Tokens of each split but the last: an equal share, or the least, in whole tiles."""
    return tl.cdiv(tl.maximum(tl.cdiv(length, num_splits), MIN_SHARE), TILE) * TILE


@jit(counts=("num_splits", "table_stride"), tables=("block_tables", "seq_lens"))
def _decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sum: tl.tensor,
    scale: tl.tensor,  # times log2(e): exp2 is the device's own instruction, exp is not
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    MIN_SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One (request, kv head, split): rows are the group's query heads, padded to ROWS."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request)
    share = share_of_split(length, num_splits, MIN_SHARE, TILE)
    begin = split * share
    end = tl.minimum(begin + share, length)
    if IS_SPLIT and begin >= length:
        return  # the combine kernel knows from the length that this split wrote nothing

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, TILE)
    q_mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    q_place = q + request * q_stride + head[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q_place, mask=q_mask, other=0.0)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    # 32-bit offsets within a tile, added to a 64-bit scalar: half the registers.
    tile_offset = in_tile[:, None] * (NUM_KV_HEADS * HEAD_DIM) + column[None, :]
    # The block number is fetched one turn ahead. Were it fetched in the turn that needs it, Triton
    # would spend its pipeline on that chain and keep a single K and V tile in flight.
    table = block_tables + request * table_stride
    next_block = tl.load(table + begin // BLOCK_TOKENS)
    for start in range(begin, end, TILE):
        block = next_block
        next_block = tl.load(table + tl.minimum(start + TILE, end - 1) // BLOCK_TOKENS)
        # int64 before the product: a large pool passes 2^31 elements.
        slot = block.to(tl.int64) * BLOCK_TOKENS + start % BLOCK_TOKENS
        base = slot * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        known = start + in_tile < end
        mask = known[:, None] & (column < HEAD_DIM)[None, :]
        keys = tl.load(k_cache + base + tile_offset, mask=mask, other=0.0)
        # V is masked like K: a weight of 0 times an unwritten NaN would be NaN.
        values = tl.load(v_cache + base + tile_offset, mask=mask, other=0.0)
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        score = tl.where(known[None, :], score, -1.0e30)
        new_best = tl.maximum(best, tl.max(score, axis=1))
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        best = new_best

    # Only a request of length 0 has a total of 0; it gets zeros.
    result = mixed / tl.maximum(total, 1.0e-30)[:, None]
    out_row = request * (NUM_KV_HEADS * GROUP) + head
    if IS_SPLIT and share < length:
        out_row = out_row * num_splits + split
        tl.store(log_sum + out_row, best + tl.log2(total), mask=row < GROUP)
        tl.store(partial + out_row[:, None] * HEAD_DIM + column[None, :], result, mask=q_mask)
    else:
        tl.store(out + out_row[:, None] * HEAD_DIM + column[None, :], result, mask=q_mask)


@jit(tables=("seq_lens",))
def _combine_kernel(
    partial: tl.tensor,
    log_sum: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One (request, query head): the splits' results, weighted by their softmax sums."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    row = request * NUM_HEADS + tl.program_id(1)
    length = tl.load(seq_lens + request)
    share = share_of_split(length, SPLITS, MIN_SHARE, TILE)
    if (length > 0) & (length <= share):
        return  # its only split has written the result
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, COLUMNS)
    # The splits that were left without tokens wrote nothing: their memory may hold NaN.
    wrote = split * share < length
    sums = tl.load(log_sum + row * SPLITS + split, mask=wrote, other=-1.0e30)
    weight = tl.where(wrote, tl.exp2(sums - tl.max(sums, axis=0)), 0.0)
    weight = weight / tl.maximum(tl.sum(weight, axis=0), 1.0e-30)
    place = partial + (row * SPLITS + split[:, None]) * HEAD_DIM + column[None, :]
    parts = tl.load(place, mask=wrote[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weight[:, None], axis=0)
    tl.store(out + row * HEAD_DIM + column, result, mask=column < HEAD_DIM)
