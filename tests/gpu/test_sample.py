"""Sampling on a GPU: the CPU's words bit for bit, its ids but for near-ties, a right distribution.

Draws that must be independent come from one seed, distinct positions and a row expanded with stride
0, so that a million rows of logits take the memory of one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nanorunner.kernels import philox
from nanorunner.kernels.sample import gumbel_argmax, gumbel_argmax_reference
from nanorunner.kernels.top_k_top_p import mask_top_k_top_p
from nanorunner.kernels.triton_support import jit, tl

NEAR_TIE = 1e-5  # relative; the logarithms of two libraries differ by a few units in the last place


@jit()
def _store_words(
    out: tl.tensor, seeds: tl.tensor, positions: tl.tensor, USE: tl.constexpr, IDS: tl.constexpr
) -> None:
    """Program (row): the words of ids 0 to IDS - 1, as int32 bits."""
    row = tl.program_id(0)
    ids = tl.arange(0, IDS).to(tl.int64)
    word = philox.random_word(tl.load(seeds + row), ids, tl.load(positions + row), USE)
    tl.store(out + row * IDS + ids, word.to(tl.int32, bitcast=True))


@jit()
def _store_noise(out: tl.tensor, words: tl.tensor, COUNT: tl.constexpr) -> None:
    """Program (block): the noise of COUNT words, which are stored as int32 bits."""
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    word = tl.load(words + places).to(tl.uint32, bitcast=True)
    tl.store(out + places, philox.gumbel_noise(word))


def draw_many(row: torch.Tensor, count: int, temperature: float = 1.0, seed: int = 7) -> Any:
    """Return `count` ids drawn from one row of logits, 50,000 rows a launch."""
    ids = []
    for start in range(0, count, 50_000):
        positions = torch.arange(start, min(count, start + 50_000), device="cuda")
        heat = torch.full(positions.shape, temperature, device="cuda")
        seeds = torch.full_like(positions, seed)
        ids.append(gumbel_argmax(row.expand(len(positions), -1), heat, seeds, positions)[1])
    return torch.cat(ids)


@pytest.mark.parametrize("use", [0, 1, 2, 3])
def test_the_words_are_those_of_the_cpu_bit_for_bit(use: int) -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (512,))
    positions = torch.randint(0, 2**32, (512,))
    out = torch.zeros(512, 1024, dtype=torch.int32, device="cuda")
    _store_words[(512,)](out, seeds.cuda(), positions.cuda(), USE=use, IDS=1024)
    expected = philox.random_word_reference(
        seeds.numpy()[:, None], np.arange(1024), positions.numpy()[:, None], use
    )
    assert np.array_equal(out.cpu().numpy().view(np.uint32), expected.astype(np.uint32))


def test_the_noise_of_a_word_is_as_exact_as_it_says() -> None:
    """Every 1,021st word (a prime) and the ends; the quick logarithms of a GPU included."""
    words = torch.arange(0, 2**32, 1021)[: 4096 * 1024]
    words[-3:] = torch.tensor([2**32 - 1, 2**30, 2**30 - 1])
    bits = torch.where(words < 2**31, words, words - 2**32).int().cuda()
    out = torch.zeros(len(words), device="cuda")
    _store_noise[(4096,)](out, bits, COUNT=1024)
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -(-(-u).log1p()).log()
    error = (out.cpu().double() - exact).abs()
    print(f"\nlargest error {float(error.max()):.1e}")
    assert bool((error <= (4e-7 * exact.abs()).clamp(min=1.25e-6)).all())


def test_ids_agree_with_the_cpu_but_for_near_ties() -> None:
    """10**6 draws over 64 ids; at most 1 in 10**5 may differ, each a near-tie."""
    row = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 2
    count, num_different = 1_000_000, 0
    on_gpu = draw_many(row.cuda(), count, temperature=0.8).cpu()
    for start in range(0, count, 100_000):
        positions = torch.arange(start, start + 100_000)
        heat, seeds = torch.full((100_000,), 0.8), torch.full((100_000,), 7)
        logits = row.expand(100_000, -1)
        values, ids = gumbel_argmax_reference(logits, heat, seeds, positions)
        for at in (ids != on_gpu[start : start + 100_000]).nonzero()[:, 0].tolist():
            num_different += 1
            other = int(on_gpu[start + at])
            word = philox.random_word_reference(
                np.array([7]), np.array([other]), np.array([start + at])
            )
            score = float(row[other]) / 0.8 + float(philox.gumbel_noise_reference(word)[0])
            best = float(values[at])
            assert abs(best - score) <= NEAR_TIE * max(1.0, abs(best)), "not a near-tie"
    print(f"\n{num_different} of {count} ids differ from the CPU's, all near-ties")
    assert num_different <= count // 100_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ids", [1, 999, 1024, 4097, 151_936])
def test_a_batch_of_mixed_rows_agrees_with_the_cpu(num_ids: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(7, num_ids, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    heat = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0, 0.3, 1.5])
    rows = torch.arange(7)
    expected = gumbel_argmax_reference(logits, heat, rows - 3, rows * 777, 50)
    arguments = (heat.cuda(), (rows - 3).cuda(), (rows * 777).cuda(), 50)
    values, ids = gumbel_argmax(logits.cuda(), *arguments)
    assert ids.tolist() == expected[1].tolist()
    torch.testing.assert_close(values.cpu(), expected[0], rtol=1e-6, atol=2e-6)


def test_the_unlikely_tail_gets_its_share() -> None:
    """A head e^18 times as likely as each of 199,999 others: 500,000 draws, within 10 sigma."""
    counts = torch.full((200_000,), 2.0, dtype=torch.float64)
    counts[0] = round(math.exp(18))
    draws = draw_many(counts.log().float().cuda(), 500_000)
    tail = int((draws != 0).sum())
    print(f"\ntail drawn {tail} times; expected 3027.5, sigma 54.9")
    assert 2479 <= tail <= 3576


def test_a_whole_vocabulary_is_drawn_by_its_probabilities() -> None:
    """Counts 500 to 1499, 4,000,000 draws: chi-square below df + 10 sqrt(2 df)."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(500, 1500, (4097,), generator=generator).double()
    draws = torch.bincount(draw_many(counts.log().float().cuda(), 4_000_000), minlength=4097)
    expected = counts / counts.sum() * 4_000_000
    statistic = float(((draws.cpu().double() - expected) ** 2 / expected).sum())
    print(f"\nchi-square {statistic:.0f} with 4096 degrees of freedom")
    assert float((draws > 0).float().mean()) > 0.99
    assert statistic < 4096 + 10 * math.sqrt(2 * 4096)


def test_nans_and_impossible_ids_are_never_drawn() -> None:
    logits = torch.full((3, 999), float("nan"), device="cuda")
    logits[1] = float("-inf")
    logits[2, 1::2] = float("-inf")
    logits[2, 998] = -40.0
    rows = torch.arange(3, device="cuda")
    for heat in (0.0, 1.0):
        ids = gumbel_argmax(logits, torch.full((3,), heat, device="cuda"), rows, rows)[1]
        assert ids.tolist() == [0, 0, 998]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 151_936, dtype=torch.bfloat16, device="cuda")
    logits[0, [151_935, 1024, 70_000]] = 5.0
    zeros = torch.zeros(2, dtype=torch.int64, device="cuda")
    values, ids = gumbel_argmax(logits, torch.zeros(2, device="cuda"), zeros, zeros)
    assert (values.tolist(), ids.tolist()) == ([5.0, 0.0], [1024, 0])


def test_a_row_beyond_two_to_the_31_elements_is_read_where_it_lies() -> None:
    num_ids = 151_936
    rows = 2**31 // num_ids + 2
    logits = torch.zeros(rows, num_ids, dtype=torch.bfloat16, device="cuda")
    logits[-1, 123_456] = 1.0
    zeros = torch.zeros(rows, dtype=torch.int64, device="cuda")
    ids = gumbel_argmax(logits, torch.zeros(rows, device="cuda"), zeros, zeros)[1]
    assert int(ids[-1]) == 123_456
    assert int(ids[:-1].abs().max()) == 0


def test_the_kept_set_is_the_cpus_and_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(40, 32_000, generator=torch.Generator().manual_seed(0)) * 3
    heat, k = torch.full((40,), 0.7), torch.tensor([0, 50, 1, 40_000]).repeat(10)
    p = torch.tensor([0.9, 1.0, 0.5, 0.95, 0.9999999]).repeat(8)
    on_cpu = mask_top_k_top_p(logits, heat, k, p).isfinite()
    arguments = (logits.cuda(), heat.cuda(), k.cuda(), p.cuda())
    together = mask_top_k_top_p(*arguments).isfinite()
    for row in range(40):
        alone = mask_top_k_top_p(*(a[row : row + 1] for a in arguments)).isfinite()
        assert torch.equal(alone[0], together[row])
    # exp differs in its last bits, so the last id that reaches p may be one more or one less
    assert int((together.cpu() != on_cpu).sum(-1).max()) <= 1
