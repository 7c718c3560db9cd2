"""Philox's words are right and equal everywhere; the noise made of them is right at its ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE

from nanorunner.kernels import philox
from nanorunner.kernels.triton_support import jit, tl

ONES = 0xFFFFFFFF


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
    """The noise of COUNT words, which are stored as int32 bits."""
    places = tl.arange(0, COUNT)
    word = tl.load(words + places).to(tl.uint32, bitcast=True)
    tl.store(out + places, philox.gumbel_noise(word))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_the_words_are_those_of_the_published_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    def arrays(values: list[int]) -> tuple[philox.UInt64, ...]:
        return tuple(np.array([value], np.uint64) for value in values)

    words = philox.philox_reference(arrays(counter), arrays(key))
    assert [int(word[0]) for word in words] == expected


def test_the_first_words_of_a_seed_never_change() -> None:
    words = philox.random_word_reference(np.array([0xABCD]), np.arange(3), np.array([0]))
    assert [f"{word:08x}" for word in words] == ["57bb2601", "88b4b834", "ebbaa011"]


@pytest.mark.parametrize("use", [philox.USE_SAMPLE, 3])
def test_triton_and_the_reference_give_the_same_words(use: int) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0])
    positions = torch.tensor([0, 5, 2**31, 2**32 - 1, 40_959, 131_071])
    out = torch.zeros(6, 64, dtype=torch.int32, device=DEVICE)
    _store_words[(6,)](out, seeds.to(DEVICE), positions.to(DEVICE), USE=use, IDS=64)
    out = out.cpu()
    expected = philox.random_word_reference(
        seeds.numpy()[:, None], np.arange(64), positions.numpy()[:, None], use
    )
    assert np.array_equal(out.numpy().view(np.uint32), expected.astype(np.uint32))


def test_every_bit_of_seed_position_id_and_use_changes_the_word() -> None:
    def word(seed: int, vocab_id: int, position: int, use: int) -> int:
        return int(
            philox.random_word_reference(
                np.array([seed]), np.array([vocab_id]), np.array([position]), use
            )[0]
        )

    seen = {word(7, 7, 7, 0)}
    seen |= {word(7 ^ 1 << bit, 7, 7, 0) for bit in range(63)}
    seen |= {word(7, 7 ^ 1 << bit, 7, 0) for bit in range(32)}
    seen |= {word(7, 7, 7 ^ 1 << bit, 0) for bit in range(32)}
    seen |= {word(7, 7, 7, use) for use in (1, 2, 3)}
    assert len(seen) == 1 + 63 + 32 + 32 + 3


def test_the_noise_range_is_the_stated_one() -> None:
    ends = philox.gumbel_noise_reference(np.array([0, ONES], np.uint64))
    assert ends[0] == pytest.approx(33 * math.log(2), abs=1e-5)
    assert ends[1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)
    assert ends[1] > philox.MIN_NOISE
    assert ends[0] < philox.MAX_NOISE


def test_the_largest_noise_is_as_fine_as_in_float64() -> None:
    """Tokens far below the best one win by these words alone; a coarse grid would starve them."""
    words = np.concatenate([np.arange(1000), 2 ** np.arange(10, 32)])
    exact = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2.0**32))
    noise = philox.gumbel_noise_reference(words.astype(np.uint64))
    assert np.abs(noise - exact).max() < 5e-6
    assert np.all(np.diff(noise[:1000]) < 0), "1000 words, 1000 different values"


def test_the_noise_of_a_word_is_as_exact_as_it_says() -> None:
    """In the interpreter half of what gumbel_noise promises: its logarithm is exact there."""
    quarter = 2**30  # as words: where the two ways to the exponential meet
    edges = [0, 1, 2, 127, 128, 2**24, 2**31 - 1, 2**31, ONES - 256, ONES]
    edges += [quarter + step for step in (-512, -256, -128, -1, 0, 1, 128, 256, 512)]
    words = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**32, 16384 - len(edges))])
    out = torch.zeros(16384, device=DEVICE)
    bits = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    _store_noise[(1,)](out, bits.to(DEVICE), COUNT=16384)
    out = out.cpu()
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    exact = -np.log(-np.log1p(-np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64)))
    bound = np.maximum(1.25e-6, 4e-7 * np.abs(exact)) / (2 if DEVICE.type == "cpu" else 1)
    assert np.all(np.abs(out.numpy() - exact) <= bound)
    expected = philox.gumbel_noise_reference(words.astype(np.uint64))
    np.testing.assert_allclose(out.numpy(), expected, rtol=4e-7, atol=1.5e-6)


def test_the_noise_follows_the_gumbel_distribution() -> None:
    """2**20 words, five thresholds, each within 5 standard deviations."""
    count = 1 << 20
    words = philox.random_word_reference(np.array([3]), np.arange(count), np.array([11]))
    noise = philox.gumbel_noise_reference(words)
    for threshold in (-1.5, 0.0, 2.0, 5.0, 8.0):
        share = -math.expm1(-math.exp(-threshold))
        sigma = math.sqrt(count * share * (1 - share))
        assert abs((noise > threshold).sum() - count * share) < 5 * sigma
