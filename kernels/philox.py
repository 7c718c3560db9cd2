"""Random numbers that every rank, row, batch and device agrees on: Philox4x32-10.

Philox is a function, not a stream: 10 rounds turn a 128-bit counter and a 64-bit key into four
32-bit words. So a token's noise depends on what the counter names and on nothing else.

    key      the request's 64-bit seed, low word first
    counter  (vocabulary id, position of the input token, use, 0)
    word     the first of the four output words

sample.py draws with these. The words are equal bit for bit on a CPU, in the Triton interpreter and
on a GPU; the noise made of them differs in its last bits, because libraries round log differently.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.triton_support import jit, tl

# Which draw of a (request, position) this is. There is one: speculation verifies by sampling
# (kernels/accept_drafts.py), and a draft model draws with the noise of the draw that judges it.
USE_SAMPLE = 0

# What gumbel_noise can return, rounded outwards; the ends come from words 2**32 - 1 and 0.
MIN_NOISE = -2.82
MAX_NOISE = 22.88

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]


@jit()
def philox(
    counter_0: tl.tensor,
    counter_1: tl.tensor,
    counter_2: tl.tensor,
    counter_3: tl.tensor,
    key_0: tl.tensor,
    key_1: tl.tensor,
) -> tl.tensor:
    """Return the four output words; every argument is a uint32 scalar or block."""
    ROUND_A: tl.constexpr = 0xD2511F53
    ROUND_B: tl.constexpr = 0xCD9E8D57
    KEY_A: tl.constexpr = 0x9E3779B9
    KEY_B: tl.constexpr = 0xBB67AE85
    for _ in tl.static_range(10):
        high_a = tl.umulhi(counter_0, ROUND_A)
        low_a = tl.mul(counter_0, ROUND_A, sanitize_overflow=False)
        high_b = tl.umulhi(counter_2, ROUND_B)
        low_b = tl.mul(counter_2, ROUND_B, sanitize_overflow=False)
        counter_0 = high_b ^ counter_1 ^ key_0
        counter_1 = low_b
        counter_2 = high_a ^ counter_3 ^ key_1
        counter_3 = low_a
        key_0 = tl.add(key_0, KEY_A, sanitize_overflow=False)
        key_1 = tl.add(key_1, KEY_B, sanitize_overflow=False)
    return counter_0, counter_1, counter_2, counter_3


@jit()
def random_word(
    seed: tl.tensor, vocab_ids: tl.tensor, position: tl.tensor, USE: tl.constexpr
) -> tl.tensor:
    """Return one uint32 for each of vocab_ids [BLOCK]; seed and position are int64 scalars."""
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    counter_1 = position.to(tl.uint32)
    counter_2 = tl.full((), USE, tl.uint32)
    counter_3 = tl.full((), 0, tl.uint32)
    # position, use and key stay scalars: the compiler then computes half of the first rounds once
    word, _, _, _ = philox(vocab_ids.to(tl.uint32), counter_1, counter_2, counter_3, key_0, key_1)
    return word


@jit()
def gumbel_noise(word: tl.tensor) -> tl.tensor:
    """Return -log(-log1p(-u)) in float32, u being the uint32 word as a number in (0, 1).

    Large noise decides who wins. Here it comes from u near 0, where float32 is dense; the textbook
    form -log(-log(u)) takes it from u near 1, where it is coarse, and starves unlikely tokens.
    """
    WORD_TO_UNIFORM: tl.constexpr = 2.0**-32
    MAX_UNIFORM: tl.constexpr = 1.0 - 2.0**-24  # the largest float32 below 1; log1p(-1) is -inf
    u = tl.minimum((word.to(tl.float32) + 0.5) * WORD_TO_UNIFORM, MAX_UNIFORM)
    # Triton has no log1p that the interpreter knows. log(w) is off by what rounding w lost, and
    # the factor u / (1 - w), whose 1 - w is exact, puts that right.
    w = 1.0 - u
    is_one = w == 1.0
    exponential = tl.where(is_one, u, -tl.log(w) * (u / tl.where(is_one, 1.0, 1.0 - w)))
    return -tl.log(exponential)


def philox_reference(counter: tuple[UInt64, ...], key: tuple[UInt64, ...]) -> tuple[UInt64, ...]:
    """Return the four output words, 32 bits in each uint64.

    counter has four arrays and key two; they broadcast, and their high 32 bits are ignored.
    """
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    round_a, round_b = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    key_a, key_b = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
    c0, c1, c2, c3 = (c & mask for c in counter)
    k0, k1 = (k & mask for k in key)
    for _ in range(10):
        a, b = c0 * round_a, c2 * round_b
        # the terms that have few elements first: they broadcast only once
        c0, c1 = (b >> half) ^ (c1 ^ k0), b & mask
        c2, c3 = (a >> half) ^ (c3 ^ k1), a & mask
        k0, k1 = (k0 + key_a) & mask, (k1 + key_b) & mask
    return c0, c1, c2, c3


def random_word_reference(
    seed: Int64, vocab_ids: Int64, position: Int64, use: int = USE_SAMPLE
) -> UInt64:
    """Return one 32-bit word for each (seed, vocabulary id, position); the arrays broadcast."""
    bits = seed.view(np.uint64)
    ids, positions = vocab_ids.view(np.uint64), position.view(np.uint64)
    constant = np.array([use], np.uint64)
    counter = (ids, positions, constant, np.zeros_like(constant))
    return philox_reference(counter, (bits, bits >> np.uint64(32)))[0]


def gumbel_noise_reference(word: UInt64) -> Float32:
    """Return the noise of each word, as gumbel_noise does."""
    u = (word.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = np.minimum(u, np.float32(1.0 - 2.0**-24))
    # torch's log1p runs on vector units, numpy's does not
    noise: Float32 = -torch.log(-torch.log1p(-torch.from_numpy(u))).numpy()
    return noise
