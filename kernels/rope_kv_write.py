"""Between the qkv projection and attention: q/k norm, rotary embedding and the KV cache write.

    qkv [n, (num_heads + 2 * num_kv_heads) * head_dim] = [q heads | k heads | v heads]

q and k are normalised (Qwen3) and rotated in place; k and v are then copied to the token's slot.
Rotation is the half-split (NeoX) form of Hugging Face's Llama: element i pairs with i + D/2.

    cos_sin [max_len, head_dim] float32: row p is [cos(p * f_0..D/2-1) | sin(p * f_0..D/2-1)]
    k_cache, v_cache [blocks, 256, num_kv_heads, head_dim]; slot = block * 256 + offset

A slot of -1 (padding, warm-up, capture) writes nothing: it is never an index. Slots are int64,
because slot * row size passes 2^31 elements in a large pool with few layers.

The launch is a late one (kernels/pdl.py): decode attention behind it may read the step's lengths
and block tables before its wait.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

FEW_TOKENS = 256  # up to here small programs spread over the device; above, large ones stream


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Norm (weights [head_dim], or None) and rotate q and k in place; write k and v to the cache.

    qkv [n, ...] as drawn above, positions [n] int64, slot_mapping [n] int64. A padded row's slot is
    -1, but its position is read: it must lie in [0, max_len) too.
    """
    function = qk_norm_rope_kv_write_triton if qkv.is_cuda else qk_norm_rope_kv_write_reference
    function(
        qkv,
        positions,
        cos_sin,
        slot_mapping,
        k_cache,
        v_cache,
        num_heads,
        num_kv_heads,
        head_dim,
        q_norm,
        k_norm,
        eps,
    )


def qk_norm_rope_kv_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """qk_norm_rope_kv_write in plain PyTorch, on any device (on CUDA it waits for the device)."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    qk = heads[:, : num_heads + num_kv_heads]
    wide = qk.float()  # a view of qkv itself when the model is float32
    if q_norm is not None and k_norm is not None:
        gain = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1))).float()
        wide = torch.nn.functional.rms_norm(wide, (head_dim,), None, eps) * gain
    # [n, 1, D/2] each: every head of a token turns by the same angles.
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    qk.copy_(rotated)

    k, v = heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if bool((slot_mapping < 0).any()):
        used = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[used], k[used], v[used]
    # view, not reshape: a copy would lose the write.
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, v)


def qk_norm_rope_kv_write_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """qk_norm_rope_kv_write as one Triton launch; the caches must be contiguous."""
    num_tokens = qkv.shape[0]
    assert qkv.stride(1) == 1, "qkv rows must lie side by side"
    assert k_cache.is_contiguous(), "the K cache must be contiguous"
    assert v_cache.is_contiguous(), "the V cache must be contiguous"
    if num_tokens == 0:
        return
    has_norm = q_norm is not None
    rows, warps = (4, 1) if num_tokens <= FEW_TOKENS else (16, 4)
    total_heads = num_heads + 2 * num_kv_heads
    _qk_norm_rope_kv_write_kernel[(num_tokens, -(-total_heads // rows))](
        qkv,
        positions,
        cos_sin,
        slot_mapping,
        k_cache,
        v_cache,
        q_norm if has_norm else cos_sin,  # never read without a norm; a kernel needs some pointer
        k_norm if has_norm else cos_sin,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=next_power_of_two(head_dim // 2),
        ROWS=rows,
        HAS_NORM=has_norm,
        num_warps=warps,
        **launch_options(can_overlap(qkv.device)),
    )


@jit(tables=("positions", "slot_mapping"))
def _qk_norm_rope_kv_write_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    slot_mapping: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """ROWS heads of one token, as two halves [ROWS, HALF]: a rotation is then elementwise."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    in_half = lane < half
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    if HAS_NORM:
        q_first = tl.load(q_norm + lane, mask=in_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm + half + lane, mask=in_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm + lane, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm + half + lane, mask=in_half, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()

    place = qkv + token * qkv_stride + head * HEAD_DIM + lane
    first_raw = tl.load(place, mask=inside, other=0.0)
    second_raw = tl.load(place + half, mask=inside, other=0.0)
    first = first_raw.to(tl.float32)
    second = second_raw.to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = tl.rsqrt(square / HEAD_DIM + eps)
        is_q = head < NUM_HEADS
        first = first * scale * tl.where(is_q, q_first, k_first)
        second = second * scale * tl.where(is_q, q_second, k_second)

    angle = cos_sin + tl.load(positions + token) * HEAD_DIM + lane
    cos = tl.load(angle, mask=in_half, other=0.0)
    sin = tl.load(angle + half, mask=in_half, other=0.0)
    dtype = first_raw.dtype
    new_first = tl.where(is_v, first_raw, (first * cos - second * sin).to(dtype))
    new_second = tl.where(is_v, second_raw, (second * cos + first * sin).to(dtype))
    is_qk = inside & (head < NUM_HEADS + NUM_KV_HEADS)
    tl.store(place, new_first, mask=is_qk)
    tl.store(place + half, new_second, mask=is_qk)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    kv_row = slot * (NUM_KV_HEADS * HEAD_DIM) + lane
    is_k = is_qk & (head >= NUM_HEADS)
    k_place = k_cache + kv_row + (head - NUM_HEADS) * HEAD_DIM
    tl.store(k_place, new_first, mask=is_k)
    tl.store(k_place + half, new_second, mask=is_k)
    is_v = is_v & inside
    v_place = v_cache + kv_row + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    tl.store(v_place, new_first, mask=is_v)
    tl.store(v_place + half, new_second, mask=is_v)
