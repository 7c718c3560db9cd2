"""The tensors that the input and state kernels share: the state table, a step's inputs, its logits.

Only names for tensors that the runner owns; each comment gives shape, type and meaning. R is the
number of rows of the state table. Tables stay at one address, so that CUDA graphs can hold them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Places in a step's header. The last two are there with speculation only: how many places of the
# batch belong to verify groups (0 when every decode is one place), and how many make one group.
NUM_REQS, NUM_TOKENS, NUM_VERIFIED, QUERY_LEN = 0, 1, 2, 3


class StateTables(NamedTuple):
    """One row for each active request.

    Owner: the runner's request states. Place: the device; token_ids may be pinned host memory
    (kernels/uva.py). Lifetime: the runner's, a row from add to remove. Last writers, both on the
    main stream: staged writes when a request comes or grows, advance_state after every step.

    With speculation accept_drafts stands in for advance_state, and two more columns of the same
    owner, place and lifetime exist. num_drafts: the proposer of a step writes it last, and the
    accept_drafts of the next one reads it. token_limit: written when a request comes, never after.
    A row's drafts lie in token_ids from total_len on: ids of the vocabulary, overwritten later.
    """

    token_ids: torch.Tensor  # [R, max_model_len] int32: prompt and output
    num_computed: torch.Tensor  # [R] int32: tokens whose KV is written
    total_len: torch.Tensor  # [R] int32: tokens known
    prefill_len: torch.Tensor  # [R] int32: tokens known when the request came, or came back
    last_sampled: torch.Tensor  # [R] int64: the newest output token
    block_tables: torch.Tensor  # [R, max_blocks] int32
    num_drafts: torch.Tensor | None = None  # [R] int32: drafts that the proposer meant
    token_limit: torch.Tensor | None = None  # [R] int32: most tokens, prompt and output


class InputBuffers(NamedTuple):
    """What the model reads in a step; T tokens and P requests, padding included.

    Owner: the runner. Place: the device, at fixed addresses. Lifetime: the runner's, contents one
    step. Last writer: the input kernels, on the main stream.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [P + 1] int32: request i owns tokens loc[i] to loc[i + 1] - 1
    seq_lens: torch.Tensor  # [P] int32: tokens up to and with this step's last one
    slot_mapping: torch.Tensor  # [T] int64: -1 writes no KV
    block_tables: torch.Tensor  # [P, max_blocks] int32; entries past the length are junk


class LogitsRows(NamedTuple):
    """Which tokens of a mixed batch are sampled from, and for whom; L rows.

    Owner, place, lifetime and last writer are those of InputBuffers.
    """

    indices: torch.Tensor  # [L] int64: the token of the batch whose hidden state makes the logits
    idx_mapping: torch.Tensor  # [L] int32: its row of the state table, -1 for nobody
    positions: torch.Tensor  # [L] int64: where that token stands in its sequence
