"""Decode attention with norm, rotation and KV write folded in equals the two steps it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_decode_cases import FusedCase, assert_cache, fused_case

from nanorunner.kernels.decode_attention import DecodePlan
from nanorunner.kernels.early_fetch import EARLY_BYTES
from nanorunner.kernels.fused_decode import (
    MAX_EARLY_TOKENS,
    fused_decode,
    fused_decode_reference,
    fused_decode_triton,
    plan_fused,
)
from nanorunner.kernels.fused_decode_kernel import LEAST_EARLY_TOKENS, early_slots
from nanorunner.kernels.triton_support import jit, tl

pytestmark = pytest.mark.beside

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


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_splits", [2, 8])
def test_two_tiles_in_registers_equal_one(num_splits: int, head_dim: int) -> None:
    case = fused_case(LENGTHS, (2, 1, head_dim))
    check(case, DecodePlan(num_splits, 16, 1, 1, held_tiles=2, early_tokens=64))


@jit()
def chunks_of_head(
    found: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    early_tokens: tl.tensor,
    num_blocks: tl.tensor,
    table_width: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
) -> None:
    """Write each thread's slot, or -1 where it has no chunk, to found [heads, 32 * WARPS]."""
    slots, is_mine = early_slots(
        table, first, end, early_tokens, tl.program_id(0), num_blocks, table_width,
        NUM_KV_HEADS, BLOCK_TOKENS, WARPS,
    )  # fmt: skip
    place = found + tl.program_id(0) * 32 * WARPS + tl.arange(0, 32 * WARPS)
    tl.store(place, tl.where(is_mine, slots, -1))


def early_chunks(
    table: list[int], first: int, end: int, early_tokens: int, num_kv_heads: int, num_blocks: int
) -> list[int]:
    """Return the slots at which all heads' programs of two warps begin to fetch, in order."""
    found = torch.full((num_kv_heads, 64), -2)
    # what lies behind a request's row of the tables belongs to another
    memory = torch.tensor([*table, 0, 0], dtype=torch.int32)
    chunks_of_head[(num_kv_heads,)](
        found, memory, first, end, early_tokens, num_blocks, len(table), num_kv_heads, 256, 2
    )
    return sorted(found[found != -1].tolist())


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 12, 32])
def test_each_early_token_is_fetched_once_for_all_heads(num_kv_heads: int) -> None:
    slots = early_chunks([3, 1], 224, 500, 64, num_kv_heads, 4)
    assert slots == [*range(256, 288, 8), *range(3 * 256 + 224, 4 * 256, 8)]
    assert early_chunks([3, 1], 224, 241, 64, num_kv_heads, 4) == [992, 1000, 1008]
    assert early_chunks([3, 1], 0, 500, 0, num_kv_heads, 4) == []
    assert len(early_chunks([3, 1], 0, 512, MAX_EARLY_TOKENS, num_kv_heads, 4)) == 32


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 1, 300, 10**6, 2**31 - 1])
@pytest.mark.parametrize("block", [-(2**31), -1, 0, 10**8, 2**31 - 1])
def test_whatever_tables_and_lengths_hold_early_chunks_lie_in_the_pool(
    length: int, block: int
) -> None:
    for first in (-(2**31), -64, 0, 480, 512, 2**31 - 2**20):
        slots = early_chunks([block, block], first, length, 64, 2, 3)
        assert all(0 <= slot <= 3 * 256 - LEAST_EARLY_TOKENS for slot in slots)
        if first < 0 or first >= 512 or length <= first:
            assert slots == []


def test_default_plans_fetch_no_more_than_they_may() -> None:
    for num_kv_heads, group, head_dim in [(8, 2, 128), (8, 4, 128), (1, 16, 64), (32, 1, 80)]:
        for num_reqs in range(1, 99):
            heads = (num_kv_heads * group, num_kv_heads, head_dim)
            plan = plan_fused(num_reqs, *heads, 2, 132)
            assert plan.early_tokens % LEAST_EARLY_TOKENS == 0
            assert (plan.early_tokens > 0) == (num_reqs <= 64)
            programs = num_reqs * num_kv_heads * plan.num_splits
            assert programs * plan.early_tokens * 4 * head_dim <= EARLY_BYTES
    assert plan_fused(8, 16, 8, 128, 2, 132).early_tokens == 64
    assert plan_fused(64, 16, 8, 128, 2, 132) == DecodePlan(1, 64, 2, 2, early_tokens=64)
