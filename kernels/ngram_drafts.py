"""Drafts without a model: what followed the last time that a request's newest tokens occurred.

    tokens   ... b c d e f ... a b c       the longest suffix, of max_n to min_n tokens, that has
                 ~~~ ^                ~~~       occurred before; its latest occurrence ends at `end`
    drafts   d e f ...                     the tokens from `end` on

Prompt lookup decoding (Saxena, 2023). It pays where the output repeats what is known already: code
that is edited, text that is quoted, periods. Drafts may read on past the last token into drafts
themselves, so a text of period p is continued with period p, however many drafts there are:

    draft i = token_ids[row, end + i % (total_len - end)]

Cost: a program a row reads its tokens backwards, TILE ends of an occurrence at a time, and stops at
the first tile with an occurrence of max_n tokens. At worst, where there is none, a row of n tokens
takes n / TILE steps, one behind the other: 16 for 131,072 tokens. A step reads 4 bytes an end, and
more only where the newest token occurs.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.state_tables import NUM_REQS, StateTables
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

TILE = 8192  # ends of an occurrence at a time


def ngram_drafts(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    max_drafts: int,
    min_n: int = 1,
    max_n: int = 3,
    offsets: torch.Tensor | None = None,
) -> None:
    """Write up to max_drafts drafts for each row of the batch, and in num_drafts how many they are.

    header, idx_mapping [P] int32: as in prepare_inputs; place i is of row idx_mapping[i] (-1:
    nobody) for i < header[NUM_REQS]. offsets [>= P] int32, or None: only places with offset 0
    count, so that a row's places search once. Rows that are still inside their prefill are left
    alone. To be called after the step's ids are in the table (accept_drafts).

    Drafts end at the row's token_limit and the table's width. A row whose newest tokens are new, or
    that has no room, gets num_drafts 0, and what lies behind its tokens stays.
    """
    assert 1 <= min_n <= max_n, "the shortest suffix has a token, the longest is no shorter"
    assert max_drafts >= 1, "no drafts are asked for"
    assert state.num_drafts is not None, "a table without speculation"
    assert state.token_limit is not None, "a table without speculation"
    function = ngram_drafts_triton if idx_mapping.is_cuda else ngram_drafts_reference
    function(header, idx_mapping, state, max_drafts, min_n, max_n, offsets)


def ngram_drafts_reference(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    max_drafts: int,
    min_n: int = 1,
    max_n: int = 3,
    offsets: torch.Tensor | None = None,
) -> None:
    """Compute ngram_drafts in plain PyTorch, a row at a time; on CUDA it waits for the device."""
    assert state.num_drafts is not None, "a table without speculation"
    assert state.token_limit is not None, "a table without speculation"
    num_places = min(int(header[NUM_REQS]), len(idx_mapping))
    rows = idx_mapping[:num_places].long()
    if offsets is not None:
        rows = rows[offsets[:num_places] == 0]
    rows = rows[rows >= 0]
    rows = rows[state.num_computed[rows] >= state.prefill_len[rows]]
    room = state.token_limit[rows].clamp(max=state.token_ids.shape[1]) - state.total_len[rows]
    for row, most in zip(rows.tolist(), room.clamp(max=max_drafts).tolist(), strict=True):
        total = int(state.total_len[row])
        end = _latest_end_reference(state.token_ids[row, :total], min_n, max_n) if most > 0 else 0
        count = most if end > 0 else 0
        if count > 0:
            source = end + torch.arange(count, device=rows.device) % (total - end)
            state.token_ids[row, total : total + count] = state.token_ids[row, source]
        state.num_drafts[row] = count


def _latest_end_reference(tokens: torch.Tensor, min_n: int, max_n: int) -> int:
    """Return the end of the longest suffix's latest earlier occurrence in tokens, 0 for none."""
    num_ends = len(tokens) - 1  # an occurrence that ends at the last token is the suffix itself
    if num_ends < 1:
        return 0
    is_same = torch.ones(num_ends, dtype=torch.bool, device=tokens.device)
    length = torch.zeros(num_ends, dtype=torch.int32, device=tokens.device)
    for back in range(min(max_n, num_ends)):
        is_same[:back] = False
        is_same[back:] &= tokens[: num_ends - back] == tokens[num_ends - back]
        length += is_same
    longest = int(length.max())
    if longest < min_n:
        return 0
    return int((length == longest).nonzero()[-1]) + 1


def ngram_drafts_triton(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    max_drafts: int,
    min_n: int = 1,
    max_n: int = 3,
    offsets: torch.Tensor | None = None,
) -> None:
    """Compute ngram_drafts in one launch, a program a place."""
    if len(idx_mapping) == 0:
        return
    _ngram_kernel[(len(idx_mapping),)](
        header,
        idx_mapping,
        idx_mapping if offsets is None else offsets,  # not read when None
        state.token_ids,
        state.num_computed,
        state.total_len,
        state.prefill_len,
        state.token_limit,
        state.num_drafts,
        state.token_ids.shape[1],
        state.token_ids.stride(0),
        HAS_OFFSETS=offsets is not None,
        NUM_REQS=NUM_REQS,
        MAX_DRAFTS=max_drafts,
        DRAFT_LANES=next_power_of_two(max_drafts),
        MIN_N=min_n,
        MAX_N=max_n,
        TILE=TILE,
        num_warps=16,
    )


@jit(tables=("header", "idx_mapping", "offsets"))
def _ngram_kernel(
    header: tl.tensor,
    idx_mapping: tl.tensor,
    offsets: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    total_len: tl.tensor,
    prefill_len: tl.tensor,
    token_limit: tl.tensor,
    num_drafts: tl.tensor,
    token_capacity: tl.tensor,
    token_stride: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    NUM_REQS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    DRAFT_LANES: tl.constexpr,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (place): search the row's tokens from their end, a lane an end of an occurrence."""
    place = tl.program_id(0)
    is_real = place < tl.load(header + NUM_REQS).to(tl.int32)
    row = tl.load(idx_mapping + place, mask=is_real, other=-1).to(tl.int64)
    is_mine = row >= 0
    if HAS_OFFSETS:
        is_mine = is_mine & (tl.load(offsets + place, mask=is_mine, other=-1) == 0)
    computed = tl.load(num_computed + row, mask=is_mine, other=-1)
    is_mine = is_mine & (computed >= tl.load(prefill_len + row, mask=is_mine, other=0))
    if is_mine:
        total = tl.load(total_len + row)
        room = tl.minimum(tl.load(token_limit + row), token_capacity) - total
        count = tl.maximum(tl.minimum(room, MAX_DRAFTS), 0)
        tokens = token_ids + row * token_stride
        lane = tl.arange(0, TILE)
        longest = 0
        latest = 0
        first = total - TILE  # of this tile's ends; from 1 to total - 1 they are real
        while (first + TILE > 1) & (longest < MAX_N) & (count > 0):
            end = first + lane
            is_same = end > 0
            length = tl.zeros((TILE,), tl.int32)
            for back in tl.static_range(MAX_N):
                wanted = tl.load(tokens + total - 1 - back, mask=back < total, other=-1)
                is_same = is_same & (end > back)  # it begins at a token
                seen = tl.load(tokens + end - 1 - back, mask=is_same, other=-2)
                is_same = is_same & (seen == wanted)
                length += is_same.to(tl.int32)
            # The largest is the longest, and among equals the latest.
            best = tl.max(length * TILE + lane, axis=0)
            is_longer = (best // TILE > longest) & (best // TILE >= MIN_N)
            latest = tl.where(is_longer, first + best % TILE, latest)
            longest = tl.where(is_longer, best // TILE, longest)
            first -= TILE
        count = tl.where(longest > 0, count, 0)
        draft = tl.arange(0, DRAFT_LANES)
        source = latest + draft % (total - latest)
        ids = tl.load(tokens + source, mask=draft < count, other=0)
        tl.store(tokens + total + draft, ids, mask=draft < count)
        tl.store(num_drafts + row, count)
