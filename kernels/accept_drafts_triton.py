"""The Triton kernel of kernels/accept_drafts.py, which says what it computes and launches it."""

from __future__ import annotations

from nanorunner.kernels.triton_support import jit, tl


@jit(
    counts=("max_places", "num_accepted"),
    tables=(
        "header",
        "idx_mapping",
        "query_start_loc",
        "sampled",
        "logits_places",
        "accepted_rows",
    ),
)
def accept_kernel(
    header: tl.tensor,
    idx_mapping: tl.tensor,
    query_start_loc: tl.tensor,
    sampled: tl.tensor,
    logits_places: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    total_len: tl.tensor,
    prefill_len: tl.tensor,
    last_sampled: tl.tensor,
    num_drafts: tl.tensor,
    token_limit: tl.tensor,
    output_ring: tl.tensor,
    step_counter: tl.tensor,
    accepted_rows: tl.tensor,
    token_capacity: tl.tensor,
    token_stride: tl.tensor,
    ring_size: tl.tensor,
    ring_stride: tl.tensor,
    max_places: tl.tensor,
    num_accepted: tl.tensor,
    HAS_PLACES: tl.constexpr,
    NUM_REQS: tl.constexpr,
    NUM_VERIFIED: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    REJECTED: tl.constexpr,
    NO_DRAFT: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program, so that the counter has one reader and one writer."""
    num_places = tl.minimum(tl.load(header + NUM_REQS).to(tl.int32), max_places)
    num_verified = tl.minimum(tl.load(header + NUM_VERIFIED).to(tl.int32), num_places)
    query_len = tl.maximum(tl.load(header + QUERY_LEN).to(tl.int32), 1)
    step = tl.load(step_counter)
    ring_row = output_ring + step % ring_size * ring_stride
    for first in range(0, num_accepted, TILE):
        entry = first + tl.arange(0, TILE)
        tl.store(accepted_rows + entry, tl.full((TILE,), -1, tl.int32), mask=entry < num_accepted)
    # What follows writes over some of these, from other threads.
    tl.debug_barrier()

    num_groups = num_verified // query_len
    j = tl.arange(0, MAX_QUERY_LEN)[None, :]
    for first in range(0, num_groups, GROUP_TILE):
        group = first + tl.arange(0, GROUP_TILE)[:, None]
        is_real = group < num_groups
        row = tl.load(idx_mapping + group * query_len, mask=is_real, other=-1).to(tl.int64)
        is_live = row >= 0
        base = tl.load(num_computed + row, mask=is_live, other=0)
        total = tl.load(total_len + row, mask=is_live, other=0)
        limit = tl.load(token_limit + row, mask=is_live, other=0)
        num_meant = tl.load(num_drafts + row, mask=is_live, other=MAX_QUERY_LEN)

        inside = is_real & (j < query_len)
        place = (group * query_len + j).to(tl.int64)
        if HAS_PLACES:
            place = tl.load(logits_places + place, mask=inside, other=-1).to(tl.int64)
            inside = inside & (place >= 0)
        ids = tl.load(sampled + place, mask=inside & is_live, other=-1)
        tokens = token_ids + row * token_stride
        # Id j is held against the input of place j + 1; the group's last id against nothing.
        column = base + 1 + j
        is_judged = is_live & (j + 1 < query_len) & (column < token_capacity)
        draft = tl.load(tokens + column, mask=is_judged, other=-1)
        is_match = is_judged & (ids == draft)
        matched = tl.min(tl.where(is_match, MAX_QUERY_LEN, j), axis=1, keep_dims=True)
        matched = tl.minimum(matched, num_meant)
        new = tl.maximum(tl.minimum(matched + 1, limit - total), 0)

        # Several warps read the same columns of a row: all of them before any moves.
        tl.debug_barrier()
        is_kept = inside & is_live & (j < new)
        kind = tl.where(j <= num_meant, REJECTED, NO_DRAFT).to(tl.int64)
        tl.store(ring_row + place, tl.where(is_kept, ids, kind), mask=inside)
        tl.store(accepted_rows + place, row.to(tl.int32), mask=is_kept)
        has_room = is_kept & (total + j < token_capacity)
        tl.store(tokens + total + j, ids.to(tl.int32), mask=has_room)
        tl.store(last_sampled + row + 0 * j, ids, mask=is_kept & (j == new - 1))
        tl.store(total_len + row, total + new, mask=is_live)
        tl.store(num_computed + row, base + new, mask=is_live)

    for first in range(num_verified, num_places, TILE):
        request = first + tl.arange(0, TILE)
        is_real = request < num_places
        row = tl.load(idx_mapping + request, mask=is_real, other=-1).to(tl.int64)
        is_live = row >= 0
        begin = tl.load(query_start_loc + request, mask=is_live, other=0)
        end = tl.load(query_start_loc + request + 1, mask=is_live, other=0)
        computed = tl.load(num_computed + row, mask=is_live, other=0) + (end - begin)
        place = request.to(tl.int64)
        if HAS_PLACES:
            place = tl.load(logits_places + request, mask=is_real, other=-1).to(tl.int64)
        has_place = is_real & (place >= 0)
        prompt_end = tl.load(prefill_len + row, mask=is_live, other=0)
        is_done = is_live & has_place & (computed >= prompt_end)
        total = tl.load(total_len + row, mask=is_done, other=0)
        is_kept = is_done & (total < tl.load(token_limit + row, mask=is_done, other=0))
        # Where the limit refuses the id, the last token stays the next input.
        computed -= (is_done & (is_kept == 0)).to(tl.int32)
        tl.store(num_computed + row, computed, mask=is_live)

        new_id = tl.load(sampled + place, mask=is_kept, other=REJECTED)
        tl.store(ring_row + place, new_id, mask=has_place)
        tl.store(accepted_rows + place, row.to(tl.int32), mask=is_kept)
        tl.store(last_sampled + row, new_id, mask=is_kept)
        tl.store(total_len + row, total + 1, mask=is_kept)
        has_room = is_kept & (total < token_capacity)
        tl.store(token_ids + row * token_stride + total, new_id.to(tl.int32), mask=has_room)
    # Every warp has its own copy of `step`: none may read the counter after it has moved.
    tl.debug_barrier()
    tl.store(step_counter, step + 1)
