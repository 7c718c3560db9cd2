"""A packed weight gives what the plain one gives, for any row count, and comes back unchanged."""

from __future__ import annotations

import pytest
import torch

from nanorunner.kernels.linear import can_pack, linear, pack

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to outputs of about 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "outer", "inner"), [(0, 9, 8), (1, 1003, 64), (8, 5, 3), (70, 64, 33)]
)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_packed_equals_plain(
    dtype: torch.dtype, rows: int, outer: int, inner: int, has_bias: bool
) -> None:
    x = torch.randn(rows, inner).to(dtype)
    weight = (torch.randn(outer, inner) * inner**-0.5).to(dtype)
    bias = torch.randn(outer).to(dtype) if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double()).add(
        0 if bias is None else bias.double()
    )
    weights = [weight, pack(weight)] if can_pack(CPU, dtype) else [weight]
    assert torch.equal(weights[-1].to_dense(), weight)
    for each in weights:
        out = linear(x, each, bias)
        assert out.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        whole = torch.full((rows + 1, outer), torch.nan, dtype=dtype)
        written = linear(x, each, bias, whole[:rows])
        assert rows == 0 or written.data_ptr() == whole.data_ptr()
        torch.testing.assert_close(written, out, rtol=tolerance, atol=tolerance)
        assert whole[rows:].isnan().all()


def test_what_onednn_does_not_serve_stays_plain() -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float16)
