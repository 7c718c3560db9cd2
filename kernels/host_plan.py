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


class KVCopy(NamedTuple):
    """Where a layer copies the KV of all requests together. The next layer writes over it."""

    slots: torch.Tensor  # [num_reqs * longest] int64; past a request's end, its first slot
    k: torch.Tensor  # [num_reqs * longest, num_kv_heads * head_dim] model dtype
    v: torch.Tensor
    k_by_head: torch.Tensor  # the same memory as [num_reqs, num_kv_heads, longest, head_dim]
    v_by_head: torch.Tensor


class DecodePlan(NamedTuple):
    """Where each request's KV lies, when every request has one token; CPU only.

    One request is read in place where its blocks are neighbours. Several are copied together first,
    even where a strided view would show them all: eight of 1,000 tokens take 43 ms a step when
    copied and 52 ms in place (SmolLM2 in bfloat16, EPYC), and of 100 tokens the two are equal.
    """

    longest: int  # tokens of the longest request
    mask: torch.Tensor | None  # [num_reqs, 1, 1, longest] model dtype: 0, or -inf past the end
    first_slot: int  # of a request that is read in place
    copy: KVCopy | None  # None: read in place


class Prompts(NamedTuple):
    """Neighbouring requests of one length whose tokens are all in this step: no KV to look up."""

    start: int  # the first one's first token
    num_prompts: int
    length: int


class HostPlan(NamedTuple):
    """A step's share of the work that does not depend on the layer; CPU only.

    Owner: the step that made it. Lifetime: that step. Nothing writes to it afterwards, but for the
    copy of a layer's KV (KVCopy).
    """

    cos: torch.Tensor  # [num_tokens, 1, 2, head_dim / 2] model dtype, both halves alike
    sin: torch.Tensor  # [num_tokens, 1, 2, head_dim / 2] model dtype, the first half negated
    written: torch.Tensor | None  # the tokens that have a slot; None: all of them
    slots: torch.Tensor  # [num_written] int64
    decode: DecodePlan | None  # None: some request has several tokens
    prompts: list[Prompts] | None  # all the step's tokens; None: some request has older tokens


def plan_host(
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    backend: str,
    k_cache: torch.Tensor,
) -> HostPlan:
    """Return the plan of one step; the arguments are those of self_attention.plan_attention()."""
    cos, sin = cos_sin[positions].to(k_cache.dtype)[:, None, None].chunk(2, dim=-1)
    slots, written = batch.slot_mapping, None
    on_host: list[int] = slots.tolist()  # min() of them is quicker than two tensor operations
    if min(on_host, default=0) < 0:
        written = (slots >= 0).nonzero().flatten()
        slots = slots[written]
    decode = prompts = None
    if backend != BATCH_INVARIANT:  # what several requests compute at once depends on the batch
        decode = _plan_decode(positions.shape[0], batch, k_cache)
        if written is None and decode is None:
            prompts = _plan_prompts(positions.shape[0], batch)
    return HostPlan(
        cos=torch.cat((cos, cos), dim=2),
        sin=torch.cat((-sin, sin), dim=2),
        written=written,
        slots=slots,
        decode=decode,
        prompts=prompts,
    )


def _plan_decode(
    num_tokens: int, batch: AttentionBatch, k_cache: torch.Tensor
) -> DecodePlan | None:
    """Return where each request's KV lies, or None when this is not a decode of live requests."""
    seq_lens: list[int] = batch.seq_lens.tolist()
    if batch.max_query_len != 1 or len(seq_lens) != num_tokens or min(seq_lens) < 1:
        return None
    longest, mask, block_size = max(seq_lens), None, k_cache.shape[1]
    first_slot = _first_slot(seq_lens, batch.block_tables, block_size)
    if first_slot is not None:
        return DecodePlan(longest, None, first_slot, None)
    position = torch.arange(longest).expand(num_tokens, -1)
    if min(seq_lens) < longest:
        is_past = position >= batch.seq_lens[:, None]
        mask = torch.zeros(is_past.shape, dtype=k_cache.dtype).masked_fill_(is_past, -torch.inf)
        mask = mask[:, None, None, :]
        # Past its end a request reads its first token again, never a slot that nobody wrote:
        # masking scores alone would not do, because 0 * NaN is NaN.
        position = position.masked_fill(is_past, 0)
    block = batch.block_tables.long().gather(1, position // block_size)
    slots = (block * block_size + position % block_size).flatten()
    num_kv_heads, head_dim = k_cache.shape[2:]
    kv = k_cache.new_empty(2, len(slots), num_kv_heads * head_dim)
    by_head = kv.view(2, num_tokens, longest, num_kv_heads, head_dim).transpose(2, 3)
    return DecodePlan(longest, mask, 0, KVCopy(slots, *kv.unbind(), *by_head.unbind()))


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


def _first_slot(seq_lens: list[int], block_tables: torch.Tensor, block_size: int) -> int | None:
    """Return where an only request's KV begins when its blocks are neighbours, else None."""
    if len(seq_lens) > 1:
        return None
    blocks: list[int] = block_tables[0, : -(-seq_lens[0] // block_size)].tolist()
    is_row = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    return blocks[0] * block_size if is_row else None
