"""A token key orders tokens as a sampler must; draws made by keys are those of gumbel_argmax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import on_device

from nanorunner.kernels.sample import gumbel_argmax_reference
from nanorunner.kernels.sample_keys import sample_keys_reference, sample_keys_triton
from nanorunner.kernels.token_keys import (
    LOWEST_KEY,
    NO_KEY,
    SKIP_ROW,
    key_ids,
    key_values,
    token_keys,
)

pytestmark = pytest.mark.beside

Draw = Callable[..., torch.Tensor]
draw_triton = on_device(sample_keys_triton)
BOTH = pytest.mark.parametrize("draw", [sample_keys_reference, draw_triton])
INFINITY, NAN = float("inf"), float("nan")


def table(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return temperature and seed of a state table, every third row greedy."""
    temperature = torch.tensor([0.0, 0.6, 1.3]).repeat(num_rows)[:num_rows]
    return temperature, torch.arange(num_rows) * 0x1234_5678_9ABC - 5


def test_keys_order_by_value_and_then_by_the_lower_id() -> None:
    values = torch.tensor([-INFINITY, -3e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38, INFINITY])
    keys = torch.stack([token_keys(values, torch.tensor(i)) for i in (200_000, 1, 0)], dim=1)
    flat = keys.flatten()
    assert (flat[1:] > flat[:-1]).all()
    assert int(flat[0]) > LOWEST_KEY > NO_KEY
    assert torch.equal(key_values(keys), values[:, None].expand(-1, 3))
    assert key_ids(keys)[0].tolist() == [200_000, 1, 0]


def test_a_nan_counts_as_minus_infinity_and_minus_zero_as_zero() -> None:
    ids = torch.tensor(7)
    assert torch.equal(*(token_keys(torch.tensor(x), ids) for x in (NAN, -INFINITY)))
    assert torch.equal(*(token_keys(torch.tensor(x), ids) for x in (-0.0, 0.0)))


def test_no_key_reads_as_id_zero() -> None:
    assert key_ids(torch.tensor([NO_KEY])).tolist() == [0]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_draw_is_gumbel_argmax_by_rows_of_a_table(draw: Draw, dtype: torch.dtype) -> None:
    temperature, seed = table(9)
    rows = torch.tensor([8, 0, 3, 1, 4], dtype=torch.int32)
    positions = torch.arange(5) * 100
    logits = (torch.randn(5, 2500, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    keys = draw(logits, rows, positions, temperature, seed, 70_000)
    expected = gumbel_argmax_reference(
        logits, temperature[rows.long()], seed[rows.long()], positions, 70_000
    )
    assert key_ids(keys).tolist() == expected[1].tolist()
    torch.testing.assert_close(key_values(keys), expected[0], rtol=1e-6, atol=1e-6)


@BOTH
def test_a_draw_is_the_same_at_any_batch_size_row_and_rank(draw: Draw) -> None:
    temperature, seed = torch.full((64,), 0.8), torch.full((64,), 99)
    line = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    found = set()
    for row in (0, 63):
        for size in (1, 64):
            index = torch.full((size,), row, dtype=torch.int32)
            keys = draw(line.expand(size, -1), index, torch.full((size,), 17), temperature, seed)
            found |= set(key_ids(keys).tolist())
    shards = [
        draw(
            line[:, start : start + 250].contiguous(),
            torch.tensor([5]),
            torch.tensor([17]),
            temperature,
            seed,
            start,
        )
        for start in range(0, 1000, 250)
    ]
    found |= set(key_ids(torch.stack(shards).amax(0)).tolist())
    assert len(found) == 1


@BOTH
def test_nobody_and_skipped_rows_have_no_key(draw: Draw) -> None:
    temperature, seed = table(2)
    logits, cut = torch.zeros(3, 300), torch.tensor([NO_KEY, NO_KEY, SKIP_ROW])
    keys = draw(logits, torch.tensor([-1, 0, 0]), torch.zeros(3).long(), temperature, seed, 0, cut)
    assert keys[[0, 2]].tolist() == [NO_KEY] * 2
    assert key_ids(keys).tolist() == [0, 0, 0]
    keys = draw(logits, torch.tensor([-1, 0, 0]), torch.zeros(3).long(), temperature, seed, 10)
    assert key_ids(keys).tolist() == [0, 10, 10]


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_tokens_that_reach_the_cut_are_drawn(draw: Draw, temperature: float) -> None:
    logits = torch.randn(1, 2100, generator=torch.Generator().manual_seed(2)).expand(40, -1)
    keys = token_keys(logits[0], torch.arange(2100))
    best = keys.topk(3).values
    heat, seed = torch.full((1,), temperature), torch.zeros(1).long()
    zeros = torch.zeros(40, dtype=torch.int32)
    drawn = draw(logits, zeros, torch.arange(40), heat, seed, 0, best[2].expand(40).contiguous())
    expected = set(key_ids(best).tolist())
    assert set(key_ids(drawn).tolist()) == (expected if temperature else {int(key_ids(best[0]))})


@BOTH
def test_a_shard_that_keeps_no_token_has_no_key(draw: Draw) -> None:
    heat, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    cut = token_keys(torch.tensor([5.0]), torch.tensor([0]))
    assert draw(torch.zeros(1, 50), zero, zero, heat, zero, 100, cut).tolist() == [NO_KEY]


@BOTH
@pytest.mark.parametrize("value", [NAN, -INFINITY])
def test_a_row_without_a_number_gives_an_id_in_range(draw: Draw, value: float) -> None:
    temperature, seed = table(2)
    rows, logits = torch.tensor([0, 1]), torch.full((2, 999), value)
    assert key_ids(draw(logits, rows, rows, temperature, seed)).tolist() == [0, 0]


@BOTH
def test_greedy_ties_go_to_the_lowest_id_of_all_shards(draw: Draw) -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [2999, 1500, 77]] = 4.0
    zero = torch.zeros(1, dtype=torch.int64)
    shards = [
        draw(logits[:, start : start + 1000].contiguous(), zero, zero, zero.float(), zero, start)
        for start in (0, 1000, 2000)
    ]
    assert key_ids(torch.stack(shards).amax(0)).tolist() == [77]


def test_no_rows_give_no_keys() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert draw_triton(torch.zeros(0, 9), none, none, *table(1)).shape == (0,)
