"""After sampling: every request of the batch moves on in the state table, on the device.

    num_computed += its tokens of this step
    finished its prefill?   token_ids[row, total_len] = last_sampled[row] = id, total_len += 1
    output_ring[step_counter % ring, logits place] = id, or -1 where nothing was sampled
    step_counter += 1

The next step's inputs are made from these tables (kernels/prepare_inputs.py), so a step can be
launched before the CPU knows what the one before has sampled. A steady decode leaves
num_computed == total_len - 1: the newest token's KV is written by the step that reads it.

The ring exists because a CUDA graph's outputs are static: without it the next replay would write
over ids that nobody has read yet. The counter lives on the device for the same reason.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.state_tables import NUM_REQS, StateTables
from nanorunner.kernels.triton_support import jit, tl

TILE = 512  # requests at a time; one size for every batch, so that none brings a compilation


def advance_state(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    output_ring: torch.Tensor,
    step_counter: torch.Tensor,
    logits_places: torch.Tensor | None = None,
) -> None:
    """Advance the rows of the batch and the step counter by one step.

    header, idx_mapping, query_start_loc [P + 1]: as in prepare_inputs; at most P requests are
    looked at. sampled [L] int64: the ids. logits_places [>= requests] int32: which of them is
    whose, -1 for none; None: id i is request i's (a decode). output_ring [ring, >= L] int64.
    step_counter [1] int64: how many launches there were; set it to 0 after warm-up and capture.

    A request that has not reached the end of its prefill only computes on: its id, if it has one,
    is not used and its place in the ring gets -1. Nobody (row -1) changes nothing.
    """
    function = advance_state_triton if sampled.is_cuda else advance_state_reference
    function(
        header,
        idx_mapping,
        query_start_loc,
        sampled,
        state,
        output_ring,
        step_counter,
        logits_places,
    )


def advance_state_reference(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    output_ring: torch.Tensor,
    step_counter: torch.Tensor,
    logits_places: torch.Tensor | None = None,
) -> None:
    """advance_state in plain PyTorch; on CUDA it waits for the device."""
    num_reqs = min(int(header[NUM_REQS]), len(query_start_loc) - 1)
    places = torch.arange(num_reqs, device=sampled.device)
    if logits_places is not None:
        places = logits_places[:num_reqs].long()
    rows = idx_mapping[:num_reqs].long()
    loc = query_start_loc[: num_reqs + 1]
    is_live = rows >= 0
    row = rows[is_live]
    state.num_computed[row] += (loc[1:] - loc[:-1])[is_live].int()

    is_done = state.num_computed[rows.clamp(min=0)] >= state.prefill_len[rows.clamp(min=0)]
    is_sampled = is_live & is_done & (places >= 0)
    row, ids = rows[is_sampled], sampled[places[is_sampled]]
    column = state.total_len[row].long()
    is_room = column < state.token_ids.shape[1]
    state.token_ids[row[is_room], column[is_room]] = ids[is_room].int()
    state.last_sampled[row] = ids
    state.total_len[row] += 1

    ring_row = output_ring[int(step_counter[0]) % len(output_ring)]
    ring_row[places[places >= 0]] = -1
    ring_row[places[is_sampled]] = ids
    step_counter += 1


def advance_state_triton(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    state: StateTables,
    output_ring: torch.Tensor,
    step_counter: torch.Tensor,
    logits_places: torch.Tensor | None = None,
) -> None:
    """advance_state as one launch of one program."""
    max_reqs = len(query_start_loc) - 1
    _advance_kernel[(1,)](
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
        output_ring,
        step_counter,
        state.token_ids.shape[1],
        state.token_ids.stride(0),
        output_ring.shape[0],
        output_ring.stride(0),
        max_reqs,
        HAS_PLACES=logits_places is not None,
        NUM_REQS=NUM_REQS,
        TILE=TILE,
        num_warps=8,
    )


@jit(
    counts=("max_reqs",),
    tables=("header", "idx_mapping", "query_start_loc", "sampled", "logits_places"),
)
def _advance_kernel(
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
    output_ring: tl.tensor,
    step_counter: tl.tensor,
    token_capacity: tl.tensor,
    token_stride: tl.tensor,
    ring_size: tl.tensor,
    ring_stride: tl.tensor,
    max_reqs: tl.tensor,
    HAS_PLACES: tl.constexpr,
    NUM_REQS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A lane a request. One program, so that the counter has one reader and one writer."""
    num_reqs = tl.minimum(tl.load(header + NUM_REQS).to(tl.int32), max_reqs)
    step = tl.load(step_counter)
    ring_row = output_ring + step % ring_size * ring_stride
    for first in range(0, num_reqs, TILE):
        request = first + tl.arange(0, TILE)
        is_real = request < num_reqs
        row = tl.load(idx_mapping + request, mask=is_real, other=-1).to(tl.int64)
        is_live = row >= 0
        begin = tl.load(query_start_loc + request, mask=is_live, other=0)
        end = tl.load(query_start_loc + request + 1, mask=is_live, other=0)
        computed = tl.load(num_computed + row, mask=is_live, other=0) + (end - begin)
        tl.store(num_computed + row, computed, mask=is_live)

        place = request.to(tl.int64)
        if HAS_PLACES:
            place = tl.load(logits_places + request, mask=is_real, other=-1).to(tl.int64)
        has_place = is_real & (place >= 0)
        prompt_end = tl.load(prefill_len + row, mask=is_live, other=0)
        is_sampled = is_live & has_place & (computed >= prompt_end)
        new_id = tl.load(sampled + place, mask=is_sampled, other=-1)
        tl.store(ring_row + place, new_id, mask=has_place)
        tl.store(last_sampled + row, new_id, mask=is_sampled)
        length = tl.load(total_len + row, mask=is_sampled, other=0)
        tl.store(total_len + row, length + 1, mask=is_sampled)
        # A row is full at the model's length; the id after it must not land in the next row.
        has_room = is_sampled & (length < token_capacity)
        tl.store(token_ids + row * token_stride + length, new_id.to(tl.int32), mask=has_room)
    # Every warp has its own copy of `step`: none may read the counter after it has moved.
    tl.debug_barrier()
    tl.store(step_counter, step + 1)
