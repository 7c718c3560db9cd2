"""Exercise slot-mapping: the inputs of a decode step, out of state rows and block tables.

    place in the batch -> idx_mapping -> row of the state table
    position = num_computed[row]
    token    = token_ids[row, position] inside the prompt, else last_sampled[row]
    slot     = physical block * block_size + offset

    nanorunner check slot-mapping my_slot_mapping.py

All but the slots is there. A place that is padding or nobody's (row -1) gets slot -1, so that no K
or V is written for it; so does a position past the row's block table.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.state_tables import NUM_REQS, InputBuffers, StateTables


def prepare_decode_inputs(
    header: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: StateTables,
    out: InputBuffers,
    block_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """Fill all of `out` for one token a request; kernels/state_tables.py has the shapes.

    Request i is row idx_mapping[i] for i < header[NUM_REQS], padding from there on. offsets belong
    to speculative decoding and are None here.
    """
    bucket = len(out.input_ids)
    place = torch.arange(bucket + 1).minimum(header[NUM_REQS])
    out.query_start_loc.copy_(place)
    is_real = place[1:] > place[:-1]
    rows = torch.where(is_real, idx_mapping[:bucket], -1).long()
    is_live, row = rows >= 0, rows.clamp(min=0)

    position = state.num_computed[row].long().where(is_live, 0)
    column = position.clamp(max=state.token_ids.shape[1] - 1)
    prompt = state.token_ids[row, column].long()
    is_prompt = position < state.prefill_len[row]
    out.input_ids.copy_(prompt.where(is_prompt, state.last_sampled[row]).where(is_live, 0))
    out.positions.copy_(position)
    out.seq_lens.copy_((position + 1).where(is_live, 0))
    out.block_tables.copy_(state.block_tables[row])

    # Here: out.slot_mapping [bucket], from state.block_tables[row, ...], position and block_size.
    raise NotImplementedError("prepare_decode_inputs: where do K and V of these tokens go?")
