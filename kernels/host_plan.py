"""What all layers of one step on a CPU share: angles, slots, masks, and where each KV lies.

On a CPU each small tensor operation costs 5 to 10 us, for the weights that stream through the cache
evict its code. So what does not depend on the layer is computed once a step, and the two cases that
make up most steps get a way of their own: one token a request, and whole prompts.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.attention_batch_invariant import BATCH_INVARIANT


class EvenBlocks(NamedTuple):
    """KV at even distances: request i's tokens are the slots from first + i * distance on."""

    first: int
    distance: int


class DecodePlan(NamedTuple):
    """Where each request's KV lies, when every request has one token; CPU only."""

    longest: int  # tokens of the longest request
    mask: torch.Tensor | None  # [num_reqs, 1, 1, longest] model dtype: 0, or -inf past the end
    even: EvenBlocks | None  # read in place; else slots says what to copy together
    slots: torch.Tensor | None  # [num_reqs * longest] int64; past a request's end, its first slot


class Prompts(NamedTuple):
    """Neighbouring requests of one length whose tokens are all in this step: no KV to look up."""

    start: int  # the first one's first token
    num_prompts: int
    length: int


class HostPlan(NamedTuple):
    """A step's share of the work that does not depend on the layer; CPU only.

    Owner: the step that made it. Lifetime: that step. Nothing writes to it afterwards.
    """

    cos: torch.Tensor  # [num_tokens, 1, 2, head_dim / 2] model dtype, both halves alike
    sin: torch.Tensor  # [num_tokens, 1, 2, head_dim / 2] model dtype, the first half negated
    written: torch.Tensor | None  # the tokens that have a slot; None: all of them
    slots: torch.Tensor  # [num_written] int64
    new_blocks: torch.Tensor | None  # [n] int64, those whose first slot is written; None: no such
    decode: DecodePlan | None  # None: some request has several tokens
    prompts: list[Prompts] | None  # all the step's tokens; None: some request has older tokens


def plan_host(
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    backend: str,
    dtype: torch.dtype,
    block_size: int,
) -> HostPlan:
    """Return the plan of one step; the arguments are those of self_attention.plan_attention()."""
    cos, sin = cos_sin[positions].to(dtype)[:, None, None].chunk(2, dim=-1)
    slots, written = batch.slot_mapping, None
    on_host: list[int] = slots.tolist()  # a loop over them is quicker than two tensor operations
    if min(on_host, default=0) < 0:
        written = (slots >= 0).nonzero().flatten()
        slots = slots[written]
    new_blocks = [slot // block_size for slot in on_host if slot >= 0 and slot % block_size == 0]
    decode = prompts = None
    if backend != BATCH_INVARIANT:  # what several requests compute at once depends on the batch
        decode = _plan_decode(positions.shape[0], batch, dtype, block_size)
        if written is None and decode is None:
            prompts = _plan_prompts(positions.shape[0], batch)
    return HostPlan(
        cos=torch.cat((cos, cos), dim=2),
        sin=torch.cat((-sin, sin), dim=2),
        written=written,
        slots=slots,
        new_blocks=torch.tensor(new_blocks) if new_blocks else None,
        decode=decode,
        prompts=prompts,
    )


def _plan_decode(
    num_tokens: int, batch: AttentionBatch, dtype: torch.dtype, block_size: int
) -> DecodePlan | None:
    """Return where each request's KV lies, or None when this is not a decode of live requests."""
    seq_lens: list[int] = batch.seq_lens.tolist()
    if batch.max_query_len != 1 or len(seq_lens) != num_tokens or min(seq_lens) < 1:
        return None
    longest, mask = max(seq_lens), None
    is_past = None
    if min(seq_lens) < longest:
        is_past = torch.arange(longest) >= batch.seq_lens[:, None]
        mask = torch.zeros(is_past.shape, dtype=dtype).masked_fill_(is_past, -torch.inf)
        mask = mask[:, None, None, :]
    even = _find_even_blocks(seq_lens, batch.block_tables, block_size)
    if even is not None:
        return DecodePlan(longest, mask, even, None)
    position = torch.arange(longest).expand(num_tokens, -1)
    if is_past is not None:
        # Past its end a request reads its first token again, never a slot that nobody wrote:
        # masking scores alone would not do, because 0 * NaN is NaN.
        position = position.masked_fill(is_past, 0)
    block = batch.block_tables.long().gather(1, position // block_size)
    slots = (block * block_size + position % block_size).flatten()
    return DecodePlan(longest, mask, None, slots)


def _plan_prompts(num_tokens: int, batch: AttentionBatch) -> list[Prompts] | None:
    """Return the step's requests when each is a whole prompt, or None."""
    query_lens: list[int] = batch.query_start_loc.diff().tolist()
    if query_lens != batch.seq_lens.tolist() or sum(query_lens) != num_tokens:
        return None
    prompts, start = [], 0
    for length, group in groupby(query_lens):
        count = len(list(group))
        if length > 0:
            prompts.append(Prompts(start, count, length))
        start += count * length
    return prompts


def _find_even_blocks(
    seq_lens: list[int], block_tables: torch.Tensor, block_size: int
) -> EvenBlocks | None:
    """Return where the KV lies when it can be read in place, None when it cannot.

    It can when all requests have equally many blocks, each request's own are neighbours, and the
    requests lie at one distance from each other: what prompts of like length get that came
    together. Then a strided view spares a copy of all KV in every layer. Past a request's end the
    view shows the rest of its last block, which _write_kv cleared.
    """
    num_blocks = -(-seq_lens[0] // block_size)
    if any(-(-seq_len // block_size) != num_blocks for seq_len in seq_lens):
        return None
    tables: list[list[int]] = block_tables[:, :num_blocks].tolist()
    first = tables[0][0]
    distance = tables[1][0] - first if len(tables) > 1 else num_blocks
    if distance < 1:
        return None
    for index, table in enumerate(tables):
        start = first + index * distance
        if table != list(range(start, start + num_blocks)):
            return None
    return EvenBlocks(first * block_size, distance * block_size)
