"""The CPU's short way through a layer's attention gives what the two reference kernels give."""

from __future__ import annotations

import pytest
import torch

from nanorunner.kernels.attention import paged_attention_reference
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write_reference
from nanorunner.kernels.self_attention import HeadShape, plan_attention, self_attention

pytestmark = pytest.mark.beside

BLOCK_SIZE, NUM_BLOCKS = 256, 9
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # it rounds more often

# name -> (query_len, seq_len, block table) of each request
BATCHES: dict[str, list[tuple[int, int, list[int]]]] = {
    "one decode in one block": [(1, 70, [4])],
    "one decode in neighbouring blocks": [(1, 600, [2, 3, 4])],
    "one decode in scattered blocks": [(1, 600, [7, 0, 3])],
    "ragged decodes": [(1, 1, [4]), (1, 300, [1, 8]), (1, 256, [2])],
    "equal decodes": [(1, 40, [4]), (1, 40, [3])],
    "equal decodes at even distances": [(1, 40, [2]), (1, 40, [4]), (1, 40, [6])],
    "whole prompts": [(7, 7, [4]), (7, 7, [3]), (300, 300, [1, 0]), (1, 1, [2])],
    "a decode beside a chunk and a whole prompt": [(1, 9, [4]), (30, 280, [1, 2]), (5, 5, [0])],
}


def fresh(name: str, shape: HeadShape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return (qkv, positions, slot_mapping, kv, AttentionBatch's tensors) with NaN where unread."""
    generator = torch.Generator().manual_seed(1)
    requests = BATCHES[name]
    positions = [p for n, seq_len, _ in requests for p in range(seq_len - n, seq_len)]
    tables = [table for n, _, table in requests for _ in range(n)]
    slots = [
        t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for t, p in zip(tables, positions, strict=True)
    ]
    kv = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim), torch.nan)
    for _, seq_len, table in requests:
        for p in range(seq_len):
            row = torch.randn(2, *kv.shape[3:], generator=generator)
            kv[:, table[p // BLOCK_SIZE], p % BLOCK_SIZE] = row
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(len(positions), width, generator=generator)
    most = max(len(table) for *_, table in requests)
    padded = [table + [999] * (most - len(table)) for *_, table in requests]
    return (
        qkv.to(dtype),
        torch.tensor(positions),
        torch.tensor(slots),
        kv.to(dtype),
        torch.tensor([0, *(n for n, *_ in requests)]).cumsum(0).to(torch.int32),
        torch.tensor([seq_len for _, seq_len, _ in requests], dtype=torch.int32),
        torch.tensor(padded, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [HeadShape(6, 2, 16), HeadShape(3, 1, 10)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_unwritten", [0, 1])
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_the_short_way_equals_the_reference(
    name: str, num_unwritten: int, has_norm: bool, shape: HeadShape, dtype: torch.dtype
) -> None:
    results = []
    for is_short in (True, False):
        qkv, positions, slots, kv, starts, seq_lens, tables = fresh(name, shape, dtype)
        slots[:num_unwritten] = -1
        norms = [
            (torch.arange(shape.head_dim) / 40 + i).to(dtype) if has_norm else None
            for i in (0.5, 1)
        ]
        query_len = max(n for n, *_ in BATCHES[name])
        batch = AttentionBatch(starts, seq_lens, tables, slots, query_len, int(seq_lens.max()))
        angle = torch.outer(torch.arange(700.0), 0.5 ** torch.arange(shape.head_dim // 2))
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
        if is_short:
            plan = plan_attention(positions, cos_sin, batch, "torch", kv[0])
            place = torch.full((len(qkv), shape.num_heads * shape.head_dim), torch.nan, dtype=dtype)
            out = self_attention(
                qkv, plan, kv[0], kv[1], shape, norms[0], norms[1], 1e-6,
                out=place if has_norm else None,
            )  # fmt: skip
            assert (out.data_ptr() == place.data_ptr()) == has_norm
        else:
            qk_norm_rope_kv_write_reference(
                qkv, positions, cos_sin, slots, kv[0], kv[1], *shape, norms[0], norms[1], 1e-6
            )
            q = qkv[:, : shape.num_heads * shape.head_dim].view(len(qkv), *shape[::2])
            scale = shape.head_dim**-0.5
            out = paged_attention_reference(q, kv[0], kv[1], batch, scale).flatten(1)
        results.append((out, kv))
    tolerance = TOLERANCE[dtype]
    (short, short_kv), (long, long_kv) = results
    torch.testing.assert_close(short, long, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(short_kv, long_kv, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("tables", "seq_lens"),
    [
        ([[1, 2]], [300]),  # read in place
        ([[2, 1]], [300]),  # this one and all others are copied
        ([[1], [2], [3]], [5, 200, 1]),
        ([[0], [3], [6]], [256, 1, 30]),
        ([[0, 1], [3, 4]], [257, 512]),
        ([[0, 1], [2]], [300, 20]),
        ([[5], [3], [1]], [7, 9, 8]),
    ],
)
@torch.inference_mode()
def test_what_nobody_wrote_never_reaches_a_decode(
    tables: list[list[int]], seq_lens: list[int]
) -> None:
    """Prefill into a cache full of NaN, then decode one token each, as an engine does."""
    shape = HeadShape(4, 2, 8)
    kv = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim), torch.nan)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    cos_sin = torch.randn(700, shape.head_dim)
    padded = torch.tensor([table + [999] * (2 - len(table)) for table in tables], dtype=torch.int32)
    prompt_lens = [length - 1 for length in seq_lens]
    for query_lens, ends in ((prompt_lens, prompt_lens), ([1] * len(seq_lens), seq_lens)):
        positions = torch.cat(
            [torch.arange(end - n, end) for n, end in zip(query_lens, ends, strict=True)]
        )
        owner = torch.arange(len(tables)).repeat_interleave(torch.tensor(query_lens))
        slots = padded[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch(
            torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            padded,
            slots.long(),
            max(query_lens),
            max(ends),
        )
        qkv = torch.randn(len(positions), width)
        copy = qkv.clone()
        plan = plan_attention(positions, cos_sin, batch, "torch", kv[0])
        out = self_attention(qkv, plan, kv[0], kv[1], shape, None, None, 1e-6)
    qk_norm_rope_kv_write_reference(
        copy, positions, cos_sin, slots.long(), kv[0], kv[1], *shape, None, None, 1e-6
    )
    assert plan.host is not None
    assert plan.host.decode is not None
    assert (plan.host.decode.copy is None) == (tables == [[1, 2]])
    q = copy[:, : shape.num_heads * shape.head_dim].view(len(copy), *shape[::2])
    expected = paged_attention_reference(q, kv[0], kv[1], batch, shape.head_dim**-0.5).flatten(1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
