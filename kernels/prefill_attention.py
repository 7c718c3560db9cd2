"""Prefill and mixed batches: causal attention of ragged queries over the paged cache.

FlashAttention 2's loop: a program holds a tile of queries and walks the keys that it may see, tile
by tile, with a running softmax in float32. A tile's rows are (query token, head of the KV head's
group) pairs, so one read of K and V serves the whole group, and a decode in a mixed batch fills
group rows, not one.

    row m of tile t of request i:  token t * TOKENS + m // GROUP,  head kv_head * GROUP + m % GROUP

The grid is a bound known without the lengths, num_tokens // TOKENS + num_reqs tiles. Request i's
tiles start at query_start_loc[i] // TOKENS + i, so a program finds its own by binary search on the
device; the surplus ends at once.

Requests in front that have one token each may be left out, for kernels/decode_attention.py: as rows
of a tile for prompts, many decodes wait for each other on few processors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.attention_batch import AttentionBatch, assert_layout
from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, shared_bytes, tl

LOG2_E = 1.4426950408889634


class PrefillPlan(NamedTuple):
    """How one launch is cut up; it depends on shapes alone, never on lengths."""

    rows: int  # of a query tile
    tile_tokens: int  # KV tokens a loop turn; divides the block, so a tile lies in one block
    num_warps: int
    num_stages: int


def plan_prefill(
    max_query_len: int, group: int, head_dim: int, item_bytes: int, shared: int
) -> PrefillPlan:
    """Return the plan for a batch: large query tiles as soon as it holds one longer query.

    shared: bytes of shared memory that a program may have (227 KiB on Hopper, 99 on a desktop GPU).
    """
    columns = next_power_of_two(head_dim)
    smallest = max(next_power_of_two(group), 16)  # 16: the smallest tile of a matrix instruction
    if item_bytes == 4:
        # Full float32 products run without tensor cores: small tiles, or registers spill.
        return PrefillPlan(smallest if columns > 128 else max(smallest, 32), 16, 4, 1)
    if max_query_len * group <= 2 * smallest:
        plan = PrefillPlan(smallest, 64 if columns <= 128 else 32, 4, 3)
    elif columns <= 128 and smallest <= 64:
        # Two programs a processor or more: while one is at its softmax, another multiplies.
        plan = PrefillPlan(64, 64, 4, 3)
    elif columns <= 64:
        plan = PrefillPlan(max(smallest, 128), 128, 8, 3)
    elif columns <= 128:
        plan = PrefillPlan(max(smallest, 128), 64, 8, 3)
    else:
        plan = PrefillPlan(max(smallest, 64), 64, 8, 2)
    # The query tile, and a K and a V tile for each stage.
    while (plan.rows + 2 * plan.tile_tokens * plan.num_stages) * columns * item_bytes > shared:
        if plan.num_stages > 2:
            plan = plan._replace(num_stages=plan.num_stages - 1)
        elif plan.tile_tokens > 16:
            plan = plan._replace(tile_tokens=plan.tile_tokens // 2)
        else:
            break  # nothing smaller exists; Triton will say what is missing
    return plan


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    plan: PrefillPlan | None = None,
    *,
    masks_all: bool = False,
    num_skipped: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [tokens, num_heads, head_dim]; see kernels/attention.py.

    out: where to write; contiguous. Tokens past query_start_loc[-1] (padding) get zeros. `plan`
    replaces plan_prefill's choice. num_skipped: so many requests in front, of one token each, whose
    rows of out stay unwritten. The launch after this may overlap with it, and find what came before
    it complete (pdl.py). masks_all runs every KV tile through the same instructions: where the mask
    begins depends on a query's neighbours in its tile, and code with a mask and without may round
    differently.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_tokens, num_kv_heads, _ = k_cache.shape
    num_reqs = batch.seq_lens.shape[0] - num_skipped
    assert_layout(q, k_cache, v_cache)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous(), "the output must be contiguous"
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    plan = plan or plan_prefill(
        batch.max_query_len, group, head_dim, q.element_size(), shared_bytes(q.device)
    )
    tokens = plan.rows // group
    # One more "request" clears the padding tokens behind the last real one.
    first_tile = num_skipped // tokens
    num_tiles = num_tokens // tokens + num_reqs + 1 - first_tile
    _prefill_kernel[(num_tiles, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        batch.query_start_loc[num_skipped:],
        batch.seq_lens[num_skipped:],
        batch.block_tables[num_skipped:],
        out,
        scale * LOG2_E,
        num_tokens,
        num_reqs,
        first_tile,
        q.stride(0),
        batch.block_tables.stride(0),
        GROUP=group,
        TOKENS=tokens,
        ROWS=plan.rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=next_power_of_two(head_dim),
        BLOCK_TOKENS=block_tokens,
        TILE=plan.tile_tokens,
        MASKS_ALL=masks_all,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(can_overlap(q.device)),
    )
    return out


@jit(
    counts=("num_tokens", "num_reqs", "first_tile", "table_stride"),
    tables=("query_start_loc", "seq_lens", "block_tables"),
)
def _prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,  # times log2(e): exp2 is the device's own instruction, exp is not
    num_tokens: tl.tensor,
    num_reqs: tl.tensor,
    first_tile: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MASKS_ALL: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One (query tile, kv head); see the module docstring for the rows of a tile."""
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    # The last tiles of a causal prompt are the longest: start them first.
    tile = first_tile + tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _request_of_tile(query_start_loc, tile, num_reqs, TOKENS)
    query_start = tl.load(query_start_loc + request)
    is_padding = request == num_reqs
    next_request = tl.minimum(request + 1, num_reqs)
    query_end = tl.where(is_padding, num_tokens, tl.load(query_start_loc + next_request))
    query_len = query_end - query_start
    first = (tile - query_start // TOKENS - request) * TOKENS
    if first >= query_len:
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    q_mask = ((row < TOKENS * GROUP) & (token < query_len))[:, None] & (column < HEAD_DIM)[None, :]
    q_row = (query_start + token).to(tl.int64)
    out_place = out + (q_row * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    if is_padding:
        tl.store(out_place, mixed, mask=q_mask)
        return
    q_place = q + (q_row * q_stride + head * HEAD_DIM)[:, None] + column[None, :]
    queries = tl.load(q_place, mask=q_mask, other=0.0)
    computed = tl.load(seq_lens + request) - query_len
    position = computed + token
    # Every query of the tile sees all keys below `plain`; only tiles from there on need a mask.
    plain = (computed + first + 1) // TILE * TILE
    if MASKS_ALL:
        plain = plain * 0
    end = computed + tl.minimum(first + TOKENS, query_len)
    table = block_tables + request.to(tl.int64) * table_stride
    head_offset = kv_head * HEAD_DIM
    # The block number is fetched one turn ahead. Were it fetched in the turn that needs it, Triton
    # would spend its pipeline on that chain and keep fewer K and V tiles in flight.
    next_block = tl.load(table)
    for start in range(0, plain, TILE):
        block = next_block
        next_block = tl.load(table + tl.minimum(start + TILE, end - 1) // BLOCK_TOKENS)
        best, total, mixed = _attend_tile(
            queries, k_cache + head_offset, v_cache + head_offset, block, start, end, position,
            best, total, mixed, scale,
            NUM_KV_HEADS, HEAD_DIM, COLUMNS, BLOCK_TOKENS, TILE, False,
        )  # fmt: skip
    for start in range(plain, end, TILE):
        block = next_block
        next_block = tl.load(table + tl.minimum(start + TILE, end - 1) // BLOCK_TOKENS)
        best, total, mixed = _attend_tile(
            queries, k_cache + head_offset, v_cache + head_offset, block, start, end, position,
            best, total, mixed, scale,
            NUM_KV_HEADS, HEAD_DIM, COLUMNS, BLOCK_TOKENS, TILE, True,
        )  # fmt: skip
    # a request of length 0 has seen nothing: its sum is 0, and it gets zeros
    tl.store(out_place, mixed / tl.where(total > 0, total, 1.0)[:, None], mask=q_mask)


@jit()
def _request_of_tile(
    query_start_loc: tl.tensor, tile: tl.tensor, num_reqs: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The last i in 0..num_reqs whose first tile, query_start_loc[i] // TOKENS + i, is <= tile."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def _attend_tile(
    queries: tl.tensor,
    keys_base: tl.tensor,
    values_base: tl.tensor,
    block: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Fold KV tokens [start, start + TILE) into the running softmax (best, total, mixed)."""
    in_tile = tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS)
    # int64 before the product: a large pool passes 2^31 elements.
    slot = block.to(tl.int64) * BLOCK_TOKENS + start % BLOCK_TOKENS
    base = slot * (NUM_KV_HEADS * HEAD_DIM)
    # 32-bit offsets within a tile, added to a 64-bit scalar: half the registers.
    tile_offset = in_tile[:, None] * (NUM_KV_HEADS * HEAD_DIM) + column[None, :]
    mask = (column < HEAD_DIM)[None, :]
    if IS_MASKED:
        # V as well as K: a weight of 0 times an unwritten NaN would be NaN.
        mask = mask & (start + in_tile < end)[:, None]
    keys = tl.load(keys_base + base + tile_offset, mask=mask, other=0.0)
    values = tl.load(values_base + base + tile_offset, mask=mask, other=0.0)
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if IS_MASKED:
        score = tl.where((start + in_tile)[None, :] <= position[:, None], score, -1.0e30)
    new_best = tl.maximum(best, tl.max(score, axis=1))
    shrink = tl.exp2(best - new_best)
    weight = tl.exp2(score - new_best[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return new_best, total, mixed
