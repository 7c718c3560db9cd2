"""Decodes in front of a mixed batch have a launch of their own, beside that of the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from body_graphs import Steps, request
from kernel_cases import attention_case, check_attention, poison

from nanorunner.kernels import attention, warm_up
from nanorunner.kernels.attention import LEAST_DECODES, paged_attention
from nanorunner.kernels.decode_attention import (
    MAX_SEQ_LENS,
    DecodePlan,
    decode_attention,
    plan_decode,
)
from nanorunner.kernels.prefill_attention import PrefillPlan, prefill_attention
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.places import Places

pytestmark = pytest.mark.beside

HEADS = [(9, 3, 64), (4, 1, 80), (5, 5, 96), (2, 1, 128), (2, 2, 256), (17, 1, 16)]
DECODES = [(1, 300), (1, 3), (1, 1), (1, 257), (1, 64)]
PROMPTS = [(40, 40), (3, 258), (1, 30), (30, 130)]
SAMPLING = FullSampling(temperature=0.0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return, growing, how many requests each launch for decodes has had; all wait last."""
    counts: list[int] = []

    def count(q: torch.Tensor, *args: Any, waits_last: bool, **options: Any) -> torch.Tensor:
        assert waits_last, "it would not run beside the prompts"
        counts.append(len(q))
        return decode_attention(q, *args, waits_last=waits_last, **options)

    monkeypatch.setattr(attention, "decode_attention", count)
    return counts


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_padded", [0, 2])
def test_decodes_and_prompts_of_one_batch_equal_a_plain_softmax(
    heads: tuple[int, int, int],
    num_padded: int,
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "LEAST_DECODES", 1)
    case = attention_case(
        DECODES + PROMPTS, heads, padded_requests=num_padded, padded_tokens=30 * num_padded
    )
    for num_decodes in (1, len(DECODES)):
        poison(case.q.shape, case.q.dtype)
        out = paged_attention(
            case.q, case.k_cache, case.v_cache, case.batch._replace(num_decodes=num_decodes),
            case.scale, "triton",
        )  # fmt: skip
        check_attention(case, out)
    assert launched == [1, len(DECODES)]


@pytest.mark.parametrize("num_decodes", [0, 1, LEAST_DECODES - 1, LEAST_DECODES])
def test_few_decodes_are_rows_of_the_prompts_launch(num_decodes: int, launched: list[int]) -> None:
    requests = [(1, 5 + i) for i in range(num_decodes)]
    case = attention_case([*requests, (9, 9)], (2, 1, 16))
    batch = case.batch._replace(num_decodes=num_decodes)
    out = paged_attention(case.q, case.k_cache, case.v_cache, batch, case.scale, "triton")
    check_attention(case, out)
    assert launched == [num_decodes] * (num_decodes >= LEAST_DECODES)


@pytest.mark.parametrize("num_skipped", [1, 5, 40])
@pytest.mark.parametrize("rows", [16, 64])
def test_the_prompts_launch_writes_no_row_of_a_skipped_request(
    num_skipped: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 decodes are several tiles of rows, which the grid leaves out."""
    requests = [(1, 9)] * num_skipped + [(20, 20), (3, 40)]
    case = attention_case(requests, (6, 3, 16), padded_requests=1, padded_tokens=4)
    arguments = (case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    whole = prefill_attention(*arguments, PrefillPlan(rows, 32, 4, 2))
    # not zeros: those are what a program writes that takes decodes for a prompt of no length
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(shape, 7.0, **kind))
    part = prefill_attention(*arguments, PrefillPlan(rows, 32, 4, 2), num_skipped=num_skipped)
    assert part[:num_skipped].eq(7).all()
    assert torch.equal(part[num_skipped:], whole[num_skipped:])


def test_a_launch_for_decodes_writes_where_it_is_told() -> None:
    case = attention_case(DECODES, (4, 2, 32))
    arguments = (case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    for plan in (DecodePlan(1, 32, 4, 2), DecodePlan(4, 32, 4, 2)):
        out = torch.full((len(DECODES) + 1, 4, 32), 7.0)
        result = decode_attention(*arguments, plan, waits_last=True, out=out[:-1])
        assert result.data_ptr() == out.data_ptr()
        check_attention(case, result)
        assert out[-1].eq(7).all()


def test_places_of_one_token_count_in_front_alone() -> None:
    for counts, num_single in [([1, 1, 5, 1], 2), ([7], 0), ([1, 1], 2), ([3, 1], 0), ([], 0)]:
        size = len(counts)
        places = Places(np.arange(size), np.array(counts, np.int64), np.ones(size, np.bool_))
        assert places.num_single == num_single


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps(has_graphs=False)
    yield steps
    steps.runner.close()


def test_attention_hears_of_the_decodes_in_front_of_a_prompt(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = steps.listen(monkeypatch)
    first, second, third = (request(i, list(range(1, 12)), SAMPLING) for i in range(3))
    steps.run((0, 11), (1, 11), new=(first, second))
    steps.run((0, 1), (1, 1), (2, 11), new=(third,))
    assert [batch.num_decodes for batch in heard] == [0, 2]


def test_a_warm_up_launches_every_plan_in_both_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: set[tuple[DecodePlan, bool]] = set()
    sizes = (2, 1, 16, 4, 132)  # a float32 model of this shape, on 132 processors

    def note(
        q: torch.Tensor, *args: Any, reads_early: bool, waits_last: bool, **options: Any
    ) -> None:
        batch = args[2]
        launches.add((plan_decode(len(q), *sizes, batch.max_seq_len), waits_last))

    monkeypatch.setattr(warm_up, "decode_attention", note)
    monkeypatch.setattr(warm_up, "num_processors", lambda device: 132)
    case = attention_case([(1, 4)], (2, 1, 16))
    for most in (LEAST_DECODES - 1, 900):
        launches.clear()
        warm_up.warm_up_attention(
            64, 2, case.k_cache, case.v_cache, case.q.dtype, most, beside_prompts=True
        )
        for longest in MAX_SEQ_LENS:
            plans = [plan_decode(n, *sizes, longest) for n in range(1, most + 1)]
            assert {(plan, False) for plan in plans} <= launches
            assert {(plan, True) for plan in plans[LEAST_DECODES - 1 :]} <= launches
        assert any(waits_last for _, waits_last in launches) == (most >= LEAST_DECODES)
    launches.clear()
    warm_up.warm_up_attention(64, 2, case.k_cache, case.v_cache, case.q.dtype, 900)
    assert not any(waits_last for _, waits_last in launches), "compiled, and nobody launches it"
