"""The kernel for long prompts on Hopper: ragged batches, poisoned caches, late producers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import (
    attention_case,
    check_attention,
    num_unequal_replays,
    poison,
)
from slow_producer import slow_copy

from nanorunner.kernels import attention
from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.hopper_prefill import (
    HOPPER,
    LEAST_TOKENS,
    hopper_prefill_attention,
    serves,
    serves_shape,
)
from nanorunner.kernels.prefill_attention import prefill_attention

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() != HOPPER, reason="a Hopper kernel"
)

HEADS = [(32, 8, 128), (16, 8, 128), (28, 4, 128), (8, 8, 128), (64, 1, 128)]
# (query_len, seq_len): below and at tile and block ends, chunks with what is cached, one token
BATCHES = {
    "ragged": [(5, 5), (130, 133), (1, 301), (700, 755), (63, 64), (64, 64), (65, 65)],
    "whole tiles": [(256, 256), (512, 512), (64, 256), (128, 128)],
    "chunks": [(1000, 3000), (1, 2), (31, 4096), (2048, 2300)],
    "one token": [(1, 1)],
    "nothing to see": [(5, 0), (40, 40), (3, 0)],
    "many": [(300 - i, 300 + i) for i in range(40)],
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_are_attended(heads: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    case = attention_case(BATCHES[name], heads, dtype, padded_requests=2, padded_tokens=70)
    assert serves_shape(case.q, case.k_cache)
    poison(case.q.shape, case.q.dtype)
    out = hopper_prefill_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    check_attention(case, out)


@pytest.mark.parametrize("seed", range(8))
def test_any_batch_is_attended(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 1500) for _ in range(draw.randint(1, 30))]
    requests = [(draw.randint(1, n), n) for n in lengths]
    heads = draw.choice(HEADS)
    padding = draw.randint(0, 3), draw.randint(0, 200)
    case = attention_case(requests, heads, torch.bfloat16, *padding)
    poison(case.q.shape, case.q.dtype)
    out = hopper_prefill_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    check_attention(case, out)


@pytest.mark.parametrize("num_skipped", [0, 1, 60, 200])
def test_nothing_is_written_beside_its_rows(
    num_skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the rows of skipped decodes, nor memory in front of out or behind it."""
    requests = [(1, 9)] * num_skipped + [(1024, 1024)] * 8
    case = attention_case(requests, HEADS[1], torch.bfloat16)
    rooms = []

    def empty_within_a_room(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        room = torch.full((shape[0] + 600, *shape[1:]), torch.nan, **options)
        rooms.append(room)
        return room[300:-300]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty_within_a_room)
        hopper_prefill_attention(
            case.q, case.k_cache, case.v_cache, case.batch, case.scale, num_skipped=num_skipped
        )
    (room,) = rooms
    assert room[: 300 + num_skipped].isnan().all()
    assert room[-300:].isnan().all()
    assert not room[300 + num_skipped : -300].isnan().any()


@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128)], ids=str)
@pytest.mark.parametrize("num_decodes", [3, 4, 5, 17, 60])
def test_decodes_in_front_of_a_long_prompt(num_decodes: int, heads: tuple[int, int, int]) -> None:
    draw = random.Random(num_decodes)
    requests = [(1, draw.randint(1, 2000)) for _ in range(num_decodes)]
    requests += [(LEAST_TOKENS, LEAST_TOKENS + 100), (77, 77)]
    case = attention_case(requests, heads, torch.bfloat16, 1, 9)
    batch = case.batch._replace(num_decodes=num_decodes)
    assert serves(case.q, case.k_cache, batch, num_decodes)
    poison(case.q.shape, case.q.dtype)
    out = paged_attention(case.q, case.k_cache, case.v_cache, batch, case.scale, "triton")
    check_attention(case, out)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((14, 2, 64), torch.bfloat16),
        ((16, 4, 256), torch.bfloat16),
        ((71, 1, 128), torch.bfloat16),
        ((16, 8, 128), torch.float32),
    ],
    ids=str,
)
def test_other_shapes_are_left_to_its_twin(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = attention_case([(1100, 1100)], heads, dtype)
    assert not serves(case.q, case.k_cache, case.batch, 0)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale, "triton")
    check_attention(case, out)


def test_long_queries_take_it_from_so_many_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def watch(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
            taken.append(function.__name__)
            return function(*args, **kwargs)

        return watched

    for function in (hopper_prefill_attention, prefill_attention):
        monkeypatch.setattr(attention, function.__name__, watch(function))
    drafts = [(4, 40)] * 300
    for requests in ([(LEAST_TOKENS - 1, 1100)], [(LEAST_TOKENS, 1100)], drafts):
        case = attention_case(requests, HEADS[0], torch.bfloat16)
        out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale, "triton")
        check_attention(case, out)
    assert taken == ["prefill_attention", "hopper_prefill_attention", "prefill_attention"]


def test_behind_late_producers_it_is_equal_to_the_bit() -> None:
    """A thousand times: what q holds is there when it is read, and what reads out waits for it."""
    case = attention_case([(1200, 1900), (333, 333), (64, 700)], HEADS[1], torch.bfloat16)
    source = case.q.contiguous()
    q, copy = torch.empty_like(source), torch.empty_like(source)

    def run() -> torch.Tensor:
        q.fill_(torch.nan)
        slow_copy(source, q)
        out = hopper_prefill_attention(q, case.k_cache, case.v_cache, case.batch, case.scale)
        return slow_copy(out, copy)

    first = run().clone()
    check_attention(case._replace(q=source), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run()]
    assert num_unequal_replays(graph, outs, [first]) == 0
