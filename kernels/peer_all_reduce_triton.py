"""The kernels of peer_all_reduce.py. Each one: begin, send, await and add up, finish.

SENDS, SUMS and GATHERS cut a kernel in steps, for a test that holds all ranks in one process: it
runs everybody's first step before anybody's second. In serving a launch has all its steps.
"""

from __future__ import annotations

from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.peer_packets import (
    PACKETS,
    begin,
    clock,
    finish,
    gives_up,
    look,
    numbers,
    rounded_word,
    send,
    slots_of,
    sum_of_ranks,
    wipe,
)
from nanorunner.kernels.triton_support import jit, tl


@jit(counts=("num_words",), tables=("x",))
def one_shot_kernel(
    x: tl.tensor,
    table: tl.tensor,
    num_words: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHECK_EVERY: tl.constexpr,
    IS_DEVICE: tl.constexpr,
    SENDS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Sum x over the ranks in place: every rank sends all to all, and adds all up."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    STRIDE: tl.constexpr = CAPACITY // RANKS
    call, mark, place = begin(table, CAPACITY)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_words
    words = x.to(tl.pointer_type(tl.int64)) + index
    mine = tl.load(words, mask=inside, other=0)
    if SENDS:
        # Each rank begins with the one after it, so that nobody is sent everything at once.
        for step in tl.static_range(1, RANKS):
            slots = slots_of(table, (RANK + step) % RANKS, place + RANK * STRIDE + index)
            send(slots, mine, mark, inside, IS_DEVICE)
    if SUMS:
        wipe(table, call, RANK, CAPACITY)
        total = sum_of_ranks(
            table,
            mine,
            slots_of(table, RANK, place + index),
            inside,
            mark,
            RANK,
            RANKS,
            STRIDE,
            CHECK_EVERY,
            IS_DEVICE,
            x.dtype.element_ty,
        )
        tl.store(words, total, mask=inside)
        finish(table)


@jit(counts=("num_words", "part_words"), tables=("x",))
def two_shot_kernel(
    x: tl.tensor,
    table: tl.tensor,
    num_words: tl.tensor,
    part_words: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHECK_EVERY: tl.constexpr,
    IS_DEVICE: tl.constexpr,
    SENDS: tl.constexpr,
    SUMS: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Sum x over the ranks in place: rank r adds up part r and sends the sum to all.

    Program p has tile p of every part, so it needs nothing of the other programs. The sums use the
    second half of the buffer.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = CAPACITY // 2
    STRIDE: tl.constexpr = HALF // RANKS
    call, mark, place = begin(table, CAPACITY)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = x.to(tl.pointer_type(tl.int64))
    sent = place + RANK * STRIDE + index
    own_index = RANK * part_words + index
    own_inside = (index < part_words) & (own_index < num_words)
    if SENDS:
        for step in tl.static_range(1, RANKS):
            rank = (RANK + step) % RANKS
            its_index = rank * part_words + index
            its_inside = (index < part_words) & (its_index < num_words)
            word = tl.load(words + its_index, mask=its_inside, other=0)
            send(slots_of(table, rank, sent), word, mark, its_inside, IS_DEVICE)
    if SUMS:
        wipe(table, call, RANK, CAPACITY)
        total = sum_of_ranks(
            table,
            tl.load(words + own_index, mask=own_inside, other=0),
            slots_of(table, RANK, place + index),
            own_inside,
            mark,
            RANK,
            RANKS,
            STRIDE,
            CHECK_EVERY,
            IS_DEVICE,
            x.dtype.element_ty,
        )
        for step in tl.static_range(1, RANKS):
            slots = slots_of(table, (RANK + step) % RANKS, HALF + sent)
            send(slots, total, mark, own_inside, IS_DEVICE)
        tl.store(words + own_index, total, mask=own_inside)
    if GATHERS:
        received = slots_of(table, RANK, place + HALF + index)
        looks = tl.full((), 0, tl.int32)
        missing = tl.full((), 1, tl.int32)
        since = clock(looks, IS_DEVICE)
        while missing != 0:
            looks += 1
            is_missing = tl.zeros([BLOCK], tl.int1)
            for step in tl.static_range(1, RANKS):
                rank = (RANK + step) % RANKS
                its_index = rank * part_words + index
                its_inside = (index < part_words) & (its_index < num_words)
                word, is_here = look(received + rank * STRIDE * PACKETS, mark, its_inside)
                # What is here is stored anew at every look: one loop, whoever comes last.
                tl.store(words + its_index, word, mask=its_inside & is_here)
                is_missing |= its_inside & ~is_here
            missing = tl.max(is_missing.to(tl.int32), axis=0)
            missing &= 1 - gives_up(table, looks, since, BLOCK, CHECK_EVERY, IS_DEVICE)
        finish(table)


@jit()
def add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHECK_EVERY: tl.constexpr,
    IS_DEVICE: tl.constexpr,
    SENDS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Sum a row of x over the ranks, add it to residual in place, and store the norm of that.

    One program a row. Roundings are those of an all-reduce in x's type and rms_norm.py after it.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    ROW_WORDS: tl.constexpr = HIDDEN * TYPE.primitive_bitwidth // 64
    STRIDE: tl.constexpr = CAPACITY // RANKS
    WORD: tl.constexpr = tl.pointer_type(tl.int64)
    if USE_PDL:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < ROW_WORDS
    gains = tl.load(weight.to(WORD) + columns, mask=inside, other=0)  # constant: before the wait
    if USE_PDL:
        gdc_wait()
    call, mark, place = begin(table, CAPACITY)
    index = tl.program_id(0) * ROW_WORDS + columns
    mine = tl.load(x.to(WORD) + index, mask=inside, other=0)
    if SENDS:
        for step in tl.static_range(1, RANKS):
            slots = slots_of(table, (RANK + step) % RANKS, place + RANK * STRIDE + index)
            send(slots, mine, mark, inside, IS_DEVICE)
    if SUMS:
        wipe(table, call, RANK, CAPACITY)
        stream = tl.load(residual.to(WORD) + index, mask=inside, other=0)
        summed = sum_of_ranks(
            table,
            mine,
            slots_of(table, RANK, place + index),
            inside,
            mark,
            RANK,
            RANKS,
            STRIDE,
            CHECK_EVERY,
            IS_DEVICE,
            TYPE,
        )
        a, b, c, d = numbers(summed, TYPE)
        old_a, old_b, old_c, old_d = numbers(stream, TYPE)
        total = rounded_word(old_a + a, old_b + b, old_c + c, old_d + d, TYPE)
        tl.store(residual.to(WORD) + index, total, mask=inside)
        a, b, c, d = numbers(total, TYPE)
        squares = a * a + b * b
        if TYPE.primitive_bitwidth == 16:
            squares += c * c + d * d
        scale = tl.rsqrt(tl.sum(tl.where(inside, squares, 0.0), axis=0) / HIDDEN + eps)
        gain_a, gain_b, gain_c, gain_d = numbers(gains, TYPE)
        normed = rounded_word(
            a * scale * gain_a, b * scale * gain_b, c * scale * gain_c, d * scale * gain_d, TYPE
        )
        tl.store(out.to(WORD) + index, normed, mask=inside)
        finish(table)


@jit(counts=("num_keys",), tables=("keys",))
def max_kernel(
    keys: tl.tensor,
    table: tl.tensor,
    num_keys: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHECK_EVERY: tl.constexpr,
    IS_DEVICE: tl.constexpr,
    SENDS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Replace int64 keys by their maxima over the ranks."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    STRIDE: tl.constexpr = CAPACITY // RANKS
    call, mark, place = begin(table, CAPACITY)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_keys
    mine = tl.load(keys + index, mask=inside, other=0)
    if SENDS:
        for step in tl.static_range(1, RANKS):
            slots = slots_of(table, (RANK + step) % RANKS, place + RANK * STRIDE + index)
            send(slots, mine, mark, inside, IS_DEVICE)
    if SUMS:
        wipe(table, call, RANK, CAPACITY)
        received = slots_of(table, RANK, place + index)
        best = mine
        looks = tl.full((), 0, tl.int32)
        missing = tl.full((), 1, tl.int32)
        since = clock(looks, IS_DEVICE)
        while missing != 0:
            looks += 1
            best = mine
            is_missing = tl.zeros([BLOCK], tl.int1)
            for step in tl.static_range(1, RANKS):
                rank = (RANK + step) % RANKS
                key, is_here = look(received + rank * STRIDE * PACKETS, mark, inside)
                is_missing |= ~is_here
                best = tl.maximum(best, key)
            missing = tl.max((is_missing & inside).to(tl.int32), axis=0)
            missing &= 1 - gives_up(table, looks, since, BLOCK, CHECK_EVERY, IS_DEVICE)
        tl.store(keys + index, best, mask=inside)
        finish(table)
