"""rms_norm, silu_mul, rope + KV write: Triton equals PyTorch, PyTorch equals transformers."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, normal, poison, rope_arguments
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nanorunner.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from nanorunner.kernels.rope_kv_write import (
    qk_norm_rope_kv_write_reference,
    qk_norm_rope_kv_write_triton,
)
from nanorunner.kernels.silu_mul import silu_mul_reference, silu_mul_triton

pytestmark = pytest.mark.beside

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 576, 1024, 1030])
def test_rms_norm_in_triton_equals_the_reference(hidden: int, dtype: torch.dtype) -> None:
    x, weight = normal(5, 2 * hidden, dtype=dtype)[:, :hidden], normal(hidden, dtype=dtype)
    poison((5, hidden), dtype)
    assert_same(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual_in_place(dtype: torch.dtype) -> None:
    x, weight = normal(5, 576, dtype=dtype), normal(576, dtype=dtype)
    residual, expected_residual = normal(5, 576, dtype=dtype), normal(5, 576, dtype=dtype)
    out = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert_same(out, add_rms_norm_reference(x, expected_residual, weight, 1e-5))
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, normal(5, 576, dtype=dtype))


def test_rms_norm_equals_transformers() -> None:
    norm = LlamaRMSNorm(576, eps=1e-5).to(DEVICE)
    norm.weight.data = normal(576)
    x = normal(7, 576)
    torch.testing.assert_close(
        rms_norm_reference(x, norm.weight.data, 1e-5), norm(x).detach(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 1000, 1536])
def test_silu_mul_in_triton_equals_the_reference(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * intermediate, dtype=dtype) * 4
    poison((3, intermediate), dtype)
    assert_same(silu_mul_triton(gate_up), silu_mul_reference(gate_up))


def test_no_rows_are_no_launch() -> None:
    assert rms_norm_triton(normal(0, 8), normal(8), 1e-5).shape == (0, 8)
    assert silu_mul_triton(normal(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (4, 1, 80), (5, 5, 96), (2, 1, 128), (3, 1, 256), (17, 1, 16)]
)
def test_rope_and_kv_write_in_triton_equal_the_reference(
    heads: tuple[int, int, int], has_norm: bool
) -> None:
    for dtype in DTYPES:
        actual, expected = (rope_arguments(heads, 4, dtype, has_norm) for _ in range(2))
        qk_norm_rope_kv_write_triton(**actual)
        qk_norm_rope_kv_write_reference(**expected)
        assert_same(actual["qkv"], expected["qkv"])
        for name in ("k_cache", "v_cache"):
            written = expected[name].isfinite()
            # A slot that no token owns still holds the NaN of before: -1 wrote nowhere.
            assert torch.equal(actual[name].isfinite(), written)
            assert written.sum() == 2 * heads[1] * heads[2]
            assert_same(actual[name][written], expected[name][written])


def test_many_tokens_take_the_large_program_and_give_the_same() -> None:
    actual, expected = (rope_arguments((3, 1, 16), 300, torch.float32, True) for _ in range(2))
    qk_norm_rope_kv_write_triton(**actual)
    qk_norm_rope_kv_write_reference(**expected)
    assert_same(actual["qkv"], expected["qkv"])
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(actual[name], expected[name], equal_nan=True)


def test_rotation_and_the_cached_keys_equal_transformers() -> None:
    arguments = rope_arguments((9, 3, 64), 6, torch.float32, has_norm=False)
    heads = arguments["qkv"].clone().view(6, 15, 64)
    cos, sin = arguments["cos_sin"][arguments["positions"]].repeat(1, 2).chunk(2, dim=1)
    cos, sin = (torch.cat((half, half), dim=1) for half in (cos[:, :32], cos[:, 32:]))
    q, k = heads[None, :, :9].transpose(1, 2), heads[None, :, 9:12].transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    qk_norm_rope_kv_write_reference(**arguments)
    actual = arguments["qkv"].view(6, 15, 64)
    torch.testing.assert_close(actual[:, :9], q[0].transpose(0, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(actual[:, 9:12], k[0].transpose(0, 1), rtol=0, atol=1e-5)
    slot = int(arguments["slot_mapping"][1])
    cached_k = arguments["k_cache"].view(-1, 3, 64)[slot]
    cached_v = arguments["v_cache"].view(-1, 3, 64)[slot]
    assert torch.equal(cached_k, actual[1, 9:12])
    assert torch.equal(cached_v, heads[1, 12:])


def test_a_padded_batch_leaves_the_last_slot_alone() -> None:
    """A slot of -1 used as an index would be the last row of the pool."""
    for write in (qk_norm_rope_kv_write_reference, qk_norm_rope_kv_write_triton):
        arguments = rope_arguments((2, 1, 16), 4, torch.float32, has_norm=False)
        arguments["slot_mapping"].fill_(-1)
        write(**arguments)
        assert arguments["k_cache"].isnan().all()
        assert arguments["v_cache"].isnan().all()
        assert arguments["qkv"].isfinite().all()
