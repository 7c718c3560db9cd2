"""The Triton kernel of kernels/fused_decode.py, which says what it computes and launches it.

    before the wait of kernels/pdl.py   lengths, tables, angles, gains, the share's first K and V
    after it                            the qkv rows, then arithmetic

What must hold for the first of these lines is said by fused_decode.
"""

from __future__ import annotations

from nanorunner.kernels.join_shares import share_of_split
from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import jit, tl


@jit()
def _rotated(
    raw: tl.tensor,  # heads [rows, COLUMNS]
    raw_partner: tl.tensor,  # the same heads, each column the one that it turns with
    gain: tl.tensor,  # [1, COLUMNS] the norm's weight
    gain_partner: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,  # negated in the first half
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """Return heads [rows, COLUMNS], normed and rotated, in the model dtype."""
    value, partner = raw.to(tl.float32), raw_partner.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + eps)[:, None]
        value = value * scale * gain
        partner = partner * scale * gain_partner
    return (value * cos + partner * sin).to(raw.dtype)


@jit(
    counts=("num_splits", "table_stride"),
    tables=("positions", "slot_mapping", "block_tables", "seq_lens"),
)
def fused_decode_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    slot_mapping: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sum: tl.tensor,
    scale: tl.tensor,  # times log2(e): exp2 is the device's own instruction, exp is not
    eps: tl.tensor,
    qkv_stride: tl.tensor,
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
    HAS_NORM: tl.constexpr,
    READ_EARLY: tl.constexpr,
    IN_ORDER: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One (request, kv head, split): rows are the group's query heads, padded to ROWS."""
    if USE_PDL:
        gdc_launch_dependents()
        if not READ_EARLY:
            gdc_wait()
    request = tl.program_id(1 if IN_ORDER else 0).to(tl.int64)
    kv_head = tl.program_id(0 if IN_ORDER else 1)
    split = tl.program_id(2)
    # Past the first cache, whose lines may be older than the kernels that wrote these.
    length = tl.load(seq_lens + request, cache_modifier=".cg")
    share = share_of_split(length, num_splits, MIN_SHARE, TILE)
    begin = split * share
    has_work = begin < length
    # The last position is this step's token: it is not in the cache yet.
    end = tl.minimum(begin + share, length - 1)
    table = block_tables + request * table_stride

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    in_head = column < HEAD_DIM
    in_tile = tl.arange(0, TILE)
    # 32-bit offsets within a tile, added to a 64-bit scalar: half the registers.
    tile_offset = in_tile[:, None] * (NUM_KV_HEADS * HEAD_DIM) + column
    # The share's first tile of K and V, which the loop below then leaves out.
    loop_begin = begin
    first_known = begin + in_tile < end
    if READ_EARLY:
        loop_begin = begin + TILE
        first_place = table + begin // BLOCK_TOKENS
        first_block = tl.load(first_place, mask=has_work, other=0, cache_modifier=".cg")
        first_slot = first_block.to(tl.int64) * BLOCK_TOKENS + begin % BLOCK_TOKENS
        first = (first_slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + tile_offset
        first_mask = first_known[:, None] & in_head
        first_keys = tl.load(k_cache + first, mask=first_mask, other=0.0, cache_modifier=".cg")
        first_values = tl.load(v_cache + first, mask=first_mask, other=0.0, cache_modifier=".cg")
    # A padded request's position may be junk; its angles are not needed.
    place = positions + request
    position = tl.load(place, mask=length > 0, other=0, cache_modifier=".cg")
    lane = tl.where(column < half, column, column - half)
    cos = tl.load(cos_sin + position * HEAD_DIM + lane, mask=in_head, other=0.0)
    sin = tl.load(cos_sin + position * HEAD_DIM + half + lane, mask=in_head, other=0.0)
    sin = tl.where(column < half, -sin, sin)
    partner = tl.where(column < half, column + half, column - half)
    q_gain, q_gain_partner, k_gain, k_gain_partner = cos, cos, cos, cos  # unused without a norm
    if HAS_NORM:
        q_gain = tl.load(q_norm + column, mask=in_head, other=0.0).to(tl.float32)
        q_gain_partner = tl.load(q_norm + partner, mask=in_head, other=0.0).to(tl.float32)
        k_gain = tl.load(k_norm + column, mask=in_head, other=0.0).to(tl.float32)
        k_gain_partner = tl.load(k_norm + partner, mask=in_head, other=0.0).to(tl.float32)
    if USE_PDL and READ_EARLY:
        gdc_wait()
    if IS_SPLIT and begin >= length:
        return  # the combine kernel knows from the length that this split wrote nothing

    # All loads before the first use. A head is read twice, once as its partners: cheaper than an
    # exchange between threads. Everyone reads the new token, masked where another split owns it: a
    # branch would make the loads of its arm wait for those before it.
    is_owner = has_work & (begin + share >= length)
    new_mask = column < tl.where(is_owner, HEAD_DIM, 0)
    q_mask = (row < GROUP)[:, None] & in_head
    head = kv_head * GROUP + row
    heads = qkv + request * qkv_stride
    q_place = heads + head[:, None] * HEAD_DIM
    k_place = heads + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
    q_raw = tl.load(q_place + column, mask=q_mask, other=0.0)
    q_partner = tl.load(q_place + partner, mask=q_mask, other=0.0)
    k_raw = tl.load(k_place + column, mask=new_mask, other=0.0)
    k_partner = tl.load(k_place + partner, mask=new_mask, other=0.0)
    new_value = tl.load(k_place + NUM_KV_HEADS * HEAD_DIM + column, mask=new_mask, other=0.0)
    slot = tl.load(slot_mapping + request).to(tl.int64)
    queries = _rotated(q_raw, q_partner, q_gain, q_gain_partner, cos, sin, eps, HEAD_DIM, HAS_NORM)
    new_key = _rotated(k_raw, k_partner, k_gain, k_gain_partner, cos, sin, eps, HEAD_DIM, HAS_NORM)
    slot_place = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + column
    store_mask = column < tl.where(is_owner & (slot >= 0), HEAD_DIM, 0)
    tl.store(k_cache + slot_place, new_key, mask=store_mask)
    tl.store(v_cache + slot_place, new_value, mask=store_mask)
    new_score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    new_score = tl.where(is_owner, new_score, -1.0e30)

    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    # The block number is fetched one turn ahead, or Triton spends its pipeline on that chain.
    next_start = tl.maximum(tl.minimum(loop_begin, end - 1), 0)
    next_block = tl.load(table + next_start // BLOCK_TOKENS)
    for start in range(loop_begin, end, TILE):
        block = next_block
        next_block = tl.load(table + tl.minimum(start + TILE, end - 1) // BLOCK_TOKENS)
        # int64 before the product: a large pool passes 2^31 elements.
        tile_slot = block.to(tl.int64) * BLOCK_TOKENS + start % BLOCK_TOKENS
        base = (tile_slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        known = start + in_tile < end
        mask = known[:, None] & in_head
        keys = tl.load(k_cache + base + tile_offset, mask=mask, other=0.0)
        # V is masked like K: a weight of 0 times an unwritten NaN would be NaN.
        values = tl.load(v_cache + base + tile_offset, mask=mask, other=0.0)
        best, total, mixed = _attend(queries, keys, values, known, scale, best, total, mixed)
    if READ_EARLY:
        best, total, mixed = _attend(
            queries, first_keys, first_values, first_known, scale, best, total, mixed
        )
    new_best = tl.maximum(best, new_score)
    shrink = tl.exp2(best - new_best)
    new_weight = tl.where(is_owner, tl.exp2(new_score - new_best), 0.0)
    total = total * shrink + new_weight
    mixed = mixed * shrink[:, None] + new_weight[:, None] * new_value.to(tl.float32)

    # Only a request of length 0 has a total of 0; it gets zeros.
    result = mixed / tl.maximum(total, 1.0e-30)[:, None]
    out_row = request * (NUM_KV_HEADS * GROUP) + head
    if IS_SPLIT and share < length:
        out_row = out_row * num_splits + split
        tl.store(log_sum + out_row, new_best + tl.log2(total), mask=row < GROUP)
        tl.store(partial + out_row[:, None] * HEAD_DIM + column, result, mask=q_mask)
    else:
        tl.store(out + out_row[:, None] * HEAD_DIM + column, result, mask=q_mask)


@jit()
def _attend(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    known: tl.tensor,
    scale: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tl.tensor:
    """Return the running softmax (best score, sum, mixed values) with a tile added."""
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    score = tl.where(known[None, :], score, -1.0e30)
    new_best = tl.maximum(best, tl.max(score, axis=1))
    shrink = tl.exp2(best - new_best)
    # A tile without a known token leaves new_best where it was, and may not count.
    weight = tl.where(known[None, :], tl.exp2(score - new_best[:, None]), 0.0)
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return new_best, total, mixed
