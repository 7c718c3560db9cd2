"""Graphs of what lies between two attentions, for steps that a prompt joins.

    first | attention | between | attention | between | ... | attention | last

How attention is launched depends on whose tokens a step has, so no graph of a whole step serves
decodes and prompts together. All else of a layer goes token by token: its launches depend on how
many tokens there are, and more of them than the step has do no harm. They are most of a step's
launches, and a step with a short prompt takes as long as the host needs to make them
(scripts/bench_mixed_steps.py on an H200, 60 decodes, ms, the host's share first):

    prompt of            16           100          200          300          400
    8B    eager      14.3, 14.5   16.6, 16.8   14.2, 14.4   14.2, 14.5   14.0, 14.3
          captured    6.3,  6.5    6.3,  6.9    6.5,  9.2    6.5, 10.7    6.4, 13.1
    0.6B  eager      11.0, 11.1   12.4, 12.5   12.0, 12.1   11.4, 11.5   11.3, 11.4
          captured    5.4,  5.5    4.9,  5.0    5.7,  5.8    5.1,  5.2    5.0,  5.0

So they are captured for some numbers of tokens, and a step takes the next larger. The longer the
step, the less there is to gain: there with a prompt of 500 8B takes 14.9 ms eagerly and 15.4
captured, with 600 17.7 and 19.4, with 800 23.1 and 22.8. Where the host is twice as slow, as some
were, all of these wait for it; so sizes reach as far as a slow host needs them.

On one rank alone: between ranks all-reduces would be among them, which was never measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.rms_norm import add_rms_norm, rms_norm
from nanorunner.kernels.self_attention import plan_attention
from nanorunner.kernels.triton_support import num_processors
from nanorunner.workers.models.decoder import Decoder

# What an H200 computes in 16 bits while a slow host makes a layer's launches, 650 us.
WORTH_FLOPS = 4e11
PADDING_FLOPS = 1.2e10  # of a layer, for tokens that nobody has: 20 us
MOST_TOKENS = 2048
LEAST_STEP, MOST_STEP = 32, 128  # from one size to the next
# 16-bit arithmetic of a processor, as a share of an H200's (NVIDIA's data sheets): A100, Hopper,
# data-centre Blackwell; all others have 0.13 to 0.2.
PROCESSORS = 132
SHARES = {(8, 0): 0.4, (9, 0): 1.0, (10, 0): 2.0}
OTHER_SHARE = 0.17
FLOAT32_SHARE = 0.1  # of 16 bits: no tensor cores


def relative_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return a GPU's arithmetic as a share of an H200's in 16 bits."""
    share = SHARES.get(torch.cuda.get_device_capability(device), OTHER_SHARE)
    share *= num_processors(device) / PROCESSORS
    return share * (FLOAT32_SHARE if dtype.itemsize == 4 else 1.0)


def sizes_of(decoder: Decoder, most_tokens: int, speed: float) -> list[int]:
    """Return the numbers of tokens to capture a decoder's layers for, ascending.

    most_tokens: of a step; steps of exactly so many are common. speed: relative_speed().
    """
    layer = decoder.layers[0]
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    flops = 2 * sum(weight.numel() for weight in weights)  # of a token
    step = LEAST_STEP
    while step < MOST_STEP and 2 * step * flops <= speed * PADDING_FLOPS:
        step *= 2
    longest = min(MOST_TOKENS, int(speed * WORTH_FLOPS / flops)) // step * step
    sizes = list(range(step, min(most_tokens, longest) + 1, step))
    if most_tokens < longest and most_tokens % step:
        sizes.append(most_tokens)
    return sizes


class LayerGraphs:
    """One rank's graphs of a decoder's token-by-token parts, and the buffers between them.

    residual, attended, qkv, hidden [largest size, ...]. Owner: this object. Place: the device.
    Lifetime: this object's; contents one step. Last writers, on the main stream: attended
    attention, the others a replay. Rows behind a step's tokens hold older steps'.
    """

    def __init__(self, decoder: Decoder, input_ids: torch.Tensor, speed: float) -> None:
        """input_ids [most tokens of a step]: where each step's lie. speed: relative_speed()."""
        self.decoder, self.input_ids = decoder, input_ids
        self.sizes = sizes_of(decoder, len(input_ids), speed)
        most, layer = self.sizes[-1] if self.sizes else 0, decoder.layers[0]

        def zeros(width: int) -> torch.Tensor:
            return torch.zeros((most, width), dtype=decoder.dtype, device=decoder.device)

        self.residual = zeros(layer.o.shape[0])
        self.attended = zeros(layer.o.shape[1])
        self.qkv = zeros(layer.qkv.shape[0])
        self.hidden = zeros(layer.o.shape[0])
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}

    def capture(self) -> None:
        """Capture all sizes, the largest first: the smaller ones fit in its memory."""
        if not self.sizes:
            return
        device = self.decoder.device
        pool, stream = torch.cuda.graph_pool_handle(), _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                parts = self._parts(size)
                for part in (parts[0], parts[1], parts[-1]):
                    part()  # libraries set themselves up at a shape's first call
                self._graphs[size] = [_capture(part, pool) for part in parts]
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the first calls took

    def size_for(self, num_tokens: int) -> int | None:
        """Return the size that serves so many tokens, None when there is none."""
        place = bisect_left(self.sizes, num_tokens)
        size = self.sizes[place] if place < len(self.sizes) else None
        return size if size in self._graphs else None

    def forward(
        self,
        size: int,
        positions: torch.Tensor,
        batch: AttentionBatch,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return what Decoder.forward would for the ids in input_ids: rows of `hidden`.

        positions [num_tokens], at most `size`.
        """
        decoder, num_tokens = self.decoder, len(positions)
        plan = plan_attention(
            positions, decoder.cos_sin, batch, decoder.attention_backend, k_caches[0]
        )
        qkv, attended = self.qkv[:num_tokens], self.attended[:num_tokens]
        first, *others = self._graphs[size]
        first.replay()
        for index, graph in enumerate(others):
            decoder.attend(
                decoder.layers[index], qkv, plan, k_caches[index], v_caches[index], out=attended
            )
            graph.replay()
        return self.hidden[:num_tokens]

    def _parts(self, size: int) -> list[Callable[[], None]]:
        """Return what is captured, in its order, over the first `size` rows of the buffers."""
        decoder = self.decoder
        layers, eps = decoder.layers, decoder.model.rms_norm_eps
        ids = self.input_ids[:size]
        residual, attended, qkv, hidden = (
            buffer[:size] for buffer in (self.residual, self.attended, self.qkv, self.hidden)
        )

        def first() -> None:
            residual.copy_(decoder.embed_tokens(ids))
            x = rms_norm(residual, layers[0].input_norm, eps)
            decoder.linear(x, layers[0].qkv, layers[0].qkv_bias, qkv)

        def to_next_norm(index: int, gain: torch.Tensor) -> torch.Tensor:
            layer = layers[index]
            x = decoder.linear(attended, layer.o, layer.o_bias)
            x = add_rms_norm(x, residual, layer.post_norm, eps)
            return add_rms_norm(decoder.mlp(layer, x), residual, gain, eps)

        def between(index: int) -> None:
            following = layers[index + 1]
            x = to_next_norm(index, following.input_norm)
            decoder.linear(x, following.qkv, following.qkv_bias, qkv)

        def last() -> None:
            hidden.copy_(to_next_norm(len(layers) - 1, decoder.norm))

        return [first, *(partial(between, index) for index in range(len(layers) - 1)), last]


@cache
def _capture_stream(device: torch.device) -> Any:
    """Return the stream to capture on, one a device: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture(part: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of the launches that a call makes on the current stream."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the watcher's thread of rank 0 may touch the driver meanwhile
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        part()
    finally:
        graph.capture_end()  # else PyTorch's allocator believes for ever that a capture is on
    return graph
