"""Sending and awaiting data inside a Triton kernel; peer_ring.py says how it travels.

Two rules keep the threads of a program together. Whether it looks again is decided by a reduction
over all threads, never by a value that each loads for itself: memory may change in between, and
threads that part ways would wait for each other for ever. And every thread has read the counter
before one of them moves it on, hence the barrier in finish().

A word is 8 bytes: four numbers of a 16-bit type, two of float32, or one int64.
"""

from __future__ import annotations

from nanorunner.kernels import peer_ring
from nanorunner.kernels.triton_support import constant, jit, tl

try:
    from triton.language.extra.cuda import globaltimer
except ImportError:  # no Triton: jit() refuses every launch
    globaltimer = None


NUM_BUFFERS, STRIPE = constant(peer_ring.NUM_BUFFERS), constant(peer_ring.STRIPE)
CALL_SHARES = constant(peer_ring.CALL_SHARES)
COUNTER, GIVE_UP_AFTER = constant(peer_ring.COUNTER), constant(peer_ring.GIVE_UP_AFTER)
WORDS, PEERS = constant(peer_ring.WORDS), constant(peer_ring.PEERS)
ABORT, ERROR = constant(peer_ring.ABORT), constant(peer_ring.ERROR)
PACKETS = constant(2)  # in a slot
LOW_HALF = constant(2**32 - 1)
TAG_BIT = constant(-(2**63))  # no tag is 0, which means "wiped"


@jit()
def begin(table: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    """Return (call, mark, place): the call's number, its packets' high half, its first slot."""
    call = tl.load(table + COUNTER) // CALL_SHARES
    return call, (call << 32) | TAG_BIT, call % NUM_BUFFERS * CAPACITY


@jit()
def wipe(table: tl.tensor, call: tl.tensor, RANK: tl.constexpr, CAPACITY: tl.constexpr) -> None:
    """Let program 0 wipe one stripe of the last call's buffer, while packets are under way."""
    if tl.program_id(0) == 0:
        stripe = call // NUM_BUFFERS % (CAPACITY // STRIPE)
        place = (call + NUM_BUFFERS - 1) % NUM_BUFFERS * CAPACITY + stripe * STRIPE
        first = slots_of(table, RANK, place)
        tl.store(first + tl.arange(0, STRIPE * PACKETS), tl.zeros([STRIPE * PACKETS], tl.int64))


@jit()
def finish(table: tl.tensor) -> None:
    """Move the counter on by this program's part of a call; the last thing a program does."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    part = CALL_SHARES // programs
    if program == 0:
        part += CALL_SHARES % programs
    tl.debug_barrier()
    tl.atomic_add(table + COUNTER, part.to(tl.int64), sem="relaxed", scope="gpu")


@jit()
def slots_of(table: tl.tensor, rank: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Return pointers to the first packets of a rank's slots at `place`, a number or a block."""
    return tl.load(table + PEERS + rank).to(tl.pointer_type(tl.int64)) + place * PACKETS


@jit()
def send(
    slots: tl.tensor,
    word: tl.tensor,
    mark: tl.tensor,
    inside: tl.tensor,
    IS_DEVICE: tl.constexpr,
) -> None:
    """Store int64 words into a rank's slots, where `inside` says so."""
    low, high = mark | (word & LOW_HALF), mark | ((word >> 32) & LOW_HALF)
    if IS_DEVICE:
        # A plain store is "weak": PTX does not say that another device ever sees it whole. Of the
        # vector's two elements each is stored at once, and that is all a packet needs.
        tl.inline_asm_elementwise(
            """{
            .reg .pred inside;
            setp.ne.s32 inside, $4, 0;
            @inside st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,l,l,r",
            [slots, low, high, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(slots, low, mask=inside)
        tl.store(slots + 1, high, mask=inside)


@jit()
def look(slots: tl.tensor, mark: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return (word, is_here) of slots. Volatile: in PTX's terms relaxed, over the whole system."""
    low = tl.load(slots, mask=inside, other=0, volatile=True)
    high = tl.load(slots + 1, mask=inside, other=0, volatile=True)
    is_here = ((low >> 32) == (mark >> 32)) & ((high >> 32) == (mark >> 32))
    return (high << 32) | (low & LOW_HALF), is_here


@jit()
def clock(looks: tl.tensor, IS_DEVICE: tl.constexpr) -> tl.tensor:
    """Return nanoseconds on a GPU, the number of looks in the interpreter; int64."""
    now = globaltimer() if IS_DEVICE else looks.to(tl.int64)
    return now


@jit()
def gives_up(
    table: tl.tensor,
    looks: tl.tensor,
    since: tl.tensor,
    BLOCK: tl.constexpr,
    CHECK_EVERY: tl.constexpr,
    IS_DEVICE: tl.constexpr,
) -> tl.tensor:
    """Return 1 when the program is to wait no longer, else 0: the same for all its threads.

    If so, says it in the error word. Reads words and clock at every CHECK_EVERY-th look alone, and
    in one thread: a program that asks keeps the other ranks waiting, so they ask in turn. Were
    asking slower than the time between two questions, they would keep each other at it for ever.
    """
    is_over = tl.full((), 0, tl.int32)
    if looks % CHECK_EVERY == 0:
        lane = tl.arange(0, BLOCK)  # at least one a thread: of a smaller block each warp has a copy
        is_first = lane == 0
        words = tl.load(table + WORDS).to(tl.pointer_type(tl.int32)) + lane * 0
        abort = tl.load(words + ABORT, mask=is_first, other=0, volatile=True)
        error = tl.load(words + ERROR, mask=is_first, other=0, volatile=True)
        waited = tl.zeros([BLOCK], tl.int64) + (clock(looks, IS_DEVICE) - since)
        is_late = waited > tl.load(table + GIVE_UP_AFTER)
        over = is_first & ((abort != 0) | (error != 0) | is_late)
        tl.store(words + ERROR, tl.full([BLOCK], 1, tl.int32), mask=over)
        is_over = tl.max(over.to(tl.int32), axis=0)
    return is_over


@jit()
def numbers(word: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Return the four numbers in each word as float32; of a 32-bit TYPE its two, twice."""
    if TYPE.primitive_bitwidth == 32:
        a = word.to(tl.int32).to(tl.float32, bitcast=True)
        b = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        c, d = a, b
    else:
        a = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        b = (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        c = (word >> 32).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        d = (word >> 48).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return a, b, c, d


@jit()
def rounded_word(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, TYPE: tl.constexpr
) -> tl.tensor:
    """Return the words of four float32 numbers rounded to TYPE; of a 32-bit TYPE, of a and b."""
    if TYPE.primitive_bitwidth == 32:
        low = a.to(tl.int32, bitcast=True)
        high = b.to(tl.int32, bitcast=True)
    else:
        low = half_word(a, b, TYPE)
        high = half_word(c, d, TYPE)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & LOW_HALF)


@jit()
def half_word(a: tl.tensor, b: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Return the int32 made of two float32 numbers rounded to a 16-bit TYPE."""
    low = a.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32)
    high = b.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return (high << 16) | (low & 0xFFFF)


@jit()
def sum_of_ranks(
    table: tl.tensor,
    mine: tl.tensor,
    slots: tl.tensor,
    inside: tl.tensor,
    mark: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHECK_EVERY: tl.constexpr,
    IS_DEVICE: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Wait for all ranks' words and return those of their sums: rank order, float32, then TYPE.

    mine: this rank's own words. slots: where rank 0's lie; those of rank r are r * STRIDE further.
    Every look loads all ranks' packets at once, so the wait ends one look after the last arrival.
    """
    zeros = tl.zeros(mine.shape, tl.float32)
    sum_a, sum_b, sum_c, sum_d = zeros, zeros, zeros, zeros
    looks = tl.full((), 0, tl.int32)
    missing = tl.full((), 1, tl.int32)
    since = clock(looks, IS_DEVICE)
    while missing != 0:
        looks += 1
        is_missing = tl.zeros(mine.shape, tl.int1)
        for rank in tl.static_range(RANKS):
            word = mine
            if rank != RANK:
                word, is_here = look(slots + rank * STRIDE * PACKETS, mark, inside)
                is_missing |= ~is_here
            a, b, c, d = numbers(word, TYPE)
            if rank == 0:
                sum_a, sum_b, sum_c, sum_d = a, b, c, d
            else:
                sum_a += a
                sum_b += b
                sum_c += c
                sum_d += d
        missing = tl.max((is_missing & inside).to(tl.int32), axis=0)
        missing &= 1 - gives_up(table, looks, since, mine.shape[0], CHECK_EVERY, IS_DEVICE)
    return rounded_word(sum_a, sum_b, sum_c, sum_d, TYPE)
