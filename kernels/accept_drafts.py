"""After a step that may have verified drafts: who moves on by how many tokens, on the device.

It stands in for advance_state in every step of an engine that speculates, and keeps the ring and
the counter as that does. Drafts are not judged by probabilities: each place of a verify group has
sampled its token as plain decoding would, and a draft is right when it is that token. So what comes
out is what plain decoding samples, whatever the drafts were.

    a verify group of q places, all of one row; base = num_computed, total = total_len = base + 1
        place j         0            1         ...     q - 1
        its input       last_sampled draft 1           draft q - 1    (token_ids[row, base + j])
        its id          x[0]         x[1]              x[q - 1]

    matched = how many of the first ids are the next place's input, num_drafts[row] at most: what
              stands behind the drafts is somebody's old text, right by luck at best
    new     = min(matched + 1, token_limit - total): the ids up to the first that is no draft
    token_ids[row, total + j] = x[j] for j < new, last_sampled = x[new - 1]
    total_len += new, num_computed += new

The places behind the groups are decodes of one token and chunks of prompts. They do what
advance_state does, except that a row at its token_limit gets no id and keeps its last token as the
next input. So num_computed == total_len - 1 holds for every row that has sampled.

What the host reads in the ring, at a place's row of logits: the id, REJECTED for a draft that was
wrong or an id that may not come, NO_DRAFT behind the drafts that the proposer meant. The kernel is
in accept_drafts_triton.py.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.accept_drafts_triton import accept_kernel
from nanorunner.kernels.state_tables import NUM_REQS, NUM_VERIFIED, QUERY_LEN, StateTables

REJECTED, NO_DRAFT = -1, -2
MAX_QUERY_LEN = 32  # places of a verify group at most
GROUP_TILE = 64  # groups at a time; with 8 warps a thread has 8 of their 64 x 32 places
TILE = 512  # other places at a time


def accept_drafts(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    output_ring: torch.Tensor,
    step_counter: torch.Tensor,
    accepted_rows: torch.Tensor,
    logits_places: torch.Tensor | None = None,
) -> None:
    """Advance the rows of the batch by the ids that they keep, and the step counter by one.

    header [>= 4] int32: the first header[NUM_VERIFIED] places are verify groups, header[QUERY_LEN]
    places each (at most MAX_QUERY_LEN), whose rows have all sampled before; 0: there are none.
    accepted_rows [>= L] int32, an output: at a place's row of logits the row of the state table
    where the id is kept, else -1; -1 too where the batch has nothing, so that count_sampled may
    read all of it. All else is as in advance_state. Every place of a group has a row of logits.
    state has num_drafts and token_limit.
    """
    function = accept_drafts_triton if sampled.is_cuda else accept_drafts_reference
    function(
        header,
        idx_mapping,
        query_start_loc,
        sampled,
        state,
        output_ring,
        step_counter,
        accepted_rows,
        logits_places,
    )


def accept_drafts_reference(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    output_ring: torch.Tensor,
    step_counter: torch.Tensor,
    accepted_rows: torch.Tensor,
    logits_places: torch.Tensor | None = None,
) -> None:
    """accept_drafts in plain PyTorch; on CUDA it waits for the device."""
    num_places = min(int(header[NUM_REQS]), len(query_start_loc) - 1)
    num_verified = min(int(header[NUM_VERIFIED]), num_places)
    query_len = max(int(header[QUERY_LEN]), 1)
    rows = idx_mapping[:num_places].long()
    places = torch.arange(num_places, device=sampled.device)
    if logits_places is not None:
        places = logits_places[:num_places].long()
    loc = query_start_loc[: num_places + 1]
    counts = (loc[1:] - loc[:-1])[num_verified:]
    ring_row = output_ring[int(step_counter[0]) % len(output_ring)]
    ring_row[places[places >= 0]] = REJECTED
    accepted_rows.fill_(-1)

    groups = places[:num_verified].view(-1, query_len)
    _accept_groups_reference(
        rows[:num_verified:query_len], groups, sampled, state, ring_row, accepted_rows
    )
    others = rows[num_verified:], places[num_verified:]
    _advance_others_reference(*others, counts, sampled, state, ring_row, accepted_rows)
    step_counter += 1


def _accept_groups_reference(
    rows: torch.Tensor,
    places: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    ring_row: torch.Tensor,
    accepted_rows: torch.Tensor,
) -> None:
    """Judge the drafts of the groups: rows [n], places [n, q] in `sampled`."""
    assert state.num_drafts is not None, "a table without speculation"
    assert state.token_limit is not None, "a table without speculation"
    row, places = rows[rows >= 0], places[rows >= 0]
    ids = sampled[places]
    base, total = state.num_computed[row], state.total_len[row]
    column = base[:, None] + torch.arange(1, places.shape[1], device=row.device)
    has_room = column < state.token_ids.shape[1]
    drafts = state.token_ids[row[:, None], column.where(has_room, 0)]
    is_match = (ids[:, :-1] == drafts) & has_room
    matched = is_match.int().cumprod(dim=1).sum(dim=1).minimum(state.num_drafts[row])
    new = torch.minimum(matched + 1, state.token_limit[row] - total).clamp(min=0).int()

    index = torch.arange(places.shape[1], device=row.device).expand(places.shape)
    is_kept = index < new[:, None]
    is_meant = index <= state.num_drafts[row][:, None]
    ring_row[places] = torch.where(is_kept, ids, torch.where(is_meant, REJECTED, NO_DRAFT))
    whose = row[:, None].expand(places.shape)[is_kept]
    accepted_rows[places[is_kept]] = whose.to(accepted_rows.dtype)
    column = (total[:, None] + index)[is_kept]
    has_room = column < state.token_ids.shape[1]
    state.token_ids[whose[has_room], column[has_room]] = ids[is_kept][has_room].int()
    is_last = index == new[:, None] - 1
    state.last_sampled[row[new > 0]] = ids[is_last]
    state.total_len[row] += new
    state.num_computed[row] += new


def _advance_others_reference(
    rows: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    ring_row: torch.Tensor,
    accepted_rows: torch.Tensor,
) -> None:
    """Advance rows [n] by counts [n] tokens and one id each, where they sample one."""
    assert state.token_limit is not None, "a table without speculation"
    is_live = rows >= 0
    row, place = rows[is_live], places[is_live]
    computed = state.num_computed[row] + counts[is_live].int()
    is_done = (place >= 0) & (computed >= state.prefill_len[row])
    has_room = state.total_len[row] < state.token_limit[row]
    state.num_computed[row] = computed - (is_done & ~has_room).int()

    row, place = row[is_done & has_room], place[is_done & has_room]
    ids, column = sampled[place], state.total_len[row].long()
    has_room = column < state.token_ids.shape[1]
    state.token_ids[row[has_room], column[has_room]] = ids[has_room].int()
    state.last_sampled[row] = ids
    state.total_len[row] += 1
    ring_row[place] = ids
    accepted_rows[place] = row.to(accepted_rows.dtype)


def accept_drafts_triton(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    output_ring: torch.Tensor,
    step_counter: torch.Tensor,
    accepted_rows: torch.Tensor,
    logits_places: torch.Tensor | None = None,
) -> None:
    """accept_drafts as one launch of one program."""
    max_places = len(query_start_loc) - 1
    accept_kernel[(1,)](
        header,
        idx_mapping,
        query_start_loc,
        sampled,
        idx_mapping if logits_places is None else logits_places,  # not read when None
        state.token_ids,
        state.num_computed,
        state.total_len,
        state.prefill_len,
        state.last_sampled,
        state.num_drafts,
        state.token_limit,
        output_ring,
        step_counter,
        accepted_rows,
        state.token_ids.shape[1],
        state.token_ids.stride(0),
        output_ring.shape[0],
        output_ring.stride(0),
        max_places,
        len(accepted_rows),
        HAS_PLACES=logits_places is not None,
        NUM_REQS=NUM_REQS,
        NUM_VERIFIED=NUM_VERIFIED,
        QUERY_LEN=QUERY_LEN,
        REJECTED=REJECTED,
        NO_DRAFT=NO_DRAFT,
        MAX_QUERY_LEN=MAX_QUERY_LEN,
        GROUP_TILE=GROUP_TILE,
        TILE=TILE,
        num_warps=8,
    )
