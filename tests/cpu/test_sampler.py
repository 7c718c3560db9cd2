"""The sampler draws from the distribution it was asked for, and a row depends on itself alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorunner.kernels import top_k_top_p
from nanorunner.kernels.sample import gumbel_argmax
from nanorunner.kernels.top_k_top_p import mask_top_k_top_p
from nanorunner.workers.sampler import Sampler

pytestmark = pytest.mark.beside

NEGATIVE_INFINITY = float("-inf")


def draw_many(logits: list[float] | torch.Tensor, count: int, **options: float) -> torch.Tensor:
    """Return `count` draws from one row, by one seed and the positions 0 to count - 1."""
    row = torch.as_tensor(logits, dtype=torch.float32)
    return sample(row.expand(count, -1), **options)


def sample(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """Call the sampler with settings that are one number for all rows, or one a row."""
    count = len(logits)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(options.get(name, default), dtype=dtype).expand(count).contiguous()

    return Sampler()(
        logits,
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        seed=column("seed", 1234, torch.int64),
        position=torch.as_tensor(options.get("position", torch.arange(count))),
    )


def chi_square(draws: torch.Tensor, probability: torch.Tensor) -> float:
    """Return Pearson's statistic; its mean is the number of ids less one."""
    expected = probability.double() * len(draws)
    counts = torch.bincount(draws, minlength=len(probability)).double()
    return float(((counts - expected) ** 2 / expected).sum())


# ---- the distribution ------------------------------------------------------------------------


def test_every_id_comes_as_often_as_its_probability_says() -> None:
    """Counts 500 to 1499 over 1000 ids, 20,000 draws: chi-square below df + 10 sqrt(2 df)."""
    counts = torch.arange(500, 1500).float()
    draws = draw_many(counts.log(), 20_000)
    degrees = len(counts) - 1
    assert chi_square(draws, counts / counts.sum()) < degrees + 10 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    draws = draw_many(logits, 20_000, temperature=temperature)
    assert chi_square(draws, (logits / temperature).softmax(0)) < 4 + 10 * math.sqrt(8)


def test_the_unlikely_tail_gets_its_share() -> None:
    """One id with 200,000 parts against 1,999 with 2 each: tail 1.96 %, within 6 sigma."""
    logits = torch.full((2000,), math.log(2))
    logits[0] = math.log(200_000)
    share = 3998 / 203_998
    count = 5000
    tail = int((draw_many(logits, count) != 0).sum())
    assert abs(tail - count * share) < 6 * math.sqrt(count * share * (1 - share))


def test_neighbouring_seeds_and_positions_draw_independently() -> None:
    """Pairs of draws that differ by one in seed or position hit all 16 cells evenly."""
    flat = torch.zeros(1, 4).expand(10_000, -1)
    first = sample(flat, seed=7)
    for second in (
        sample(flat, seed=8),
        sample(flat, seed=7 + 2**32),
        sample(flat, seed=7, position=torch.arange(1, 10_001)),
    ):
        assert chi_square(first * 4 + second, torch.full((16,), 1 / 16)) < 15 + 10 * math.sqrt(30)


def test_an_id_of_probability_zero_never_comes() -> None:
    logits = [NEGATIVE_INFINITY, 0.0, NEGATIVE_INFINITY, -20.0, NEGATIVE_INFINITY]
    draws = draw_many(logits, 20_000, temperature=8.0)
    assert set(draws.tolist()) == {1, 3}


# ---- greedy ----------------------------------------------------------------------------------


def test_greedy_is_argmax_also_beside_sampled_rows() -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.0, 5.0, 5.0]).repeat(3)
    ids = sample(logits, temperature=temperature, top_p=torch.tensor([0.3, 0.9, 1.0]).repeat(3))
    assert ids[::3].tolist() == logits.argmax(-1)[::3].tolist()


def test_greedy_ties_go_to_the_lowest_id_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(1, 5000, dtype=dtype)
        logits[0, [4000, 123, 2500]] = 3.0
        assert sample(logits, temperature=0.0).tolist() == [123]


def test_a_row_of_nans_gives_an_id_and_spoils_no_other_row() -> None:
    logits = torch.randn(3, 999, generator=torch.Generator().manual_seed(0))
    alone = sample(logits[[0, 2]], position=torch.tensor([4, 6]), top_p=0.9)
    logits[1] = float("nan")
    ids = sample(logits, position=torch.tensor([4, 5, 6]), top_p=0.9)
    assert ids[[0, 2]].tolist() == alone.tolist()
    assert 0 <= ids[1] < 999


# ---- a row depends on itself alone -----------------------------------------------------------


def test_a_row_is_the_same_alone_in_a_batch_and_in_any_order() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 500, generator=generator)
    settings_of_rows = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(16),
        "top_k": torch.tensor([0, 5, -1, 1000, 0, 1, 40, 0]).repeat(8),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.5]).repeat(16),
        "seed": torch.randint(-(2**62), 2**62, (64,), generator=generator),
        "position": torch.randint(0, 4096, (64,), generator=generator),
    }
    together = sample(logits, **settings_of_rows)
    order = torch.randperm(64, generator=generator)
    shuffled = sample(logits[order], **{k: v[order] for k, v in settings_of_rows.items()})
    assert shuffled.tolist() == together[order].tolist()
    for row in range(64):
        one = slice(row, row + 1)
        alone = sample(logits[one], **{k: v[one] for k, v in settings_of_rows.items()})
        assert alone.tolist() == together[one].tolist()


def test_a_neighbour_without_a_seed_or_with_top_p_changes_nothing() -> None:
    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([9, 9])
    results = {
        int(sample(logits, seed=torch.tensor([42, other]), position=position, top_p=top_p)[0])
        for other in (0, 1, 99)
        for top_p in (torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.2]))
    }
    assert len(results) == 1


def test_ids_do_not_depend_on_how_the_logits_lie_in_memory() -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0))
    for top_p in (1.0, 0.8):
        ids = sample(logits[:, :650], top_p=top_p)
        assert ids.tolist() == sample(logits[:, :650].contiguous(), top_p=top_p).tolist()


def test_padded_ids_at_the_end_of_the_vocabulary_change_nothing() -> None:
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(logits, (0, 31), value=NEGATIVE_INFINITY)
    for options in ({}, {"top_p": 0.8}, {"top_k": 120}):
        assert sample(padded, **options).tolist() == sample(logits, **options).tolist()


# ---- top-k and top-p -------------------------------------------------------------------------


def kept(logits: torch.Tensor, temperature: float = 1.0, k: int = 0, p: float = 1.0) -> set[int]:
    """Return the ids that one row keeps."""
    arguments = torch.tensor([temperature]), torch.tensor([k]), torch.tensor([p])
    masked = mask_top_k_top_p(logits[None], *arguments)
    return set((masked[0] > NEGATIVE_INFINITY).nonzero()[:, 0].tolist())


def test_top_k_comes_first_and_top_p_counts_what_it_left() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert kept(logits, k=2, p=0.5) == {3}
    assert kept(logits, p=0.5) == {2, 3}
    assert kept(logits, k=1, p=0.8) == {3}


def test_top_p_counts_probabilities_after_the_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    assert kept(logits, temperature=0.25, p=0.9) == {2}
    assert kept(logits, temperature=1.0, p=0.9) == {1, 2}
    assert kept(logits, temperature=4.0, p=0.9) == {0, 1, 2}


@pytest.mark.parametrize("k", [0, -1, 256, 100_000])
def test_k_that_is_off_or_beyond_the_vocabulary_keeps_every_id(k: int) -> None:
    assert kept(torch.randn(256), k=k) == set(range(256))


def test_p_just_under_one_keeps_every_id() -> None:
    logits = torch.randn(32_000, generator=torch.Generator().manual_seed(0))
    assert len(kept(logits, p=0.9999999)) == 32_000
    assert draw_many(logits, 20, top_p=0.9999999).tolist() == draw_many(logits, 20).tolist()


def test_k_of_one_and_a_tiny_p_are_greedy() -> None:
    logits = torch.randn(20, 400, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    assert sample(logits, top_k=1, temperature=3.0).tolist() == best
    assert sample(logits, top_p=1e-30, temperature=3.0).tolist() == best


def test_among_equal_logits_the_lower_ids_stay() -> None:
    assert kept(torch.zeros(1000), k=3) == {0, 1, 2}
    assert kept(torch.zeros(1000), p=0.0035) == {0, 1, 2, 3}


@pytest.mark.parametrize("filler", [NEGATIVE_INFINITY, float("nan")])
def test_the_kept_set_is_never_empty_and_never_holds_what_cannot_be_drawn(filler: float) -> None:
    logits = torch.full((50,), filler)
    logits[17], logits[33] = 2.0, 1.0
    assert kept(logits, k=10, p=0.99) <= {17, 33}
    assert kept(logits, k=10, p=0.5) == {17}
    draws = draw_many(logits, 200, top_k=10, top_p=0.99)
    assert set(draws.tolist()) == {17, 33}


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
    draws = draw_many(logits, 20_000, top_k=4)
    assert int(draws.max()) == 3
    assert chi_square(draws, logits[:4].softmax(0)) < 3 + 10 * math.sqrt(6)


def test_the_mask_does_not_depend_on_how_many_rows_are_sorted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(13, 64, generator=torch.Generator().manual_seed(0))
    arguments = torch.full((13,), 0.7), torch.full((13,), 30), torch.full((13,), 0.9)
    whole = mask_top_k_top_p(logits, *arguments)
    monkeypatch.setattr(top_k_top_p, "CHUNK_ELEMENTS", 5 * 64)
    assert torch.equal(mask_top_k_top_p(logits, *arguments), whole)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 300),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    k=st.integers(-1, 400),
    p=st.floats(2**-7, 1.0, width=32),
)
def test_the_kept_set_is_the_smallest_that_reaches_p(
    seed: int, size: int, spread: float, k: int, p: float
) -> None:
    """Against float64 sums, with 1e-6 of slack at the edge, where float32 exp rounds."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, size)).float()
    ids = sorted(kept(logits, k=k, p=p), key=lambda i: (-float(logits[i]), i))
    order = sorted(range(size), key=lambda i: (-float(logits[i]), i))
    limit = size if k < 1 else min(k, size)
    assert ids == order[: len(ids)]
    assert 1 <= len(ids) <= limit
    probability = logits[order[:limit]].double().softmax(0)
    if p == 1:
        assert len(ids) == limit
    assert float(probability[: len(ids)].sum()) >= p - 1e-6
    assert float(probability[: len(ids) - 1].sum()) <= p + 1e-6


def test_scores_are_returned_for_comparison_between_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    zeros = torch.zeros(1, dtype=torch.int64)
    values, ids = gumbel_argmax(logits, torch.zeros(1), zeros, zeros, vocab_offset=100)
    assert (values.tolist(), ids.tolist()) == ([3.0], [101])
