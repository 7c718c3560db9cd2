"""Drafts of a draft model, one of each request a launch, into the token table on the device.

    token_ids[row, total_len[row] + index] = id,  num_drafts[row] = index + 1

A model that is run once a draft calls this after every run, with index 0, 1, ... The run after it
reads the draft where prepare_inputs looks for it: at offset index + 1.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.state_tables import NUM_REQS, StateTables
from nanorunner.kernels.triton_support import jit, tl

TILE = 512  # places a program


def write_drafts(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    ids: torch.Tensor,
    index: int,
    state: StateTables,
    offsets: torch.Tensor | None = None,
) -> None:
    """Write ids [P] int64 as draft `index` (0 is the first) of the rows that they belong to.

    header, idx_mapping [>= P] int32: as in prepare_inputs; place i is of row idx_mapping[i] (-1:
    nobody) for i < header[NUM_REQS]. offsets [>= P] int32, or None: only a place whose offset is
    `index` writes, for the others' ids are of other positions. A draft past the row's token_limit
    or the width of its table is not written, and num_drafts does not count it.
    """
    assert state.num_drafts is not None, "a table without speculation"
    assert state.token_limit is not None, "a table without speculation"
    function = write_drafts_triton if ids.is_cuda else write_drafts_reference
    function(header, idx_mapping, ids, index, state, offsets)


def write_drafts_reference(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    ids: torch.Tensor,
    index: int,
    state: StateTables,
    offsets: torch.Tensor | None = None,
) -> None:
    """Compute write_drafts in plain PyTorch; on CUDA it waits for the device."""
    assert state.num_drafts is not None, "a table without speculation"
    assert state.token_limit is not None, "a table without speculation"
    num_places = min(int(header[NUM_REQS]), len(ids))
    rows, ids = idx_mapping[:num_places].long(), ids[:num_places]
    is_written = rows >= 0
    if offsets is not None:
        is_written &= offsets[:num_places] == index
    row, ids = rows[is_written], ids[is_written]
    total = state.total_len[row]
    room = state.token_limit[row].clamp(max=state.token_ids.shape[1]) - total
    state.num_drafts[row] = room.clamp(min=0, max=index + 1)
    has_room = room > index
    state.token_ids[row[has_room], total[has_room].long() + index] = ids[has_room].int()


def write_drafts_triton(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    ids: torch.Tensor,
    index: int,
    state: StateTables,
    offsets: torch.Tensor | None = None,
) -> None:
    """Compute write_drafts in one launch."""
    num_ids = len(ids)
    if num_ids == 0:
        return
    _write_kernel[(-(-num_ids // TILE),)](
        header,
        idx_mapping,
        idx_mapping if offsets is None else offsets,  # not read when None
        ids,
        state.token_ids,
        state.total_len,
        state.token_limit,
        state.num_drafts,
        state.token_ids.shape[1],
        state.token_ids.stride(0),
        num_ids,
        index,
        HAS_OFFSETS=offsets is not None,
        NUM_REQS=NUM_REQS,
        TILE=TILE,
    )


@jit(counts=("num_ids", "index"), tables=("header", "idx_mapping", "offsets", "ids"))
def _write_kernel(
    header: tl.tensor,
    idx_mapping: tl.tensor,
    offsets: tl.tensor,
    ids: tl.tensor,
    token_ids: tl.tensor,
    total_len: tl.tensor,
    token_limit: tl.tensor,
    num_drafts: tl.tensor,
    token_capacity: tl.tensor,
    token_stride: tl.tensor,
    num_ids: tl.tensor,
    index: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    NUM_REQS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (tile): a lane a place."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_real = place < tl.minimum(tl.load(header + NUM_REQS).to(tl.int32), num_ids)
    row = tl.load(idx_mapping + place, mask=is_real, other=-1).to(tl.int64)
    is_written = row >= 0
    if HAS_OFFSETS:
        offset = tl.load(offsets + place, mask=is_written, other=-1)
        is_written = is_written & (offset == index)
    total = tl.load(total_len + row, mask=is_written, other=0)
    limit = tl.load(token_limit + row, mask=is_written, other=0)
    room = tl.minimum(limit, token_capacity) - total
    count = tl.minimum(tl.maximum(room, 0), index + 1)
    tl.store(num_drafts + row, count, mask=is_written)
    new_id = tl.load(ids + place, mask=is_written, other=0).to(tl.int32)
    target = token_ids + row * token_stride + total + index
    tl.store(target, new_id, mask=is_written & (room > index))
