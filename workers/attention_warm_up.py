"""A decoder's Triton attention, launched once a plan, so that serving compiles nothing."""

from __future__ import annotations

import torch

from nanorunner.kernels.warm_up import warm_up_attention, warm_up_fused_decode
from nanorunner.workers.models.decoder import Decoder


def exercise_attention(
    decoder: Decoder,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    max_places: int,
    *,
    beside_prompts: bool,
) -> None:
    """Launch every plan for this rank's heads and up to max_places requests.

    k_cache and v_cache are one layer's [blocks, 256, local_kv_heads, head_dim]; nothing of them is
    read or written. beside_prompts: whether decodes of mixed batches have launches of their own.
    """
    layer = decoder.layers[0]
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    width, heads = layer.qkv.shape[0], decoder.local_heads
    warm_up_attention(
        width,
        heads,
        **caches,
        dtype=decoder.dtype,
        max_num_reqs=max_places,
        beside_prompts=beside_prompts,
    )
    warm_up_fused_decode(
        width,
        heads,
        **caches,
        cos_sin=decoder.cos_sin,
        norms=(layer.q_norm, layer.k_norm),
        dtype=decoder.dtype,
        max_num_reqs=max_places,
    )
