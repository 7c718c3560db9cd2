"""The inputs of a step, made on the device from the state table: the CPU never knows their values.

The CPU sends who is in the batch; how far each request has come, and which token it sampled last,
stands in device tables that the step before has advanced (kernels/advance_state.py).

    header        [>= 2] int32: requests and tokens in this step (state_tables.py has the places)
    idx_mapping   [>= requests] int32: place in the batch -> row of the state table, -1 for nobody

    row -> position = num_computed[row] + 0, 1, ...
           token    = token_ids[row, position] inside the prefill, else last_sampled[row]
           slot     = block_tables[row, position // block_size] * block_size + position % block_size

With speculation a request of q tokens to verify is q places of one token, each with an offset:

    offsets       [>= requests] int32, added to num_computed

    row a, a, a, b, b, b    offset 0, 1, 2, 0, 1, 2
    token = last_sampled[row] where the offset is 0 and the prefill is over, else
            token_ids[row, position]: the drafts lie there, from total_len on

A place before a row's first token, or from token_limit[row] on, is nobody: token and position 0,
seq_len 0, slot -1. Its true position may lie past the rotary table and the block table, so no
reader may be handed it. Only its row stays (the sampler looks settings up by it).

A CUDA graph pads the batch, so the buffers may be longer than it is. What lies behind the batch is
written too: query length 0, seq_len 0, slot -1, table row zero, token and position 0 (a rotary
embedding reads the position of a padded token). The counts are read from `header` on the device:
a captured launch serves every batch that fits. The kernels are in prepare_inputs_triton.py.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.prepare_inputs_triton import decode_inputs_kernel, mixed_inputs_kernel
from nanorunner.kernels.state_tables import (
    NUM_REQS,
    NUM_TOKENS,
    InputBuffers,
    LogitsRows,
    StateTables,
)
from nanorunner.kernels.triton_support import next_power_of_two

TOKEN_TILE = 512  # tokens of one request a program
TABLE_TILE = 1024  # block ids moved at once, at most


def prepare_decode_inputs(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """Fill all of `out` for one token a request; its T and P are the bucket, both the same.

    Request i is row idx_mapping[i] for i < header[NUM_REQS], padding from there on. Nobody (-1)
    keeps query length 1, with token 0, seq_len 0 and slot -1. offsets: see above; they need
    state.token_limit, of which no row's is above the width of the token table. None: all 0.
    """
    assert 0 < len(out.input_ids) == len(out.seq_lens), "a decode has one token a request"
    assert len(idx_mapping) >= len(out.seq_lens), "idx_mapping is shorter than the bucket"
    assert offsets is None or state.token_limit is not None, "offsets without token limits"
    is_cuda = out.input_ids.is_cuda
    function = prepare_decode_inputs_triton if is_cuda else prepare_decode_inputs_reference
    function(header, idx_mapping, state, out, block_size, offsets)


def prepare_decode_inputs_reference(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """prepare_decode_inputs in plain PyTorch, on any device."""
    bucket = len(out.input_ids)
    place = torch.arange(bucket + 1, device=header.device)
    torch.minimum(place, header[NUM_REQS], out=place)
    out.query_start_loc.copy_(place)
    is_real = place[1:] > place[:-1]
    rows = torch.where(is_real, idx_mapping[:bucket], -1).long()
    past, limits = torch.zeros_like(rows), None
    if offsets is not None:
        past, limits = offsets[:bucket].where(is_real, 0), state.token_limit
    _fill_tokens(rows, past, limits, state, out, block_size)
    _fill_requests(rows, past, is_real.int(), limits, state, out, block_size)


def prepare_decode_inputs_triton(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """prepare_decode_inputs as one launch, a program a request of the bucket."""
    bucket = len(out.input_ids)
    max_blocks = state.block_tables.shape[1]
    decode_inputs_kernel[(bucket,)](
        header,
        idx_mapping,
        idx_mapping if offsets is None else offsets,  # not read when None
        state.token_ids,
        state.num_computed,
        state.prefill_len,
        state.prefill_len if state.token_limit is None else state.token_limit,
        state.last_sampled,
        state.block_tables,
        out.input_ids,
        out.positions,
        out.query_start_loc,
        out.seq_lens,
        out.slot_mapping,
        out.block_tables,
        state.token_ids.stride(0),
        state.block_tables.stride(0),
        out.block_tables.stride(0),
        max_blocks,
        HAS_OFFSETS=offsets is not None,
        BLOCK_SIZE=block_size,
        TABLE_TILE=min(next_power_of_two(max_blocks), TABLE_TILE),
        NUM_REQS=NUM_REQS,
        num_warps=1,
    )


def prepare_mixed_inputs(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    logits_places: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    logits: LogitsRows,
    max_query_len: int,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """Fill `out` and `logits` for requests with any number of tokens each.

    out.query_start_loc is an input: [P + 1], ascending, header[NUM_TOKENS] from the last request
    on. logits_places [>= requests] int32: the row of `logits` that samples for a request, -1 for
    none (a chunk that does not finish the prompt); it fills that row with the request's last token.
    max_query_len: no request of the batch has more tokens. offsets: as in prepare_decode_inputs;
    a request's tokens begin that far past num_computed.
    """
    assert offsets is None or state.token_limit is not None, "offsets without token limits"
    is_cuda = out.input_ids.is_cuda
    function = prepare_mixed_inputs_triton if is_cuda else prepare_mixed_inputs_reference
    arguments = (header, idx_mapping, logits_places, state, out, logits)
    function(*arguments, max_query_len, block_size, offsets)


def prepare_mixed_inputs_reference(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    logits_places: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    logits: LogitsRows,
    max_query_len: int,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """prepare_mixed_inputs in plain PyTorch; max_query_len is not needed here."""
    num_reqs, num_tokens = int(header[NUM_REQS]), int(header[NUM_TOKENS])
    bucket, width = len(out.seq_lens), len(out.input_ids)
    request = torch.arange(bucket, device=header.device)
    rows = torch.full((bucket,), -1, dtype=torch.int64, device=header.device)
    rows[:num_reqs] = idx_mapping[:num_reqs].long()
    begins = out.query_start_loc[: bucket + 1].long()
    lengths = (begins[1:] - begins[:-1]).where(request < num_reqs, 0)

    owner = request.repeat_interleave(lengths)
    first, limits = torch.zeros_like(rows), None
    if offsets is not None:
        first[:num_reqs], limits = offsets[:num_reqs].long(), state.token_limit
    token_rows = torch.full((width,), -1, dtype=torch.int64, device=header.device)
    token_rows[:num_tokens] = rows[owner]
    past = torch.zeros_like(token_rows)
    past[:num_tokens] = torch.arange(num_tokens, device=header.device) - begins[owner]
    past[:num_tokens] += first[owner]
    _fill_tokens(token_rows, past, limits, state, out, block_size)
    _fill_requests(rows, first, lengths, limits, state, out, block_size)

    places = logits_places[:num_reqs].long()
    sampled = (places >= 0).nonzero()[:, 0]
    last = begins[sampled + 1] - 1
    logits.indices[places[sampled]] = last
    logits.idx_mapping[places[sampled]] = rows[sampled].to(logits.idx_mapping.dtype)
    logits.positions[places[sampled]] = out.positions[last]


def _fill_tokens(
    rows: torch.Tensor,
    past: torch.Tensor,
    limits: torch.Tensor | None,
    state: StateTables,
    out: InputBuffers,
    block_size: int,
) -> None:
    """Fill the inputs of each token: of row rows[t] (-1: nobody), past[t] behind num_computed.

    limits [R]: the token limits where there are offsets, else None.
    """
    is_live = rows >= 0
    row = rows.clamp(min=0)
    position = state.num_computed[row] + past
    if limits is not None:
        is_live &= (position >= 0) & (position < limits[row])
    position = position.where(is_live, 0)
    is_prompt = position < state.prefill_len[row]
    if limits is not None:
        is_prompt |= past != 0
    prompt = state.token_ids[row, position.clamp(max=state.token_ids.shape[1] - 1)].long()
    out.input_ids.copy_(prompt.where(is_prompt, state.last_sampled[row]).where(is_live, 0))
    out.positions.copy_(position)
    column = position // block_size
    has_slot = is_live & (column < state.block_tables.shape[1])
    block = state.block_tables[row, column.where(has_slot, 0)].long()
    out.slot_mapping.copy_((block * block_size + position % block_size).where(has_slot, -1))


def _fill_requests(
    rows: torch.Tensor,
    past: torch.Tensor,
    query_lens: torch.Tensor,
    limits: torch.Tensor | None,
    state: StateTables,
    out: InputBuffers,
    block_size: int,
) -> None:
    """Fill each request's length and table row.

    Request i has query_lens[i] tokens of row rows[i]; they begin past[i] behind num_computed.
    """
    is_live = rows >= 0
    row = rows.clamp(min=0)
    begin = state.num_computed[row] + past
    if limits is not None:
        is_live &= (begin >= 0) & (begin < limits[row])
    seq_lens = (begin + query_lens).where(is_live, 0)
    out.seq_lens.copy_(seq_lens)
    column = torch.arange(state.block_tables.shape[1], device=rows.device)
    is_used = column < -(-seq_lens[:, None] // block_size)
    stale = out.block_tables.where(seq_lens[:, None] > 0, 0)
    out.block_tables.copy_(state.block_tables[row].where(is_used, stale))


def prepare_mixed_inputs_triton(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    logits_places: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    logits: LogitsRows,
    max_query_len: int,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """prepare_mixed_inputs as one launch: (request, token tile), and one row for the padding."""
    max_blocks = state.block_tables.shape[1]
    num_tiles = max(-(-max_query_len // TOKEN_TILE), 1)
    mixed_inputs_kernel[(len(out.seq_lens) + 1, num_tiles)](
        header,
        idx_mapping,
        idx_mapping if offsets is None else offsets,  # not read when None
        logits_places,
        state.token_ids,
        state.num_computed,
        state.prefill_len,
        state.prefill_len if state.token_limit is None else state.token_limit,
        state.last_sampled,
        state.block_tables,
        out.input_ids,
        out.positions,
        out.query_start_loc,
        out.seq_lens,
        out.slot_mapping,
        out.block_tables,
        logits.indices,
        logits.idx_mapping,
        logits.positions,
        state.token_ids.stride(0),
        state.block_tables.stride(0),
        out.block_tables.stride(0),
        max_blocks,
        len(out.input_ids),
        HAS_OFFSETS=offsets is not None,
        BLOCK_SIZE=block_size,
        TOKEN_TILE=TOKEN_TILE,
        TABLE_TILE=min(next_power_of_two(max_blocks), TABLE_TILE),
        NUM_REQS=NUM_REQS,
        NUM_TOKENS=NUM_TOKENS,
    )
