"""Decode attention with norm, rotation and KV write folded in equals the two steps it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_decode_cases import FusedCase, assert_cache, fused_case

from nanorunner.kernels.decode_attention import DecodePlan
from nanorunner.kernels.fused_decode import (
    fused_decode,
    fused_decode_reference,
    fused_decode_triton,
)

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3}
# Every head width, groups of 1, 2, 3, 7 and 20 query heads.
HEADS = [(2, 2, 64), (6, 2, 80), (4, 2, 128), (7, 1, 96), (20, 1, 64), (2, 1, 256)]
LENGTHS = [1, 2, 16, 17, 64, 255, 256, 257, 600]


def check(case: FusedCase, plan: DecodePlan, **options: Any) -> None:
    """Compare one Triton call with the reference on a copy of everything."""
    other = case.copy()
    expected = fused_decode_reference(**other.arguments)
    actual = fused_decode_triton(**case.arguments, plan=plan, **options)
    tolerance = TOLERANCE[actual.dtype]
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_cache(case, other, tolerance)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_every_head_shape_equals_the_two_steps(
    heads: tuple[int, int, int], num_splits: int
) -> None:
    check(fused_case(LENGTHS[::2], heads), DecodePlan(num_splits, 16, 1, 1))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_every_number_of_splits_finds_the_owner_of_the_last_token(
    num_splits: int, has_norm: bool
) -> None:
    case = fused_case(LENGTHS, (2, 1, 64), has_norm=has_norm)
    check(case, DecodePlan(num_splits, 32, 1, 1), reads_early=has_norm)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_the_order_in_which_programs_start_changes_nothing(num_splits: int) -> None:
    case = fused_case(LENGTHS, (6, 3, 64), padded_requests=2)
    plan = DecodePlan(num_splits, 32, 1, 1)
    expected = fused_decode_triton(**case.copy().arguments, plan=plan)
    actual = fused_decode_triton(**case.arguments, plan=plan._replace(in_order=True))
    assert torch.equal(actual, expected)
    check(fused_case(LENGTHS, (6, 3, 64)), plan._replace(in_order=True))


def test_a_request_of_one_share_writes_its_own_result() -> None:
    check(fused_case(LENGTHS, (4, 2, 64)), DecodePlan(8, 32, 1, 1, 256))


@pytest.mark.parametrize("min_share", [0, 64])
def test_a_second_launch_equals_the_first_to_the_bit(min_share: int) -> None:
    case = fused_case([257, 1, 90], (6, 2, 16), padded_requests=1)
    plan = DecodePlan(8, 16, 1, 1, min_share)
    first = fused_decode_triton(**case.arguments, plan=plan)
    check(case, plan)
    second = fused_decode_triton(**case.arguments, plan=plan)
    assert torch.equal(first, second)
    assert not second[3].any()


def test_half_precision_rounds_as_the_two_steps_do() -> None:
    case = fused_case([1, 40, 300], (4, 2, 64), torch.float16)
    check(case, DecodePlan(4, 32, 1, 1))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_padded_requests_write_nothing_and_get_zeros(num_splits: int) -> None:
    case = fused_case([5, 257], (4, 2, 64), padded_requests=3)
    out = fused_decode_triton(**case.arguments, plan=DecodePlan(num_splits, 16, 1, 1))
    assert not out[2:].any()
    assert int((~case.k_cache.isnan()).all(dim=(2, 3)).sum()) == 5 + 257


def test_a_slot_of_minus_one_is_never_an_index() -> None:
    case = fused_case([5, 9], (4, 2, 64))
    case.batch.slot_mapping.fill_(-1)
    before = case.k_cache.clone()
    out = fused_decode_triton(**case.arguments, plan=DecodePlan(1, 16, 1, 1))
    assert torch.equal(case.k_cache.nan_to_num(), before.nan_to_num())
    assert not out.isnan().any(), "the new token is attended to all the same"


def test_no_requests_give_nothing() -> None:
    case = fused_case([], (4, 2, 64), padded_requests=1)
    arguments = case.arguments | {"qkv": case.qkv[:0], "plan": DecodePlan(1, 16, 1, 1)}
    assert fused_decode_triton(**arguments).shape == (0, 4, 64)


def test_the_qkv_rows_stay_as_they_were() -> None:
    case = fused_case([70], (4, 2, 64))
    before = case.qkv.clone()
    fused_decode_triton(**case.arguments, plan=DecodePlan(2, 16, 1, 1))
    assert torch.equal(case.qkv, before)


def test_on_a_cpu_it_is_the_reference() -> None:
    case = fused_case([5, 9], (4, 2, 64))
    other = case.copy()
    assert torch.equal(fused_decode(**case.arguments), fused_decode_reference(**other.arguments))
