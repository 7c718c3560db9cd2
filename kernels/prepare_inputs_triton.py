"""The Triton kernels of kernels/prepare_inputs.py, which says what they compute and launches them.

Strides and row numbers meet in 64 bits: in a token table a million wide, row 2148 lies beyond 2^31.
"""

from __future__ import annotations

from nanorunner.kernels.triton_support import jit, tl


@jit()
def _copy_table_row(
    source: tl.tensor,
    target: tl.tensor,
    num_used: tl.tensor,
    max_blocks: tl.tensor,
    TABLE_TILE: tl.constexpr,
) -> None:
    """Copy a row's num_used first block ids; the row of nobody (num_used 0) becomes all zero."""
    num_copied = tl.minimum(num_used, max_blocks)
    num_written = tl.where(num_used > 0, num_copied, max_blocks)
    for first in range(0, num_written, TABLE_TILE):
        column = first + tl.arange(0, TABLE_TILE)
        block = tl.load(source + column, mask=column < num_copied, other=0)
        tl.store(target + column, block, mask=column < num_written)


@jit(tables=("header", "idx_mapping", "offsets"))
def decode_inputs_kernel(
    header: tl.tensor,
    idx_mapping: tl.tensor,
    offsets: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    prefill_len: tl.tensor,
    token_limit: tl.tensor,
    last_sampled: tl.tensor,
    block_tables: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    out_block_tables: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    out_table_stride: tl.tensor,
    max_blocks: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_TILE: tl.constexpr,
    NUM_REQS: tl.constexpr,
) -> None:
    """Program i is request i of the bucket."""
    request = tl.program_id(0)
    num_reqs = tl.load(header + NUM_REQS).to(tl.int32)
    tl.store(query_start_loc + request, tl.minimum(request, num_reqs))
    bucket = tl.num_programs(0)
    tl.store(query_start_loc + bucket, tl.minimum(bucket, num_reqs), mask=request == bucket - 1)

    # int64 before the products below: a row times its stride may pass 2^31.
    row = tl.load(idx_mapping + request, mask=request < num_reqs, other=-1).to(tl.int64)
    is_live = row >= 0
    row = tl.maximum(row, 0)
    position = tl.load(num_computed + row, mask=is_live, other=0)
    if HAS_OFFSETS:
        offset = tl.load(offsets + request, mask=is_live, other=0)
        position += offset
        limit = tl.load(token_limit + row, mask=is_live, other=0)
        is_live = is_live & (position >= 0) & (position < limit)
        position = tl.where(is_live, position, 0)
    is_prompt = position < tl.load(prefill_len + row, mask=is_live, other=0)
    if HAS_OFFSETS:
        is_prompt = is_prompt | (offset != 0)
    prompt = tl.load(token_ids + row * token_stride + position, mask=is_live & is_prompt, other=0)
    sampled = tl.load(last_sampled + row, mask=is_live, other=0)
    tl.store(input_ids + request, tl.where(is_prompt, prompt.to(tl.int64), sampled))
    tl.store(positions + request, position.to(tl.int64))
    tl.store(seq_lens + request, tl.where(is_live, position + 1, 0))

    table = block_tables + row * table_stride
    column = position // BLOCK_SIZE
    has_slot = is_live & (column < max_blocks)
    block = tl.load(table + column, mask=has_slot, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + request, tl.where(has_slot, slot, -1))
    out_table = out_block_tables + request.to(tl.int64) * out_table_stride
    num_used = tl.where(is_live, column + 1, 0)
    _copy_table_row(table, out_table, num_used, max_blocks, TABLE_TILE)


@jit(
    counts=("num_slots",),
    tables=("header", "idx_mapping", "offsets", "logits_places", "query_start_loc"),
)
def mixed_inputs_kernel(
    header: tl.tensor,
    idx_mapping: tl.tensor,
    offsets: tl.tensor,
    logits_places: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    prefill_len: tl.tensor,
    token_limit: tl.tensor,
    last_sampled: tl.tensor,
    block_tables: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    out_block_tables: tl.tensor,
    logits_indices: tl.tensor,
    logits_idx_mapping: tl.tensor,
    logits_positions: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    out_table_stride: tl.tensor,
    max_blocks: tl.tensor,
    num_slots: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    TABLE_TILE: tl.constexpr,
    NUM_REQS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
) -> None:
    """Program (i, t): tile t of request i's tokens; the last i is the padding behind them all."""
    request = tl.program_id(0)
    tile = tl.program_id(1)
    num_reqs = tl.load(header + NUM_REQS).to(tl.int32)
    lane = tl.arange(0, TOKEN_TILE)
    if request == tl.num_programs(0) - 1:
        # From the true token count on: behind it lie the slots of an older, longer step.
        first = tl.load(header + NUM_TOKENS).to(tl.int32) + tile * TOKEN_TILE
        for start in range(first, num_slots, tl.num_programs(1) * TOKEN_TILE):
            token = start + lane
            zero = tl.zeros((TOKEN_TILE,), tl.int64)
            tl.store(input_ids + token, zero, mask=token < num_slots)
            tl.store(positions + token, zero, mask=token < num_slots)
            tl.store(slot_mapping + token, zero - 1, mask=token < num_slots)
        return

    is_real = request < num_reqs
    begin = tl.load(query_start_loc + request, mask=is_real, other=0).to(tl.int32)
    end = tl.load(query_start_loc + request + 1, mask=is_real, other=0).to(tl.int32)
    row = tl.load(idx_mapping + request, mask=is_real, other=-1).to(tl.int64)
    is_live = row >= 0
    row = tl.maximum(row, 0)  # int64: a row times its stride may pass 2^31
    computed = tl.load(num_computed + row, mask=is_live, other=0)
    prompt_end = tl.load(prefill_len + row, mask=is_live, other=0)
    newest = tl.load(last_sampled + row, mask=is_live, other=0)
    table = block_tables + row * table_stride
    if HAS_OFFSETS:
        offset = tl.load(offsets + request, mask=is_live, other=0)
        computed += offset
        limit = tl.load(token_limit + row, mask=is_live, other=0)

    index = tile * TOKEN_TILE + lane
    inside = index < end - begin
    token = begin + index
    position = tl.where(is_live, computed + index, 0)
    is_prompt = position < prompt_end
    is_ours = inside
    if HAS_OFFSETS:
        is_ours = inside & (position >= 0) & (position < limit)
        position = tl.where(is_ours, position, 0)
        is_prompt = is_prompt | (offset + index != 0)
        newest = tl.where(is_ours, newest, 0)
    prompt_place = token_ids + row * token_stride + position
    prompt = tl.load(prompt_place, mask=is_ours & is_prompt, other=0).to(tl.int64)
    tl.store(input_ids + token, tl.where(is_prompt, prompt, newest), mask=inside)
    tl.store(positions + token, position.to(tl.int64), mask=inside)
    column = position // BLOCK_SIZE
    has_slot = is_ours & (column < tl.where(is_live, max_blocks, 0))
    block = tl.load(table + column, mask=has_slot, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + token, tl.where(has_slot, slot, -1), mask=inside)

    if tile == 0:
        seq_len = tl.where(is_live, computed + end - begin, 0)
        if HAS_OFFSETS:
            seq_len = tl.where((computed >= 0) & (computed < limit), seq_len, 0)
        tl.store(seq_lens + request, seq_len)
        place = tl.load(logits_places + request, mask=is_real, other=-1).to(tl.int64)
        tl.store(logits_indices + place, (end - 1).to(tl.int64), mask=place >= 0)
        tl.store(logits_idx_mapping + place, tl.where(is_live, row, -1), mask=place >= 0)
        last = tl.maximum(seq_len - 1, 0).to(tl.int64)
        tl.store(logits_positions + place, last, mask=place >= 0)
        num_used = tl.cdiv(seq_len, BLOCK_SIZE)
        out_table = out_block_tables + request.to(tl.int64) * out_table_stride
        _copy_table_row(table, out_table, num_used, max_blocks, TABLE_TILE)
