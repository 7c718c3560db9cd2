"""The kernels on a GPU: real shapes, hostile memory, graphs, 64-bit addresses, no late compile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
from kernel_cases import (
    AttentionCase,
    attention_case,
    check_attention,
    normal,
    num_unequal_replays,
    poison,
    rope_arguments,
)

from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import DecodePlan, decode_attention
from nanorunner.kernels.hopper_prefill import hopper_prefill_attention, serves_shape
from nanorunner.kernels.join_shares import share_counters
from nanorunner.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from nanorunner.kernels.rope_kv_write import (
    qk_norm_rope_kv_write,
    qk_norm_rope_kv_write_reference,
)
from nanorunner.kernels.silu_mul import silu_mul, silu_mul_reference
from nanorunner.kernels.warm_up import warm_up_attention

# Qwen3-0.6B, Llama-3-8B, Qwen2.5-0.5B, SmolLM2, an 80-wide and a 96-wide model, Gemma's 256, MQA.
HEADS = {
    "16/8x128": (16, 8, 128),
    "32/8x128": (32, 8, 128),
    "14/2x64": (14, 2, 64),
    "9/3x64": (9, 3, 64),
    "32/32x80": (32, 32, 80),
    "12/12x96": (12, 12, 96),
    "16/4x256": (16, 4, 256),
    "71/1x64": (71, 1, 64),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
with_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
with_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(case: AttentionCase, backend: str = "triton") -> torch.Tensor:
    memory = poison(case.q.shape, case.q.dtype)
    del memory  # the output is allocated here
    return paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, case.scale, backend, reads_early=True
    )


@with_dtype
@with_heads
@pytest.mark.parametrize("num_reqs", [1, 8, 40])
def test_decodes_of_ragged_lengths(
    heads: tuple[int, int, int], dtype: torch.dtype, num_reqs: int
) -> None:
    lengths = random.Random(num_reqs).choices([1, 2, 63, 64, 255, 256, 257, 700, 1900], k=num_reqs)
    case = attention_case([(1, length) for length in lengths], heads, dtype, 3, 3)
    check_attention(case, run(case))


@with_dtype
@with_heads
def test_prompts_chunks_and_decodes_in_one_batch(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    requests = [(300, 300), (1, 513), (128, 640), (1, 1), (5, 261), (1, 1025), (64, 64)]
    case = attention_case(requests, heads, dtype, padded_requests=2, padded_tokens=200)
    check_attention(case, run(case))
    if dtype != torch.float32:  # PyTorch's own float32 kernel may round its products
        check_attention(case, run(case, "torch"))


def test_a_long_context_splits_and_joins() -> None:
    for requests in ([(1, 30_000)], [(1, 30_000), (1, 3)], [(2000, 9000)]):
        case = attention_case(requests, (16, 8, 128), torch.bfloat16)
        check_attention(case, run(case))


def test_the_flash_attn_package_gives_the_same() -> None:
    pytest.importorskip("flash_attn")
    for requests in ([(1, 700), (1, 20)], [(300, 300), (1, 513), (128, 640)]):
        case = attention_case(requests, (16, 8, 128), torch.bfloat16)
        check_attention(case, run(case, "flash_attn"))


@with_dtype
def test_norms_and_silu_equal_their_references(dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for rows, width in [(1, 576), (3, 1024), (257, 4096), (16, 12_288)]:
        x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype)
        residual, expected_residual = x.flip(0), x.flip(0)
        pairs = [
            (rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)),
            (
                add_rms_norm(x, residual, weight, 1e-6),
                add_rms_norm_reference(x, expected_residual, weight, 1e-6),
            ),
            (residual, expected_residual),
            (silu_mul(x), silu_mul_reference(x)),
        ]
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@with_dtype
@with_heads
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_rope_and_kv_write_equal_the_reference(
    heads: tuple[int, int, int], dtype: torch.dtype, num_tokens: int
) -> None:
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for has_norm in (False, True):
        actual, expected = (rope_arguments(heads, num_tokens, dtype, has_norm) for _ in range(2))
        qk_norm_rope_kv_write(**actual)
        qk_norm_rope_kv_write_reference(**expected)
        for name in ("qkv", "k_cache", "v_cache"):
            torch.testing.assert_close(
                actual[name], expected[name], rtol=tolerance, atol=tolerance, equal_nan=True
            )


def test_the_last_slot_of_a_pool_above_2_to_the_31_elements() -> None:
    heads = (16, 8, 128)
    num_kv_heads, head_dim = heads[1:]
    num_blocks = 2**31 // (256 * num_kv_heads * head_dim) + 1
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    k_cache, v_cache = (
        torch.zeros((num_blocks, 256, num_kv_heads, head_dim), dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    arguments = rope_arguments(heads, 1, torch.bfloat16, has_norm=False)
    last = num_blocks * 256 - 1
    arguments |= {"k_cache": k_cache, "v_cache": v_cache}
    arguments["slot_mapping"].fill_(last)
    qk_norm_rope_kv_write(**arguments)
    rows = arguments["qkv"].view(1, -1, head_dim)
    assert torch.equal(k_cache.view(-1, num_kv_heads, head_dim)[last], rows[0, 16:24])
    assert torch.equal(v_cache.view(-1, num_kv_heads, head_dim)[last], rows[0, 24:])
    assert torch.count_nonzero(k_cache[0]) == 0, "the address wrapped around"

    k_cache[-1], v_cache[-1] = torch.randn_like(k_cache[-1]), torch.randn_like(v_cache[-1])
    for query_len in (1, 40):
        small = attention_case([(query_len, 256)], heads, torch.bfloat16)
        table = torch.full((1, 1), num_blocks - 1, dtype=torch.int32, device="cuda")
        case = small._replace(
            k_cache=k_cache, v_cache=v_cache, batch=small.batch._replace(block_tables=table)
        )
        check_attention(case, run(case))
        if serves_shape(case.q, k_cache):
            out = hopper_prefill_attention(case.q, k_cache, v_cache, case.batch, case.scale)
            check_attention(case, out)


def test_a_captured_graph_follows_lengths_that_only_the_device_knows() -> None:
    """Captured over padding alone, replayed over real requests, then over fewer of them."""
    case = attention_case([(1, 700), (1, 64), (1, 1)], (16, 8, 128), torch.bfloat16, 1, 1)
    lengths = case.batch.seq_lens.clone()
    case.batch.seq_lens.zero_()
    run(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(
            case.q, case.k_cache, case.v_cache, case.batch, case.scale, backend="triton"
        )
    for num_real in (3, 1, 2):
        case.batch.seq_lens.copy_(lengths)
        case.batch.seq_lens[num_real:] = 0
        graph.replay()
        fewer = case.batch._replace(
            query_start_loc=torch.arange(5, device="cuda", dtype=torch.int32).clamp(max=num_real)
        )
        check_attention(case._replace(batch=fewer), out)


@pytest.mark.parametrize("num_reqs", [2, 40, 200])
def test_a_thousand_replays_join_the_same_shares(num_reqs: int) -> None:
    lengths = random.Random(num_reqs).choices([1, 63, 257, 700, 1025, 1900, 4000], k=num_reqs)
    case = attention_case([(1, length) for length in lengths], (16, 8, 128), torch.bfloat16)
    plans = [
        DecodePlan(*shape)
        for shape in ((4, 32, 1, 2, 1024), (8, 64, 4, 3, 512), (32, 64, 4, 3), (4, 64, 2, 2))
    ]

    def run_all() -> list[torch.Tensor]:
        return [
            decode_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale, plan)
            for plan in plans
        ]

    first = run_all()
    for out in first:
        check_attention(case, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run_all()
    assert num_unequal_replays(graph, outs, first) == 0
    assert not share_counters(case.q.device, 1).any()


def test_nothing_compiles_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, dtype = (16, 8, 128), torch.bfloat16
    first = attention_case([(1, 1)], heads, dtype)
    caches = first.k_cache, first.v_cache
    warm_up_attention(32 * 128, 16, *caches, dtype, max_num_reqs=64, beside_prompts=True)
    compiled: list[Any] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts)
    )
    draw = random.Random(0)
    for num_reqs in (1, 2, 3, 7, 16, 31, 64):
        lengths = [draw.randint(1, 900) for _ in range(num_reqs)]
        run(attention_case([(1, length) for length in lengths], heads, dtype))
        run(attention_case([(draw.randint(1, n), n) for n in lengths], heads, dtype, 1, 5))
        mixed = attention_case([*((1, n) for n in lengths), (40, 40)], heads, dtype)
        run(mixed._replace(batch=mixed.batch._replace(num_decodes=num_reqs)))
        # Views of one packed input buffer, at places that are not 16-byte aligned.
        packed = attention_case([(1, length) for length in lengths], heads, dtype)
        run(packed._replace(batch=shifted(packed.batch)))
    for num_tokens in (1100, 4097):  # as many as a kernel of their own takes
        run(attention_case([(num_tokens, num_tokens + 7), (3, 3)], heads, dtype, 1, 5))
        packed = attention_case([(num_tokens, num_tokens)], heads, dtype)
        run(packed._replace(batch=shifted(packed.batch)))
    assert not compiled


def shifted(batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with its small tensors one element further in memory."""

    def shift(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return room[1:].view(tensor.shape).copy_(tensor)

    return batch._replace(
        query_start_loc=shift(batch.query_start_loc),
        seq_lens=shift(batch.seq_lens),
        block_tables=shift(batch.block_tables),
    )
