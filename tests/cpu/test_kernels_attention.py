"""Attention equals a float64 softmax on hostile memory: the reference and both Triton kernels."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref

import pytest
import torch
from kernel_cases import AttentionCase, attention_case, check_attention, poison

from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.attention_batch_invariant import BATCH_INVARIANT
from nanorunner.kernels.decode_attention import (
    MAX_SEQ_LENS,
    DecodePlan,
    decode_attention,
    plan_decode,
)
from nanorunner.kernels.flash_attention import load_flash_attention
from nanorunner.kernels.fused_decode import plan_fused
from nanorunner.kernels.join_shares import share_counters
from nanorunner.kernels.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from nanorunner.kernels.warm_up import warm_up_attention

pytestmark = pytest.mark.beside

# Query heads, KV heads, head dim: groups that are no power of two, one KV head, odd head dims.
HEADS = [(9, 3, 64), (4, 1, 80), (5, 5, 96), (2, 1, 128), (2, 2, 256), (17, 1, 16)]
DECODES = [(1, 5), (1, 256), (1, 257), (1, 1)]
MIXED = [(40, 40), (1, 300), (3, 258), (30, 130), (1, 1)]


def run(case: AttentionCase, backend: str) -> torch.Tensor:
    poison(case.q.shape, case.q.dtype)
    return paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, case.scale, backend=backend
    )


def assert_counters_are_zero(case: AttentionCase) -> None:
    assert not share_counters(case.q.device, 1).any(), "the next launch would join too early"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("heads", HEADS)
def test_decodes_of_ragged_lengths_equal_a_plain_softmax(
    heads: tuple[int, int, int], backend: str
) -> None:
    case = attention_case(DECODES, heads)
    check_attention(case, run(case, backend))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("heads", HEADS)
def test_prompts_chunks_and_decodes_share_one_batch(
    heads: tuple[int, int, int], backend: str
) -> None:
    case = attention_case(MIXED, heads)
    check_attention(case, run(case, backend))


@pytest.mark.parametrize("backend", ["torch", "triton", BATCH_INVARIANT])
@pytest.mark.parametrize("requests", [DECODES, MIXED, [*[(1, 9)] * 5, (12, 20)]])
def test_the_output_may_have_a_place_of_its_own(
    requests: list[tuple[int, int]], backend: str
) -> None:
    case = attention_case(requests, (4, 2, 64))
    place = poison(case.q.shape, case.q.dtype).fill_(torch.nan)
    out = paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, case.scale, backend, out=place
    )
    assert out.data_ptr() == place.data_ptr()
    check_attention(case, place)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_request_alone_equals_a_plain_softmax(backend: str) -> None:
    for request in [(1, 1), (1, 700), (1, 256), (5, 5), (5, 300)]:
        case = attention_case([request], (6, 3, 64))
        check_attention(case, run(case, backend))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_padded_rows_are_zero_and_their_tables_are_never_followed(backend: str) -> None:
    for case in (
        attention_case(DECODES[:3], (6, 3, 64), padded_requests=2, padded_tokens=2),
        attention_case(MIXED[:3], (6, 3, 64), padded_requests=2, padded_tokens=70),
        attention_case([], (6, 3, 64), padded_requests=2, padded_tokens=2),
    ):
        check_attention(case, run(case, backend))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("requests", [[(1, 5), (1, 0), (1, 9)], [(1, 5), (1, 0), (3, 9)]])
def test_a_place_that_is_nobody_is_zero_among_others(
    requests: list[tuple[int, int]], backend: str
) -> None:
    """A verify step has such places: one token, and no length, past a request's limit."""
    case = attention_case(requests, (6, 3, 64))
    out = run(case, backend)
    assert not out[1].any()
    assert out[0].any()
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    # The interpreter multiplies the bits of bfloat16 matrices; tests/gpu checks that dtype.
    [("torch", torch.bfloat16), ("torch", torch.float16), ("triton", torch.float16)],
)
def test_half_precision_keeps_a_float32_softmax(backend: str, dtype: torch.dtype) -> None:
    for requests in (DECODES, MIXED):
        case = attention_case(requests, (4, 2, 64), dtype)
        check_attention(case, run(case, backend))


@pytest.mark.parametrize("num_splits", [1, 2, 16])
@pytest.mark.parametrize("tile", [32, 128])
def test_any_number_of_splits_gives_the_same_answer(num_splits: int, tile: int) -> None:
    case = attention_case([(1, 700), (1, 3), (1, 512)], (4, 2, 32), padded_requests=1)
    q = torch.cat((case.q, case.q[:1]))
    out = decode_attention(
        q, case.k_cache, case.v_cache, case.batch, case.scale, DecodePlan(num_splits, tile, 4, 2)
    )
    check_attention(case, out[:3])
    assert not out[3].any()
    assert_counters_are_zero(case)


@pytest.mark.parametrize("min_share", [256, 512])
def test_a_least_share_cuts_long_requests_alone(min_share: int) -> None:
    case = attention_case([(1, 700), (1, 3), (1, 512), (1, 513)], (4, 2, 32), padded_requests=1)
    q = torch.cat((case.q, case.q[:1]))
    plan = DecodePlan(8, 32, 4, 2, min_share)
    out = decode_attention(q, case.k_cache, case.v_cache, case.batch, case.scale, plan)
    check_attention(case, out[:4])
    assert not out[4].any()
    assert_counters_are_zero(case)


def test_each_launch_leaves_the_counters_as_it_found_them() -> None:
    """Of a wide group and many shares, so that one program joins them in several turns."""
    case = attention_case([(1, 300), (1, 3), (1, 70)], (20, 1, 16))
    outs = []
    for plan in [DecodePlan(40, 16, 1, 1), DecodePlan(3, 32, 1, 1)] * 2:
        # What nobody writes, the parts of shares without tokens, then likely holds NaN.
        poison((3, 1, plan.num_splits, 20, 16), torch.float32)
        outs.append(
            decode_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale, plan)
        )
        check_attention(case, outs[-1])
        assert_counters_are_zero(case)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


def test_requests_of_one_share_touch_no_counter() -> None:
    case = attention_case([(1, 200), (1, 3), (1, 256)], (4, 2, 16), padded_requests=1)
    q = torch.cat((case.q, case.q[:1]))
    plan = DecodePlan(8, 64, 4, 2, 256)
    counters = share_counters(q.device, 8)
    counters.fill_(99)
    try:
        out = decode_attention(q, case.k_cache, case.v_cache, case.batch, case.scale, plan)
        assert counters.eq(99).all()
    finally:
        counters.zero_()
    check_attention(case, out[:3])
    assert not out[3].any()


def test_more_counters_leave_the_fewer_to_the_graphs_that_know_them() -> None:
    device = torch.device("cpu")
    fewer = share_counters(device, 1)
    assert share_counters(device, fewer.numel()) is fewer
    more = share_counters(device, fewer.numel() + 1)
    assert more.numel() > fewer.numel()
    assert not more.any()
    assert share_counters(device, 1) is more
    known = weakref.ref(fewer)
    del fewer
    gc.collect()
    assert known() is not None, "a captured graph would write to memory that is no longer ours"


@pytest.mark.parametrize(("rows", "tile"), [(16, 32), (128, 128)])
def test_any_prefill_tile_gives_the_same_answer(rows: int, tile: int) -> None:
    case = attention_case(MIXED, (6, 2, 32), padded_requests=1, padded_tokens=5)
    out = prefill_attention(
        case.q, case.k_cache, case.v_cache, case.batch, case.scale, PrefillPlan(rows, tile, 4, 2)
    )
    check_attention(case, out)


def test_a_chunk_sees_the_chunks_before_it_and_nothing_after() -> None:
    """The last 30 rows of a whole prompt equal the same 30 tokens sent as a chunk."""
    whole = attention_case([(280, 280)], (4, 2, 64))
    chunk = whole._replace(
        q=whole.q[-30:],
        batch=whole.batch._replace(
            query_start_loc=torch.tensor([0, 30], dtype=torch.int32, device=whole.q.device),
            max_query_len=30,
        ),
    )
    for backend in ("torch", "triton"):
        out = run(chunk, backend)
        torch.testing.assert_close(out, run(whole, backend)[-30:], rtol=0, atol=1e-5)


def test_splits_depend_on_the_batch_size_alone_and_fill_the_device() -> None:
    heads, processors = (16, 8, 128), 132
    splits = [plan_decode(n, *heads, 2, processors).num_splits for n in (1, 8, 16, 64, 256)]
    assert splits == [32, 8, 4, 1, 1]
    # long requests alone are cut where a batch fills the device
    for num_reqs, longest, plan in (
        (8, 4096, (8, 0)),
        (64, 4096, (1, 0)),
        (128, 2048, (1, 0)),
        (128, 2049, (4, 2048)),
        (256, 4096, (4, 2048)),
    ):
        found = plan_decode(num_reqs, *heads, 2, processors, longest)
        assert (found.num_splits, found.min_share) == plan
    assert plan_decode(1, 4, 1, 128, 2, processors).num_splits == 64


def test_the_plans_of_a_batch_on_132_processors_are_those_that_were_measured() -> None:
    """By (request, KV head) pairs a processor: 8 heads of 60 requests are 3.6."""
    sizes = (16, 8, 128, 2, 132)
    decode = {n: plan_decode(n, *sizes)[:4] for n in (8, 60, 98, 99, 164, 165)}
    assert decode[8] == (8, 64, 4, 3)
    assert decode[60] == decode[98] == (1, 64, 4, 3)
    assert decode[99] == decode[164] == (1, 128, 4, 2)
    assert decode[165] == (1, 32, 1, 3)
    wide = DecodePlan(1, 128, 4, 2, in_order=True)
    for is_even in (False, True):
        assert plan_fused(16, *sizes, is_even=is_even) == DecodePlan(4, 32, 2, 2)
        assert plan_fused(17, *sizes, is_even=is_even) == wide
        assert plan_fused(41, *sizes, is_even=is_even) == wide
    assert plan_fused(60, *sizes) == wide
    even = {n: plan_fused(n, *sizes, is_even=True)[:4] for n in (42, 49, 50, 98)}
    assert even[42] == even[49] == (1, 64, 4, 3)
    assert even[50] == even[98] == (1, 64, 2, 2)


def test_a_tile_never_crosses_a_block_and_plans_are_few() -> None:
    """Each plan is one compilation, so a serving engine must meet only a handful."""
    for (q, k, d), size in itertools.product([*HEADS, (71, 1, 64), (32, 8, 128)], (2, 4)):
        decode = {
            plan_decode(n, q, k, d, size, 132, longest)
            for n in range(1, 1025)
            for longest in (*MAX_SEQ_LENS, 40_960)
        }
        prefill = {plan_prefill(n, q // k, d, size, 227 * 1024) for n in range(1, 1025)}
        assert all(256 % plan.tile_tokens == 0 for plan in decode | prefill)
        assert all(plan.rows >= q // k for plan in prefill)
        assert len(decode) <= 18
        assert len(prefill) <= 2


def test_the_warm_up_launches_every_plan_and_writes_nothing() -> None:
    case = attention_case([(1, 9)], (4, 2, 16))
    before = case.k_cache.clone(), case.v_cache.clone()
    warm_up_attention(128, 4, case.k_cache, case.v_cache, case.q.dtype, max_num_reqs=8)
    torch.testing.assert_close((case.k_cache, case.v_cache), before, equal_nan=True, rtol=0, atol=0)


def test_an_unknown_backend_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="'flashy': choose one of torch, triton, flash_attn"):
        run(attention_case([(1, 1)], (2, 1, 16)), "flashy")


def test_a_missing_flash_attn_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # what import takes for "not installed"
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    load_flash_attention.cache_clear()
    with pytest.raises(ImportError, match="pip install flash-attn, or use the backend triton"):
        load_flash_attention()


def test_a_small_gpu_gets_a_plan_that_fits_its_shared_memory() -> None:
    plan = plan_prefill(1000, 2, 128, 2, 99 * 1024)
    assert plan == PrefillPlan(64, 64, 4, 2)
    assert plan_prefill(1000, 2, 256, 2, 99 * 1024).tile_tokens == 32
