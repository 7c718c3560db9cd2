"""A layer between its qkv and its o projection: norm and rotate q and k, write KV, attend.

    plan = plan_attention(...)                    once a step: what is the same for every layer
    self_attention(qkv, plan, k_cache, v_cache)   once a layer

On a GPU the plan is nothing. A layer is two steps, or one (fused_decode.py) for a decode that does
not fill the device. On a CPU the two references make about 60 tensor operations a layer; with
a host plan (host_plan.py) a decode makes about 20.

kernels/rope_kv_write.py and kernels/attention.py define the result; here is only a shorter way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import is_full
from nanorunner.kernels.fused_decode import fused_decode, plan_fused
from nanorunner.kernels.host_plan import DecodePlan, HostPlan, Prompts, plan_host
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write
from nanorunner.kernels.triton_support import num_processors


class HeadShape(NamedTuple):
    """How one rank's qkv rows divide: [q heads | k heads | v heads]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


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
    k_cache: torch.Tensor,
) -> AttentionPlan:
    """Return what every layer of this step shares; no operation at all on a GPU.

    k_cache [blocks, block_size, num_kv_heads, head_dim] is a layer's, for its shape and dtype.
    """
    host = None
    if not positions.is_cuda:
        host = plan_host(positions, cos_sin, batch, backend, k_cache)
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
    reads_early: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention's output [num_tokens, num_heads * head_dim]; may overwrite qkv's q and k.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; k_cache and v_cache
    [blocks, block_size, num_kv_heads, head_dim] get the step's K and V first. reads_early: the
    kernel before is one that fused_decode() may overlap with. out: where to write, contiguous; not
    for a step that fused_decode() serves.
    """
    num_tokens, scale = qkv.shape[0], shape.head_dim**-0.5
    if _is_fused(qkv, plan, shape.num_kv_heads):
        assert out is None, "fused_decode() has an output of its own"
        out = fused_decode(
            qkv, plan.positions, plan.cos_sin, k_cache, v_cache, plan.batch, *shape,
            q_norm, k_norm, eps, scale, reads_early=reads_early,
        )  # fmt: skip
        return out.view(num_tokens, -1)
    sizes = [shape.num_heads * shape.head_dim] + [shape.num_kv_heads * shape.head_dim] * 2
    q, k, v = torch.split_with_sizes(qkv, sizes, dim=1)
    if plan.host is None:
        qk_norm_rope_kv_write(
            qkv, plan.positions, plan.cos_sin, plan.batch.slot_mapping, k_cache, v_cache,
            *shape, q_norm, k_norm, eps,
        )  # fmt: skip
    else:
        _rotate(qkv, plan.host, shape, q_norm, k_norm, eps)
        _write_kv(k, v, plan.host, k_cache, v_cache)
        result = None
        if plan.host.decode is not None:
            result = _decode(q, plan.host.decode, k_cache, v_cache, scale)
        elif plan.host.prompts is not None:
            result = _prefill(qkv, plan.host.prompts, shape, scale)
        if result is not None:
            return result if out is None else out.copy_(result)
    q = q.view(num_tokens, shape.num_heads, shape.head_dim)
    # On a GPU the kernel in front is the rotation above, which is a late one (rope_kv_write.py).
    reads_early = plan.host is None
    if out is not None:
        out = out.view(q.shape)
    out = paged_attention(q, k_cache, v_cache, plan.batch, scale, plan.backend, reads_early, out)
    return out.view(num_tokens, -1)


def differs_when_even(
    num_reqs: int, shape: HeadShape, backend: str, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether a decode of so many requests has another plan where they are even.

    Then a captured graph serves one of the two well (AttentionBatch.is_even).
    """
    processors = num_processors(device)
    if backend != "triton" or is_full(num_reqs, shape.num_kv_heads, processors):
        return False
    ragged, even = (
        plan_fused(num_reqs, *shape, dtype.itemsize, processors, is_even=is_even)
        for is_even in (False, True)
    )
    return ragged != even


def _is_fused(qkv: torch.Tensor, plan: AttentionPlan, num_kv_heads: int) -> bool:
    """Return whether fused_decode serves the layer; a full device is faster with two lean steps."""
    batch = plan.batch
    is_decode = qkv.is_cuda and batch.max_query_len == 1 and plan.backend == "triton"
    if batch.places_share_kv:
        return False
    return is_decode and not is_full(len(qkv), num_kv_heads, num_processors(qkv.device))


def _rotate(
    qkv: torch.Tensor,
    host: HostPlan,
    shape: HeadShape,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Norm and rotate qkv's q and k in place."""
    num_heads, num_kv_heads, dim = shape
    # one call, where slice and view would be two
    qk = qkv.as_strided(
        (len(qkv), num_heads + num_kv_heads, 2, dim // 2), (qkv.stride(0), dim, dim // 2, 1)
    )
    if q_norm is not None and k_norm is not None:
        gain = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
        normed = F.rms_norm(qk.flatten(2).float(), (dim,), None, eps).mul_(gain)
        qk.copy_(normed.view(qk.shape))
    # Element i turns with element i + D/2: the halves swapped, and the minus is in host.sin. All
    # in the model dtype, as transformers does it: to float32 and back would be two more passes.
    swapped = qk.flip(2)
    qk.mul_(host.cos).addcmul_(swapped, host.sin)


def _write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    host: HostPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Copy k and v [num_tokens, num_kv_heads * head_dim] to their slots."""
    if host.written is not None:
        k, v = k[host.written], v[host.written]
    # view, not reshape: a copy would lose the write.
    k_cache.view(-1, k.shape[1]).index_copy_(0, host.slots, k)
    v_cache.view(-1, v.shape[1]).index_copy_(0, host.slots, v)


def _prefill(
    qkv: torch.Tensor, prompts: list[Prompts], shape: HeadShape, scale: float
) -> torch.Tensor:
    """Return [num_tokens, num_heads * head_dim]: each prompt's tokens attend to those before them.

    q, k and v are all in qkv: the cache is not read.
    """
    first_v = shape.num_heads + shape.num_kv_heads
    outputs = []
    for start, num_prompts, length in prompts:
        rows = qkv[start : start + num_prompts * length]
        rows = rows.view(num_prompts, length, -1, shape.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rows[:, : shape.num_heads],
            rows[:, shape.num_heads : first_v],
            rows[:, first_v:],
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out.transpose(1, 2).reshape(num_prompts * length, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(
    q: torch.Tensor,
    decode: DecodePlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return [num_reqs, num_heads * head_dim]: each request's token attends to all its KV.

    q is [num_reqs, num_heads * head_dim]. A KV head's group of query heads stands where query
    tokens would: one token sees everything.
    """
    num_reqs = q.shape[0]
    num_kv_heads, dim = k_cache.shape[2:]
    width = num_kv_heads * dim
    if decode.copy is None:
        k, v = _only_request(k_cache, decode), _only_request(v_cache, decode)
    else:
        slots, k_rows, v_rows, k, v = decode.copy
        torch.index_select(k_cache.view(-1, width), 0, slots, out=k_rows)
        torch.index_select(v_cache.view(-1, width), 0, slots, out=v_rows)
    q = q.view(num_reqs, num_kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=decode.mask, scale=scale)
    return out.reshape(num_reqs, -1)


def _only_request(cache: torch.Tensor, decode: DecodePlan) -> torch.Tensor:
    """Return the K or V of a batch of one as [1, num_kv_heads, longest, head_dim], a view."""
    num_kv_heads, dim = cache.shape[2:]
    width = num_kv_heads * dim
    return cache.as_strided(
        (1, num_kv_heads, decode.longest, dim),
        (width, dim, width, 1),
        cache.storage_offset() + decode.first_slot * width,
    )
