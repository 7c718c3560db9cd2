"""Random numbers that every rank, row, batch and device agrees on: Philox4x32-10.

Philox is a function, not a stream: 10 rounds turn a 128-bit counter and a 64-bit key into four
32-bit words. So a token's noise depends on what the counter names and on nothing else.

    key      the request's 64-bit seed, low word first
    counter  (vocabulary id, position of the input token, use, 0)
    word     the first of the four output words

sample.py draws with these. The words are equal bit for bit on a CPU, in the Triton interpreter and
on a GPU; the noise made of them differs in its last bits, because libraries round log differently
and a GPU takes its quick logarithm. What a draw costs on a GPU is arithmetic, 152,000 ids a row:
so every step here is the fewest instructions that keep the noise as exact as a float32 score is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.triton_support import IS_INTERPRETED, jit, tl

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
        # one wide product: a GPU has an instruction that returns both halves
        product_a = counter_0.to(tl.uint64) * ROUND_A
        product_b = counter_2.to(tl.uint64) * ROUND_B
        counter_0 = (product_b >> 32).to(tl.uint32) ^ counter_1 ^ key_0
        counter_2 = (product_a >> 32).to(tl.uint32) ^ counter_3 ^ key_1
        counter_1 = product_b.to(tl.uint32)
        counter_3 = product_a.to(tl.uint32)
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

    Error, u being given: 1.25e-6 at most, or 4e-7 of the noise where that is more: no more than
    rounding a score of 16 costs.
    """
    WORD_TO_UNIFORM: tl.constexpr = 2.0**-32
    MAX_UNIFORM: tl.constexpr = 1.0 - 2.0**-24  # the largest float32 below 1; log1p(-1) is -inf
    LOG_2: tl.constexpr = 0.6931471805599453
    u = tl.minimum((word.to(tl.float32) + 0.5) * WORD_TO_UNIFORM, MAX_UNIFORM)
    # Above 1/4 a quick logarithm's error, 2**-22, is small beside the logarithm itself.
    exponential = quick_log2(1.0 - u) * -LOG_2
    # Below it a polynomial: u + u**2 (c0 + c1 u + ...), the c's fitted for the least relative
    # error of the whole on [0, 1/4], which is 1.1e-7 in float32. tl.fma, here and where the noise
    # is added: no compiler is then free to round otherwise in another kernel.
    series = tl.fma(u, 0.3357096314430237, 0.1467033326625824)
    series = tl.fma(series, u, 0.25711020827293396)
    series = tl.fma(series, u, 0.33293071389198303)
    series = tl.fma(series, u, 0.5000072717666626)
    exponential = tl.where(u < 0.25, tl.fma(series * u, u, u), exponential)
    return quick_log2(exponential) * -LOG_2


@jit()
def quick_log2(x: tl.tensor) -> tl.tensor:
    """Return log2 of float32 x > 0 within 2**-22, or 2**-22 of the result where that is more.

    One instruction on a GPU (PTX lg2.approx); the exact function in the interpreter.
    """
    if IS_INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@jit()
def noisy_scores(
    logits: tl.tensor,
    heat: tl.tensor,
    seed: tl.tensor,
    ids: tl.tensor,
    position: tl.tensor,
    USE: tl.constexpr,
) -> tl.tensor:
    """Return logits / heat + noise in float32, shapes that broadcast: a kernel's only way to it.

    logits float32; ids int32 or int64; heat float32, seed and position int64: scalars or columns.
    """
    noise = gumbel_noise(random_word(seed, ids, position, USE))
    # a division takes ten instructions an id; the product may differ from it in the last bit
    return tl.fma(logits, 1.0 / heat, noise)


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
