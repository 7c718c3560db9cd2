"""What the programs of hopper_prefill_kernel.py work through, and where an item's tokens lie.

    item      a tile of queries and a KV head
    program   p of P has the items p, 2P - 1 - p, 2P + p, 4P - 1 - p, ...: to and fro, so that whose
              item was the longest of a round has the shortest of the next

The fetching warp and both groups go through the same items, and each finds them by itself: the
lengths are in the first cache after the first look.
"""

from __future__ import annotations

from nanorunner.kernels.gluon_support import gl, gluon_jit


@gluon_jit()
def num_rounds(batch: gl.tuple, NUM_KV_HEADS: gl.constexpr) -> gl.tensor:
    """Return how many items this grid's programs have, the longest list of one."""
    _, _, _, _, _, num_tiles = batch
    return (num_tiles * NUM_KV_HEADS + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon_jit()
def item_of(round: gl.tensor, batch: gl.tuple, NUM_KV_HEADS: gl.constexpr) -> gl.tuple:
    """Return (tile, kv_head) of this program's item of a round; tile -1 if it has none in the last.

    The last tiles come first: those of one prompt become shorter along the list.
    """
    _, _, _, _, first_tile, num_tiles = batch
    place = gl.program_id(0)
    if round % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    item = round * gl.num_programs(0) + place
    tile = first_tile + num_tiles - 1 - item // NUM_KV_HEADS
    return gl.where(item < num_tiles * NUM_KV_HEADS, tile, -1), item % NUM_KV_HEADS


@gluon_jit()
def locate(tile: gl.tensor, batch: gl.tuple, TOKENS: gl.constexpr) -> gl.tuple:
    """Return (request, query_start, query_len, first token, computed, end) of a tile.

    As in prefill_attention.py: the last i in 0..num_reqs whose first tile, query_start_loc[i] //
    TOKENS + i, is <= tile; num_reqs stands for the padding. end: the keys that the tile may see, 0
    for none. A tile past its request's end, or -1, has first = query_len = 0: no token is in it.
    """
    query_start_loc, seq_lens, num_tokens, num_reqs, _, _ = batch
    low = gl.to_tensor(0)
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    query_start = gl.load(query_start_loc + low)
    query_end = gl.load(query_start_loc + gl.minimum(low + 1, num_reqs))
    query_len = gl.where(low == num_reqs, num_tokens, query_end) - query_start
    first = (tile - query_start // TOKENS - low) * TOKENS
    seq_len = gl.load(seq_lens + gl.minimum(low, num_reqs - 1))
    computed = seq_len - query_len
    is_empty = (tile < 0) | (first >= query_len)
    first = gl.where(is_empty, 0, first)
    query_len = gl.where(is_empty, 0, query_len)
    end = computed + gl.minimum(first + TOKENS, query_len)
    end = gl.where((low == num_reqs) | (query_len == 0), 0, end)
    return low, query_start, query_len, first, computed, end
