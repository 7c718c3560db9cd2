"""The kernel of hopper_prefill.py: one warp that fetches, two groups of four that multiply.

    fetching warp     K0 V0 | K1 V1 | K2 V2 | wait until K0 is free, K3 ...
    a group           S0 = Q K0, softmax
                      S1 = Q K1  beside  out += P0 V0;   softmax of S1 while P0 V0 still runs
                      S2 = Q K2  beside  out += P1 V1;   ...

Both go through the same list of (tile of queries, KV head), so they need only tell each other which
places of the ring of K and V tiles are full and which are free: four barriers a place, whose phase
turns with each round of the ring. A group walks 64 rows; both groups read the same K and V.

    item      a tile of queries and a KV head (hopper_prefill_items.py)
    turn      a tile of keys, of all items so far
    stage     turn modulo NUM_STAGES: the place in the ring

Scores stay unscaled until the exponent: exp2(score * scale - best * scale) is one instruction
before the exponential.
"""

from __future__ import annotations

from nanorunner.kernels.gluon_support import (
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanorunner.kernels.hopper_prefill_items import item_of, locate, num_rounds
from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import constant

MATRIX_ROWS = 64  # of a group of four warps: what one matrix instruction takes
GROUP_ROWS = constant(MATRIX_ROWS)
# A thread's registers: what the fetching warp gives up, the groups have.
FETCHING_REGISTERS = constant(24)
GROUP_REGISTERS = constant(240)


@gluon_jit(
    counts=("num_tokens", "num_reqs", "first_tile", "num_tiles", "table_stride"),
    tables=("query_start_loc", "seq_lens", "block_tables"),
)
def hopper_prefill_kernel(
    q: gl.tensor,
    k_tiles: gl.tensor,  # the cache as [slots, num_kv_heads * HEAD_DIM], in tiles of one head
    v_tiles: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    block_tables: gl.tensor,
    out: gl.tensor,
    scale: gl.tensor,  # times log2(e)
    num_tokens: gl.tensor,
    num_reqs: gl.tensor,
    first_tile: gl.tensor,
    num_tiles: gl.tensor,
    q_stride: gl.tensor,
    table_stride: gl.tensor,
    GROUP: gl.constexpr,
    GROUP_TOKENS: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    TILE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
) -> None:
    """Attend the items of one program; see the module docstring."""
    if USE_PDL:
        gdc_wait()  # the other warps begin behind it, at warp_specialize
        gdc_launch_dependents()
    keys = gl.allocate_shared_memory(k_tiles.dtype, [NUM_STAGES, TILE, HEAD_DIM], k_tiles.layout)
    values = gl.allocate_shared_memory(v_tiles.dtype, [NUM_STAGES, TILE, HEAD_DIM], v_tiles.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=NUM_GROUPS)
        mbarrier.init(v_free.index(stage), count=NUM_GROUPS)
    fence_async_shared()  # the memory engine, which will ring them, reads by another way
    ring = (keys, values, k_full, v_full, k_free, v_free)
    batch = (query_start_loc, seq_lens, num_tokens, num_reqs, first_tile, num_tiles)
    rows = (q, out, q_stride, scale)
    cache = (k_tiles, v_tiles, block_tables, table_stride)
    TOKENS: gl.constexpr = NUM_GROUPS * GROUP_TOKENS
    gl.static_assert(NUM_GROUPS == 2, "there is a line below for each group")
    gl.warp_specialize(
        [
            (_attend, (rows, ring, batch, 0, GROUP, GROUP_TOKENS, TOKENS, NUM_KV_HEADS)),
            (_attend, (rows, ring, batch, 1, GROUP, GROUP_TOKENS, TOKENS, NUM_KV_HEADS)),
            (_fetch, (cache, ring, batch, TOKENS, NUM_KV_HEADS, BLOCK_TOKENS)),
        ],
        [4, 1],
        [GROUP_REGISTERS, FETCHING_REGISTERS],
    )


@gluon_jit()
def _fetch(
    cache: gl.tuple,
    ring: gl.tuple,
    batch: gl.tuple,
    TOKENS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
) -> None:
    """The fetching warp: every tile of K and V of every item, as places of the ring get free."""
    k_tiles, v_tiles, block_tables, table_stride = cache
    keys, values, k_full, v_full, k_free, v_free = ring
    NUM_STAGES: gl.constexpr = keys.shape[0]
    TILE: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    TILE_BYTES: gl.constexpr = TILE * HEAD_DIM * 2
    turn = gl.to_tensor(0)  # tiles fetched so far, of all items
    for round in range(num_rounds(batch, NUM_KV_HEADS)):
        tile, kv_head = item_of(round, batch, NUM_KV_HEADS)
        request, _, _, _, _, end = locate(tile, batch, TOKENS)
        table = block_tables + request.to(gl.int64) * table_stride
        for start in range(0, end, TILE):
            block = gl.load(table + start // BLOCK_TOKENS)
            slot = block * BLOCK_TOKENS + start % BLOCK_TOKENS
            column = kv_head * HEAD_DIM
            stage = turn % NUM_STAGES
            phase = turn // NUM_STAGES & 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), TILE_BYTES)
            load_tile(k_tiles, [slot, column], k_full.index(stage), keys.index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            load_tile(v_tiles, [slot, column], v_full.index(stage), values.index(stage))
            turn += 1


@gluon_jit()
def _attend(
    rows: gl.tuple,
    ring: gl.tuple,
    batch: gl.tuple,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_TOKENS: gl.constexpr,
    TOKENS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
) -> None:
    """A group of four warps: its 64 rows of every item."""
    q, out, q_stride, scale = rows
    keys, _, _, _, _, _ = ring
    TILE: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    # Scores as the matrix instruction leaves them, queries as it reads them; in memory a row is a
    # line of 16-byte pieces.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    LINES: gl.constexpr = _lines(HEAD_DIM)
    line = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LINES))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    row = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES))
    turn = gl.to_tensor(0)
    for round in range(num_rounds(batch, NUM_KV_HEADS)):
        tile, kv_head = item_of(round, batch, NUM_KV_HEADS)
        _request, query_start, query_len, first, computed, end = locate(tile, batch, TOKENS)
        first += WHICH * GROUP_TOKENS
        token = first + line // GROUP
        head = kv_head * GROUP + line % GROUP
        is_mine = (line < GROUP_TOKENS * GROUP) & (token < query_len)
        inside = is_mine[:, None] & (column < HEAD_DIM)[None, :]
        q_row = (query_start + token).to(gl.int64)
        result = gl.zeros([GROUP_ROWS, HEAD_DIM], out.dtype.element_ty, LINES)
        if end > 0:  # else padding tokens, or requests of length 0
            q_place = q + (q_row * q_stride + head * HEAD_DIM)[:, None] + column[None, :]
            queries = gl.convert_layout(gl.load(q_place, mask=inside, other=0.0), QUERIES)
            position = computed + first + row // GROUP
            # Every row sees all keys below `plain`; only tiles from there on need a mask. The keys
            # end with the item's last token, which may stand in front of this group's rows.
            plain = gl.minimum(computed + first + 1, end) // TILE * TILE
            mixed, turn = _attend_item(queries, ring, turn, position, plain, end, scale)
            result = gl.convert_layout(mixed.to(out.dtype.element_ty), LINES)
        out_row = q_row * (NUM_KV_HEADS * GROUP) + head
        gl.store(out + out_row[:, None] * HEAD_DIM + column[None, :], result, mask=inside)


@gluon_jit()
def _attend_item(
    queries: gl.tensor,
    ring: gl.tuple,
    turn: gl.tensor,
    position: gl.tensor,
    plain: gl.tensor,
    end: gl.tensor,
    scale: gl.tensor,
) -> gl.tuple:
    """Return the attention of a group's rows over the keys below end, and the turns after it."""
    keys, values, k_full, v_full, k_free, v_free = ring
    NUM_STAGES: gl.constexpr = keys.shape[0]
    TILE: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    SCORES: gl.constexpr = queries.type.layout.parent
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    stage = turn % NUM_STAGES
    mbarrier.wait(k_full.index(stage), turn // NUM_STAGES & 1)
    score = warpgroup_mma(
        queries,
        keys.index(stage).permute((1, 0)),
        gl.zeros([GROUP_ROWS, TILE], gl.float32, SCORES),
        use_acc=False,
    )
    mbarrier.arrive(k_free.index(stage))
    key = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    score = gl.where(key[None, :] <= position[:, None], score, -1.0e30)
    best = gl.full([GROUP_ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    weight, _shrink, best, total = _softmax(score, best, total, scale)
    weights = gl.convert_layout(weight.to(queries.dtype), WEIGHTS)
    mixed = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, MIXED)
    for start in range(TILE, plain, TILE):
        weights, best, total, mixed = _turn(
            queries, ring, turn, weights, best, total, mixed, scale, start, position, False
        )
        turn += 1
    for start in range(gl.maximum(plain, TILE), end, TILE):
        weights, best, total, mixed = _turn(
            queries, ring, turn, weights, best, total, mixed, scale, start, position, True
        )
        turn += 1
    stage = turn % NUM_STAGES
    mbarrier.wait(v_full.index(stage), turn // NUM_STAGES & 1)
    if end % TILE != 0:
        _clear_rows(values.index(stage), end % TILE)
    mixed = warpgroup_mma(weights, values.index(stage), mixed)
    mbarrier.arrive(v_free.index(stage))
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, MIXED))
    return mixed * share[:, None], turn + 1


@gluon_jit()
def _turn(
    queries: gl.tensor,
    ring: gl.tuple,
    turn: gl.tensor,
    weights: gl.tensor,
    best: gl.tensor,
    total: gl.tensor,
    mixed: gl.tensor,
    scale: gl.tensor,
    start: gl.tensor,
    position: gl.tensor,
    IS_MASKED: gl.constexpr,
) -> gl.tuple:
    """Mix the values of tile `turn` while the weights of the next one, from `start` on, are made.

    Returns the next tile's weights, and the running softmax with the rows of mixed scaled to it.
    """
    keys, values, k_full, v_full, k_free, v_free = ring
    NUM_STAGES: gl.constexpr = keys.shape[0]
    TILE: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = best.type.layout.parent
    stage, next_stage = turn % NUM_STAGES, (turn + 1) % NUM_STAGES
    mbarrier.wait(k_full.index(next_stage), (turn + 1) // NUM_STAGES & 1)
    score = warpgroup_mma(
        queries,
        keys.index(next_stage).permute((1, 0)),
        gl.zeros([queries.shape[0], TILE], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(v_full.index(stage), turn // NUM_STAGES & 1)
    mixed = warpgroup_mma(weights, values.index(stage), mixed, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(k_free.index(next_stage))
    if IS_MASKED:
        key = start + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        score = gl.where(key[None, :] <= position[:, None], score, -1.0e30)
    weight, shrink, best, total = _softmax(score, best, total, scale)
    # the weights are the instruction's until it has ended
    mixed, weights = warpgroup_mma_wait(0, deps=(mixed, weights))
    mbarrier.arrive(v_free.index(stage))
    mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, mixed.type.layout))[:, None]
    weights = gl.convert_layout(weight.to(weights.dtype), weights.type.layout)
    return weights, best, total, mixed


@gluon_jit()
def _softmax(score: gl.tensor, best: gl.tensor, total: gl.tensor, scale: gl.tensor) -> gl.tuple:
    """Fold a tile's scores into the running (best, total); also what they and the past weigh."""
    new_best = gl.maximum(best, gl.max(score, axis=1))
    shrink = gl.exp2((best - new_best) * scale)
    weight = gl.exp2(score * scale - (new_best * scale)[:, None])
    return weight, shrink, new_best, total * shrink + gl.sum(weight, axis=1)


@gluon_jit()
def _clear_rows(tile: gl.tensor, num_kept: gl.tensor) -> None:
    """Zero the rows of a tile of V past the request's end: 0 times an unwritten NaN would be NaN.

    Both groups do so. While one stores, the other's instruction may read: rows that are kept, and
    get what they hold, or rows that it has cleared itself.
    """
    LINES: gl.constexpr = _lines(tile.shape[1])
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LINES))
    tile.store(gl.where((row < num_kept)[:, None], tile.load(LINES), 0.0))
    # The matrix instruction reads by another way than a store writes; and by that way too the next
    # tile will come to this place, after these stores.
    fence_async_shared()


@constexpr_function
def _lines(columns: int) -> object:
    """Return the layout of rows in memory: 16 bytes a thread, side by side, over four warps."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
