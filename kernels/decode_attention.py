"""Decode attention (one query token a request) over the paged cache, split over the KV length.

A decode is a read of the KV cache, so every byte is read once: a program takes one request, one KV
head and one share ("split") of the length, and its whole group of query heads at once, as the rows
of a small matrix product. Few requests need many splits to fill the device; their partial results
are joined by the program that is the last to arrive (kernels/join_shares.py). A decode that leaves
the device room is served by fused_decode.py instead, which takes this file's plans.

    program (request, kv head, split)   tokens [split * share, (split + 1) * share)
        -> out [requests, num_heads, D]                     one share, or the last to arrive
        -> partial [requests, kv heads, splits, group, D]   more shares: a part each
           log_sum [requests, kv heads, splits, group]

The number of splits is fixed on the host from the batch size, so a captured graph stays valid; each
share follows from the length, which only the device knows. Splits left without tokens end at once.

A large batch fills the device with one program a request and KV head. What is read last then
decides its time, so the longest should start first: the scheduler sorts a batch (roster.py), and
the grid keeps its order, the KV heads of one request together, all first shares before any second.
A request far longer than the others would still be read when all have ended; so a split has a least
share there, only such requests are cut, and a request of one share writes its result itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.attention_batch import AttentionBatch, assert_layout
from nanorunner.kernels.join_shares import share_counters, share_of_split, write_share
from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, num_processors, tl

LOG2_E = 1.4426950408889634
PART_REGISTERS = 64  # float32, a thread


class DecodePlan(NamedTuple):
    """How one decode launch is cut up: by shapes and by how long a request may be, if that."""

    num_splits: int
    tile_tokens: int  # KV tokens a loop turn; divides the block, so a tile lies in one block
    num_warps: int
    num_stages: int
    min_share: int = 0  # tokens that a split has at least, where the request has that many
    # Of fused_decode.py alone: the grid keeps the batch's order, as decode_attention's always does.
    # It costs registers there.
    in_order: bool = False


# A batch of so many (request, KV head) pairs a processor fills the device with whole requests; so
# only long ones are cut, into shares of at least so many tokens. Above splits * share they grow.
FULL_LOAD, SPLITS, LEAST_SHARE = 6, 4, 2048
# From so many pairs a processor on narrow programs keep the memory as busy as wide ones, and end
# more evenly.
NARROW_LOAD = 10
MAX_SEQ_LENS = (0, LEAST_SHARE + 1)  # the lengths at which plans change


def is_full(num_reqs: int, num_kv_heads: int, processors: int) -> bool:
    """Return whether a batch of decodes fills the device with whole requests."""
    return num_reqs * num_kv_heads >= FULL_LOAD * processors


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
    pairs = num_reqs * num_kv_heads
    group, load = num_heads // num_kv_heads, pairs / processors
    if is_full(num_reqs, num_kv_heads, processors) and max_seq_len > LEAST_SHARE:
        plan = _plan_tile(SPLITS, group, head_dim, item_bytes, load)
        return plan._replace(min_share=LEAST_SHARE)
    # About 4 programs a processor keep the memory busy; more splits only add parts to join.
    wanted = max(4 * processors // pairs, 1)
    num_splits = min(1 << (wanted.bit_length() - 1), 64 if pairs <= 2 else 32)
    return _plan_tile(num_splits, group, head_dim, item_bytes, load)


def _plan_tile(
    num_splits: int, group: int, head_dim: int, item_bytes: int, load: float
) -> DecodePlan:
    """Return the plan of so many splits; load: (request, KV head) pairs a processor."""
    rows, columns = tile_shape(group, head_dim)
    if item_bytes == 4:
        # Full float32 products run without tensor cores: small tiles, or registers spill.
        return DecodePlan(num_splits, 16, 4, 2)
    if rows > 16 or columns > 128:
        return DecodePlan(num_splits, 32, 4, 2)
    if load >= NARROW_LOAD:
        return DecodePlan(num_splits, 32, 1, 3)
    if load >= FULL_LOAD:
        return DecodePlan(num_splits, 128, 4, 2)
    return DecodePlan(num_splits, 64, 4, 3)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    plan: DecodePlan | None = None,
    reads_early: bool = False,
    *,
    waits_last: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [requests, num_heads, head_dim]; see kernels/attention.py.

    Row i of q belongs to request i; the batch may have more, behind these. A request of length 0
    (padding) gets zeros. `plan` replaces plan_decode's choice, for measurements. reads_early: the
    lengths and tables are read before the wait of kernels/pdl.py, which the kernel before must
    allow: one that is no PDL launch, or a late one (rope_kv_write.py), and that writes neither.
    waits_last: everything is read before the wait, and written too; so the kernel before must be a
    late one that writes nothing of what is read here and reads nothing of what is written
    (prefill_attention.py). out: where to write.
    """
    num_reqs, num_heads, head_dim = q.shape
    _, block_tokens, num_kv_heads, _ = k_cache.shape
    assert_layout(q, k_cache, v_cache)
    if out is None:
        out = torch.empty((num_reqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous(), "the output must be contiguous"
    if num_reqs == 0:
        return out
    plan = plan or plan_decode(
        num_reqs, num_heads, num_kv_heads, head_dim, q.element_size(), num_processors(q.device),
        batch.max_seq_len,
    )  # fmt: skip
    group = num_heads // num_kv_heads
    partial, log_sum, counters = make_parts(out, num_kv_heads, plan)
    rows, columns = tile_shape(group, head_dim)
    _decode_kernel[(num_kv_heads, num_reqs, plan.num_splits)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.seq_lens,
        out,
        partial,
        log_sum,
        counters,
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
        IS_SPLIT=plan.num_splits > 1,
        READ_EARLY=reads_early or waits_last,
        WAIT_LAST=waits_last,
        **part_sizes(plan, group, columns),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(can_overlap(q.device)),
    )
    return out


def make_parts(
    out: torch.Tensor, num_kv_heads: int, plan: DecodePlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return partial, log_sum and counters for a launch that fills out; see kernels/join_shares.py.

    Under a plan of one split nothing touches them, and each is out: a kernel needs some pointer.
    """
    if plan.num_splits == 1:
        return out, out, out
    num_reqs, num_heads, head_dim = out.shape
    shape = (num_reqs, num_kv_heads, plan.num_splits, num_heads // num_kv_heads)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
    log_sum = torch.empty(shape, dtype=torch.float32, device=out.device)
    return partial, log_sum, share_counters(out.device, num_reqs * num_kv_heads)


def part_sizes(plan: DecodePlan, group: int, columns: int) -> dict[str, int]:
    """Return write_share's HEADS and PARTS: parts fill the registers that attention leaves.

    Where a full device needs registers most there are no more parts than splits. Elsewhere a launch
    of few splits takes the same room as one of many: they share one compilation.
    """
    heads = next_power_of_two(group)
    room = PART_REGISTERS * 32 * plan.num_warps // (heads * columns)
    most = next_power_of_two(plan.num_splits) if plan.min_share else 32
    return {"HEADS": heads, "PARTS": min(max(room, 1), most)}


def tile_shape(group: int, head_dim: int) -> tuple[int, int]:
    """Rows and columns of a query tile; 16 rows are the least of a matrix instruction."""
    return max(next_power_of_two(group), 16), next_power_of_two(head_dim)


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
    counters: tl.tensor,
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
    READ_EARLY: tl.constexpr,
    WAIT_LAST: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One (request, kv head, split): rows are the group's query heads, padded to ROWS."""
    if USE_PDL:
        gdc_launch_dependents()
        if not READ_EARLY:
            gdc_wait()
    request = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    # Past the first cache, whose lines may be older than the kernels that wrote these; so is all
    # that is read before the wait. (K and V pass by it in any case, on their way to shared memory.)
    length = tl.load(seq_lens + request, cache_modifier=".cg")
    share = share_of_split(length, num_splits, MIN_SHARE, TILE)
    begin = split * share
    end = tl.minimum(begin + share, length)
    # The block number is fetched one turn ahead. Were it fetched in the turn that needs it, Triton
    # would spend its pipeline on that chain and keep a single K and V tile in flight.
    table = block_tables + request * table_stride
    fresh: tl.constexpr = ".cg" if WAIT_LAST else ""
    first_place = table + begin // BLOCK_TOKENS
    next_block = tl.load(first_place, mask=begin < length, other=0, cache_modifier=".cg")
    if USE_PDL and READ_EARLY and not WAIT_LAST:
        gdc_wait()
    if IS_SPLIT and (split > 0) & (begin >= length):
        # Nothing to do; of a padded request the first split writes the zeros. Nor is there a need
        # to WAIT_LAST: the first splits do.
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, TILE)
    q_mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    q_place = q + request * q_stride + head[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q_place, mask=q_mask, other=0.0, cache_modifier=fresh)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    # 32-bit offsets within a tile, added to a 64-bit scalar: half the registers.
    tile_offset = in_tile[:, None] * (NUM_KV_HEADS * HEAD_DIM) + column[None, :]
    for start in range(begin, end, TILE):
        block = next_block
        next_place = table + tl.minimum(start + TILE, end - 1) // BLOCK_TOKENS
        next_block = tl.load(next_place, cache_modifier=fresh)
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

    if IS_SPLIT:
        # Read again, not kept: the loop above has no register to spare.
        length = tl.load(seq_lens + request, cache_modifier=fresh)
        share = share_of_split(length, num_splits, MIN_SHARE, TILE)
    write_share(
        best, total, mixed, out, partial, log_sum, counters, request, kv_head,
        split, num_splits, length, share, GROUP, ROWS, NUM_KV_HEADS,
        HEAD_DIM, COLUMNS, IS_SPLIT, HEADS, PARTS,
    )  # fmt: skip
    if USE_PDL and WAIT_LAST:
        gdc_wait()  # whoever waits for this launch waits for the one before it too
