"""Mixed batches on a GPU: the decodes' launch runs while the prompts' one still does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kernel_cases import (
    BLOCK_TOKENS,
    DEVICE,
    attention_case,
    check_attention,
    num_unequal_replays,
    poison,
    rope_arguments,
)
from slow_producer import slow_copy

from nanorunner.kernels.attention import LEAST_DECODES, paged_attention, paged_attention_reference
from nanorunner.kernels.hopper_prefill import HOPPER, serves
from nanorunner.kernels.rope_kv_write import (
    qk_norm_rope_kv_write,
    qk_norm_rope_kv_write_reference,
)

HEADS = [(16, 8, 128), (32, 8, 128), (14, 2, 64), (9, 3, 64), (32, 32, 80), (16, 4, 256)]
LENGTHS = [1, 2, 63, 64, 255, 256, 257, 700, 1900]
PROMPTS = [(300, 300), (128, 640), (5, 261), (1, 70)]


def requests_of(num_decodes: int, seed: int = 0) -> list[tuple[int, int]]:
    lengths = random.Random(seed).choices(LENGTHS, k=num_decodes)
    return [(1, length) for length in lengths] + PROMPTS


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_decodes", [LEAST_DECODES, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_many_decodes_in_front_of_prompts(
    heads: tuple[int, int, int], num_decodes: int, dtype: torch.dtype
) -> None:
    case = attention_case(
        requests_of(num_decodes), heads, dtype, padded_requests=2, padded_tokens=90
    )
    batch = case.batch._replace(num_decodes=num_decodes)
    poison(case.q.shape, case.q.dtype)
    out = paged_attention(case.q, case.k_cache, case.v_cache, batch, case.scale, "triton")
    check_attention(case, out)


class Layer:
    """Rotation and attention of one layer, over a cache of its own and a qkv buffer of all."""

    def __init__(
        self, requests: list[tuple[int, int]], heads: tuple[int, int, int], qkv: torch.Tensor
    ) -> None:
        case = attention_case(requests, heads, qkv.dtype)
        table, slots, positions = case.batch.block_tables.tolist(), [], []
        for blocks, (query_len, seq_len) in zip(table, requests, strict=True):
            for position in range(seq_len - query_len, seq_len):
                block = blocks[position // BLOCK_TOKENS]
                slots.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
                positions.append(position % 400)  # rope_arguments has a table of so many
        self.slots = torch.tensor(slots, device=DEVICE)
        self.arguments: dict[str, Any] = rope_arguments(heads, len(slots), qkv.dtype, has_norm=True)
        self.arguments |= {
            "qkv": qkv,
            "positions": torch.tensor(positions, device=DEVICE),
            "slot_mapping": self.slots,
            "k_cache": case.k_cache,
            "v_cache": case.v_cache,
        }
        num_decodes = next(i for i, (query_len, _) in enumerate(requests) if query_len > 1)
        self.batch = case.batch._replace(num_decodes=num_decodes, slot_mapping=self.slots)
        self.scale, self.source = case.scale, torch.randn_like(qkv)
        self.q = qkv[:, : heads[0] * heads[2]].view(-1, heads[0], heads[2])
        self.copy = torch.empty(self.q.shape, dtype=qkv.dtype, device=DEVICE)

    def expected(self) -> torch.Tensor:
        """Return the references' result; qkv and caches stay as they are."""
        caches = {name: self.arguments[name].clone() for name in ("k_cache", "v_cache")}
        qkv = self.source.clone()
        qk_norm_rope_kv_write_reference(**(self.arguments | caches | {"qkv": qkv}))
        q = qkv[:, : self.q.shape[1] * self.q.shape[2]].view(self.q.shape)
        return paged_attention_reference(
            q, caches["k_cache"], caches["v_cache"], self.batch, self.scale
        )

    def run(self) -> torch.Tensor:
        """Forget this step's KV, then enqueue a late producer of qkv, the layer, and a reader."""
        for name in ("k_cache", "v_cache"):
            self.arguments[name].flatten(0, 1).index_fill_(0, self.slots, torch.nan)
        slow_copy(self.source, self.arguments["qkv"])
        qk_norm_rope_kv_write(**self.arguments)
        out = paged_attention(
            self.q, self.arguments["k_cache"], self.arguments["v_cache"], self.batch, self.scale,
            "triton", reads_early=True,
        )  # fmt: skip
        return slow_copy(out, self.copy)


@pytest.mark.parametrize("prompt", [500, 2000])
@pytest.mark.parametrize("num_decodes", [20, 150])
def test_layers_behind_late_producers_are_equal_to_the_bit(num_decodes: int, prompt: int) -> None:
    """A thousand times: decodes read q and KV before their wait, and nothing older is in them.

    The layers share their qkv, as in a model, and what reads the last output waits for the decodes'
    launch alone: for the prompts', which takes longer than it, that one has to have waited. Only
    beside short prompts do both run at once; on a Hopper long ones have another kernel.
    """
    heads = (16, 8, 128)
    requests = [*requests_of(num_decodes), (prompt, prompt)]
    num_tokens = sum(query_len for query_len, _ in requests)
    qkv = torch.empty((num_tokens, (16 + 2 * 8) * 128), dtype=torch.bfloat16, device=DEVICE)
    layers = [Layer(requests, heads, qkv) for _ in range(2)]
    batch, cache = layers[0].batch, layers[0].arguments["k_cache"]
    is_hopper = torch.cuda.get_device_capability() == HOPPER
    assert batch.num_decodes == num_decodes
    assert serves(layers[0].q, cache, batch, num_decodes) == (is_hopper and prompt == 2000)
    for layer in layers:
        layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer.run() for layer in layers]
    graph.replay()
    first = [out.clone() for out in outs]
    for layer, actual in zip(layers, first, strict=True):
        torch.testing.assert_close(actual, layer.expected(), rtol=4e-2, atol=4e-2)
    assert num_unequal_replays(graph, outs, first) == 0
