"""The head and the draw in one kernel return the keys of logits that were written and read."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import on_device

from nanorunner.kernels import lm_head_sample as module
from nanorunner.kernels.lm_head_sample import (
    HeadPlan,
    lm_head_sample,
    lm_head_sample_reference,
)
from nanorunner.kernels.token_keys import NO_KEY, key_ids, key_values

pytestmark = pytest.mark.beside

lm_head_sample_triton = on_device(module.lm_head_sample_triton)
PLAN = HeadPlan(16, 32, 1, 1)


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers: their products and sums are exact in every order and dtype."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def state(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return idx_mapping (the second row is nobody's), positions, temperature, seed."""
    idx_mapping = torch.arange(rows, dtype=torch.int32).flip(0) * 2 % 7
    idx_mapping[1:2] = -1
    positions = torch.arange(rows) * 1000 + 5
    temperature = torch.tensor([0.0, 0.6, 1.3, 0.0, 1e-30, 2.0, 0.9])
    seed = torch.arange(7) * 0x1234_5678_9ABC - 5
    return idx_mapping, positions, temperature, seed


def check(
    hidden: torch.Tensor, head: torch.Tensor, offset: int, num_ids: int, plan: HeadPlan | None
) -> None:
    """Compare keys: ids exactly, values to the last bits of a logarithm."""
    rows = hidden.shape[0]
    expected = lm_head_sample_reference(hidden, head, *state(rows), offset, num_ids)
    keys = lm_head_sample_triton(hidden, head, *state(rows), offset, num_ids, plan)
    assert key_ids(keys).tolist() == key_ids(expected).tolist()
    torch.testing.assert_close(
        key_values(keys), key_values(expected), rtol=1e-6, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 15, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_number_of_rows_draws_the_tokens_of_its_logits(rows: int, dtype: torch.dtype) -> None:
    hidden = integers(rows, 73, dtype=dtype)[:, :70]
    check(hidden, integers(333, 70, dtype=dtype), 70_000, 333, PLAN)


@pytest.mark.parametrize("rows", [1, 2])
def test_padded_ids_are_never_drawn(rows: int) -> None:
    head = integers(64, 32, dtype=torch.float32)
    head[50:] = torch.nan
    check(integers(rows, 32, dtype=torch.float32), head, 0, 50, PLAN)


@pytest.mark.parametrize("rows", [1, 5])
def test_whole_tiles_and_the_plan_by_rule_agree_with_the_reference(rows: int) -> None:
    hidden, head = integers(rows, 64, dtype=torch.float32), integers(128, 64, dtype=torch.float32)
    check(hidden, head, 128, 128, None)
    check(hidden, head, 128, 128, PLAN)


def test_one_row_in_bfloat16_rounds_its_logits_as_a_written_logit_is() -> None:
    hidden = integers(1, 64, dtype=torch.bfloat16)
    head = integers(96, 64, dtype=torch.bfloat16)
    check(hidden, head, 0, 96, PLAN)


def test_equal_logits_give_the_lowest_id_and_nobody_gets_no_key() -> None:
    head = torch.zeros(100, 32)
    hidden = torch.ones(3, 32)
    mapping = torch.tensor([0, -1, 0])
    zeros = torch.zeros(3, dtype=torch.int64)
    temperature, seed = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    arguments = (hidden, head, mapping, zeros, temperature, seed, 7, 100)
    for keys in (lm_head_sample(*arguments), lm_head_sample_triton(*arguments, PLAN)):
        assert key_ids(keys[[0, 2]]).tolist() == [7, 7]
        assert int(keys[1]) == NO_KEY


def test_a_row_of_nans_gives_an_id_in_range() -> None:
    head = torch.full((40, 16), torch.nan)
    hidden = torch.ones(2, 16)
    check(hidden, head, 0, 40, PLAN)
