"""Log-probabilities and ranks, from the row statistics and the best tokens alone."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import on_device

from nanorunner.kernels import logprobs as module
from nanorunner.kernels.logprobs import (
    chunk_rows,
    logprobs,
    row_statistics_reference,
    row_statistics_triton,
    top_keys_reference,
    top_keys_triton,
)
from nanorunner.kernels.token_keys import key_ids

pytestmark = pytest.mark.beside

ROWS = pytest.mark.parametrize(
    "statistics", [row_statistics_reference, on_device(row_statistics_triton)]
)
TOP = pytest.mark.parametrize("top", [top_keys_reference, on_device(top_keys_triton)])


def test_three_logits() -> None:
    found = logprobs(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]), 3)
    assert found.token_ids.tolist() == [[1, 2, 1, 0]]
    expected = torch.tensor([[-1.4076, -0.4076, -1.4076, -2.4076]])
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=1e-4)
    assert found.ranks.tolist() == [2]


@ROWS
def test_a_rank_counts_equals_and_not_nans(statistics: object) -> None:
    assert callable(statistics)
    logits = torch.tensor([[3.0, 1.0, 1.0, float("nan"), -1.0]]).expand(5, -1)
    _, value, ranks = statistics(logits, torch.arange(5))
    assert ranks.tolist() == [1, 3, 3, 5, 4]
    assert value.tolist() == [3, 1, 1, -math.inf, -1]


@ROWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_a_log_softmax(statistics: object, dtype: torch.dtype) -> None:
    assert callable(statistics)
    logits = (torch.randn(6, 9001, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    logits[2] = float("-inf")
    logits[2, 77] = 4.0
    logits[3] += 60
    found, value, _ = statistics(logits, torch.full((6,), 77))
    expected = logits.double().log_softmax(-1)[:, 77]
    torch.testing.assert_close((value - found).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on infinities
@ROWS
def test_a_row_of_minus_infinities_has_no_nan(statistics: object) -> None:
    assert callable(statistics)
    found, _, ranks = statistics(torch.full((1, 9), -math.inf), torch.tensor([3]))
    assert (found.tolist(), ranks.tolist()) == ([-math.inf], [9])


@TOP
@pytest.mark.parametrize("count", [1, 20, 1000, 2999, 3000])
def test_the_best_tokens_come_in_order_the_lower_id_first(top: object, count: int) -> None:
    assert callable(top)
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(3, 3000, generator=generator) * 2).bfloat16()
    logits[1] = 0
    ids = key_ids(top(logits, count))
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(ids, expected)


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    found = logprobs(torch.zeros(2, 5), torch.tensor([0, 4]), 100)
    assert found.token_ids.tolist() == [[0, 0, 1, 2, 3, 4], [4, 0, 1, 2, 3, 4]]
    torch.testing.assert_close(found.logprobs, torch.full((2, 6), -math.log(5)))


def test_no_best_tokens_leave_the_given_one() -> None:
    found = logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), 0)
    assert found.token_ids.tolist() == [[1], [2]]
    assert found.ranks.tolist() == [4, 4]


def test_no_rows_give_empty_results() -> None:
    found = logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 2)
    assert [part.shape for part in found] == [(0, 3), (0, 3), (0,)]


def test_a_chunk_is_64_mib_of_logits_and_at_most_1024_rows() -> None:
    assert chunk_rows(151_936, 2) == 220
    assert chunk_rows(49_152, 2) == 682
    assert chunk_rows(259, 4) == 1024
    assert chunk_rows(10**9, 4) == 1


@TOP
def test_chunks_change_nothing(top: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(top)
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    whole = top(logits, 40)
    monkeypatch.setattr(module, "chunk_rows", lambda num_ids, itemsize: 2)
    assert torch.equal(top(logits, 40), whole)
