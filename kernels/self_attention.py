"""A layer between its qkv and its o projection: norm and rotate q and k, write KV, attend.

    plan = plan_attention(...)                    once a step: what is the same for every layer
    self_attention(qkv, plan, k_cache, v_cache)   once a layer

On a GPU the plan is nothing and a layer is two launches. On a CPU each small tensor operation costs
5 to 10 us, for the weights that stream through the cache evict its code, and the two references
make about 60 a layer. The plan looks up angles, slots and masks once a step: a batch-8 decode of
SmolLM2 in bfloat16 spends 0.35 ms a layer here instead of 0.62 ms (one core of a busy Xeon).

kernels/rope_kv_write.py and kernels/attention.py define the result; here is only a shorter way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write


class HeadShape(NamedTuple):
    """How one rank's qkv rows divide: [q heads | k heads | v heads]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class DecodePlan(NamedTuple):
    """Where each request's KV lies, when every request has one token; CPU only."""

    run: slice | None  # one request in neighbouring blocks: its slots, read in place
    slots: torch.Tensor  # [num_reqs * longest] int64; past a request's end, its first slot again
    mask: torch.Tensor | None  # [num_reqs, 1, 1, longest] model dtype: 0, or -inf past the end


class HostPlan(NamedTuple):
    """A step's share of the work that does not depend on the layer; CPU only.

    Owner: the step that made it. Lifetime: that step. Nothing writes to it afterwards.
    """

    cos: torch.Tensor  # [num_tokens, 1, head_dim] float32, both halves alike
    sin: torch.Tensor  # [num_tokens, 1, head_dim] float32, the first half negated
    written: torch.Tensor | None  # the tokens that have a slot; None: all of them
    slots: torch.Tensor  # [num_written] int64
    decode: DecodePlan | None  # None: some request has several tokens


class AttentionPlan(NamedTuple):
    """One step's tokens as every layer takes them."""

    positions: torch.Tensor  # [num_tokens] int64
    cos_sin: torch.Tensor  # [max_len, head_dim] float32
    batch: AttentionBatch
    backend: str
    host: HostPlan | None  # None on a GPU


def plan_attention(
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    backend: str,
    dtype: torch.dtype,
    block_size: int,
) -> AttentionPlan:
    """Return what every layer of this step shares; no operation at all on a GPU."""
    host = None
    if not positions.is_cuda:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        slots, written = batch.slot_mapping, None
        if bool((slots < 0).any()):
            written = (slots >= 0).nonzero().flatten()
            slots = slots[written]
        host = HostPlan(
            cos=torch.cat((cos, cos), dim=-1),
            sin=torch.cat((-sin, sin), dim=-1),
            written=written,
            slots=slots,
            decode=_plan_decode(positions.shape[0], batch, dtype, block_size),
        )
    return AttentionPlan(positions, cos_sin, batch, backend, host)


def self_attention(
    qkv: torch.Tensor,
    plan: AttentionPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: HeadShape,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return attention's output [num_tokens, num_heads * head_dim]; overwrites qkv's q and k.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; k_cache and v_cache
    [blocks, block_size, num_kv_heads, head_dim] get the step's K and V first.
    """
    num_tokens, scale = qkv.shape[0], shape.head_dim**-0.5
    if plan.host is None:
        qk_norm_rope_kv_write(
            qkv, plan.positions, plan.cos_sin, plan.batch.slot_mapping, k_cache, v_cache,
            *shape, q_norm, k_norm, eps,
        )  # fmt: skip
    else:
        _rotate_and_write(qkv, plan.host, k_cache, v_cache, shape, q_norm, k_norm, eps)
        if plan.host.decode is not None:
            return _decode(qkv, plan.host.decode, k_cache, v_cache, shape, scale)
    q = qkv[:, : shape.num_heads * shape.head_dim].view(num_tokens, *shape[::2])
    out = paged_attention(q, k_cache, v_cache, plan.batch, scale, plan.backend)
    return out.view(num_tokens, -1)


def _plan_decode(
    num_tokens: int, batch: AttentionBatch, dtype: torch.dtype, block_size: int
) -> DecodePlan | None:
    """Return where each request's KV lies, or None when this is not a decode of live requests."""
    seq_lens: list[int] = batch.seq_lens.tolist()
    if batch.max_query_len != 1 or len(seq_lens) != num_tokens or min(seq_lens) < 1:
        return None
    longest = max(seq_lens)
    if num_tokens == 1:
        blocks: list[int] = batch.block_tables[0, : -(-longest // block_size)].tolist()
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            start = blocks[0] * block_size
            return DecodePlan(slice(start, start + longest), batch.slot_mapping, None)
    lengths = batch.seq_lens[:, None]
    position = torch.arange(longest)
    is_past = position >= lengths
    # Past its end a request reads its first token again, never a slot that nobody wrote: masking
    # scores alone would not do, because 0 * NaN is NaN.
    position = position.masked_fill(is_past, 0)
    block = batch.block_tables.long().gather(1, position // block_size)
    slots = (block * block_size + position % block_size).flatten()
    mask = torch.zeros(is_past.shape, dtype=dtype).masked_fill_(is_past, -torch.inf)
    is_ragged = min(seq_lens) < longest
    return DecodePlan(None, slots, mask[:, None, None, :] if is_ragged else None)


def _rotate_and_write(
    qkv: torch.Tensor,
    host: HostPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: HeadShape,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Norm and rotate q and k in place, and copy k and v to their slots."""
    num_tokens = qkv.shape[0]
    num_heads, num_kv_heads, dim = shape
    kv_size = num_kv_heads * dim
    qk = qkv[:, :-kv_size].view(num_tokens, num_heads + num_kv_heads, dim)
    wide = qk.float()  # qk itself when the model is float32
    if q_norm is not None and k_norm is not None:
        gain = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
        wide = F.rms_norm(wide, (dim,), None, eps).mul_(gain)
    # Element i turns with element i + D/2: the halves swapped, and the minus is in host.sin.
    swapped = wide.view(num_tokens, -1, 2, dim // 2).flip(2).view(wide.shape)
    wide.mul_(host.cos).addcmul_(swapped, host.sin)
    if wide is not qk:
        qk.copy_(wide)

    k = qk[:, num_heads:]
    v = qkv[:, -kv_size:].view(num_tokens, num_kv_heads, dim)
    if host.written is not None:
        k, v = k[host.written], v[host.written]
    # view, not reshape: a copy would lose the write.
    k_cache.view(-1, num_kv_heads, dim).index_copy_(0, host.slots, k)
    v_cache.view(-1, num_kv_heads, dim).index_copy_(0, host.slots, v)


def _decode(
    qkv: torch.Tensor,
    decode: DecodePlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: HeadShape,
    scale: float,
) -> torch.Tensor:
    """Return [num_reqs, num_heads * head_dim]: each request's token attends to all its KV.

    A KV head's group of query heads stands where query tokens would: one token sees everything.
    """
    num_reqs, (num_heads, num_kv_heads, dim) = qkv.shape[0], shape
    k, v = k_cache.view(-1, num_kv_heads * dim), v_cache.view(-1, num_kv_heads * dim)
    if decode.run is None:
        k, v = k.index_select(0, decode.slots), v.index_select(0, decode.slots)
    else:
        k, v = k[decode.run], v[decode.run]
    q_size = num_heads * dim
    out = F.scaled_dot_product_attention(
        qkv[:, :q_size].view(num_reqs, num_kv_heads, -1, dim),
        k.view(num_reqs, -1, num_kv_heads, dim).transpose(1, 2),
        v.view(num_reqs, -1, num_kv_heads, dim).transpose(1, 2),
        attn_mask=decode.mask,
        scale=scale,
    )
    return out.reshape(num_reqs, q_size)
