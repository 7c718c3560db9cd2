"""Device functions that find a cut in a row of keys: the least key whose weight in front is small.

Keys order the tokens of a row, the largest first (token_keys.py). Given a weight of each token and
a target, the cut is the last token for which the weight of all larger keys is below the target.
top_k_top_p_triton.py runs this, a program a row:

    keys   low .......... t1 ...... t2 ...... t3 .......... high     the cut lies in (low, high]
    narrow    one pass over the row: count and weight above each t; keep the part with the cut,
              until its tokens fit into CAPACITY
    collect   one pass: copy these tokens' keys into the row's pool
    finish    halve by bits; the row is no longer read

Weights are integers, so no sum depends on the order of its terms.
"""

from __future__ import annotations

from nanorunner.kernels.token_keys import key_value, token_key
from nanorunner.kernels.triton_support import jit, tl


@jit()
def keys_at(
    logits: tl.tensor,
    start: tl.tensor,
    num_ids: tl.tensor,
    LOWEST: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the keys [LANES, WIDTH] of the row's ids from `start` on, LOWEST behind its end."""
    ids = start + tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = ids < num_ids
    values = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(inside, token_key(values, ids.to(tl.int64)), LOWEST)


@jit()
def key_weight(
    keys: tl.tensor,
    best: tl.tensor,
    inverse_heat: tl.tensor,
    WEIGHT_ONE: tl.constexpr,
    IS_MASS: tl.constexpr,
) -> tl.tensor:
    """Return int64 weights: 1, or the probability relative to the best token, in WEIGHT_ONEs."""
    if IS_MASS:
        value = key_value(keys)
        top = key_value(best)
        share = tl.exp((value - top) * inverse_heat)
        share = tl.where(value == top, 1.0, share)  # both may be infinite
        return (share * WEIGHT_ONE + 0.5).to(tl.int64)
    else:
        return tl.full(keys.shape, 1, tl.int64)


@jit()
def share_of(total: tl.tensor, p: tl.tensor) -> tl.tensor:
    """Return the least integer that is at least p * total, and at least 1; total int64."""
    product = p.to(tl.float64) * total.to(tl.float64)
    whole = product.to(tl.int64)
    return tl.maximum(tl.where(whole.to(tl.float64) < product, whole + 1, whole), 1)


@jit()
def middle_key(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the int64 halfway, rounded down; the sum of two keys would overflow."""
    return (low & high) + ((low ^ high) >> 1)


@jit()
def key_below(value: tl.tensor, LOWEST: tl.constexpr) -> tl.tensor:
    """Return the largest key, but at least LOWEST, below those of all tokens of this value."""
    zero_word = tl.full((), 0xFFFFFFFF, tl.int64)
    return tl.maximum(token_key(value, zero_word) - 1, LOWEST)


@jit()
def bound_of_top_k(lane_best: tl.tensor, k: tl.tensor, LOWEST: tl.constexpr) -> tl.tensor:
    """Return a key that at least k tokens exceed, or LOWEST; lane_best [LANES] are tokens' keys.

    The k-th largest of some of a row's keys is no larger than the k-th largest of all.
    """
    low = tl.full((), LOWEST, tl.int64)
    high = tl.max(lane_best, axis=0) + 1
    count = k + 1
    while (low + 1 < high) & (count != k):
        middle = middle_key(low, high)
        count = tl.sum((lane_best >= middle).to(tl.int32), axis=0)
        if count >= k:
            low = middle
        else:
            high = middle
    return tl.maximum(low - 1, LOWEST)


@jit()
def narrow(
    logits: tl.tensor,
    num_ids: tl.tensor,
    best: tl.tensor,
    inverse_heat: tl.tensor,
    low: tl.tensor,
    t1: tl.tensor,
    t2: tl.tensor,
    t3: tl.tensor,
    target: tl.tensor,
    p: tl.tensor,
    LOWEST: tl.constexpr,
    WEIGHT_ONE: tl.constexpr,
    IS_MASS: tl.constexpr,
    CAPACITY: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return (low, high, before, target): the cut lies in (low, high], which fits into CAPACITY.

    It begins with (low, best], cut at t1 <= t2 <= t3. before: weight above high. target < 0 stands
    for p of the weight in (low, best].
    """
    high = best
    before = tl.full((), 0, tl.int64)
    count = CAPACITY + 1
    while (count > CAPACITY) | (target < 0):
        n0, n1, n2, n3, w0, w1, w2, w3 = _measure(
            logits,
            num_ids,
            best,
            inverse_heat,
            low,
            t1,
            t2,
            t3,
            high,
            LOWEST,
            WEIGHT_ONE,
            IS_MASS,
            LANES,
            WIDTH,
        )
        if IS_MASS:
            target = tl.where(target < 0, share_of(w0, p), target)
        above_1 = before + w1 >= target
        above_2 = before + w2 >= target
        above_3 = before + w3 >= target
        count = tl.where(above_1, n1 - n2, n0 - n1)
        count = tl.where(above_3, n3, tl.where(above_2, n2 - n3, count))
        before += tl.where(above_3, 0, tl.where(above_2, w3, tl.where(above_1, w2, w1)))
        low = tl.where(above_3, t3, tl.where(above_2, t2, tl.where(above_1, t1, low)))
        high = tl.where(above_3, high, tl.where(above_2, t3, tl.where(above_1, t2, t1)))
        # One value left: only ids tell its tokens apart, and most of the 32 bits name no id.
        value_word = (high >> 32) << 32
        id_floor = value_word + (0xFFFFFFFF - num_ids.to(tl.int64))
        low = tl.where(low + 1 >= value_word, tl.maximum(low, id_floor), low)
        t2 = middle_key(low, high)
        t1 = middle_key(low, t2)
        t3 = middle_key(t2, high)
    return low, high, before, target


@jit()
def _measure(
    logits: tl.tensor,
    num_ids: tl.tensor,
    best: tl.tensor,
    inverse_heat: tl.tensor,
    low: tl.tensor,
    t1: tl.tensor,
    t2: tl.tensor,
    t3: tl.tensor,
    high: tl.tensor,
    LOWEST: tl.constexpr,
    WEIGHT_ONE: tl.constexpr,
    IS_MASS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return how many keys lie in (t, high], for t = low, t1, t2, t3, and what they weigh."""
    # A lane adds up its own columns: one addition across lanes at the end, none in the loop.
    n0 = tl.zeros((LANES,), tl.int32)
    n1 = tl.zeros((LANES,), tl.int32)
    n2 = tl.zeros((LANES,), tl.int32)
    n3 = tl.zeros((LANES,), tl.int32)
    w0 = tl.zeros((LANES,), tl.int64)
    w1 = tl.zeros((LANES,), tl.int64)
    w2 = tl.zeros((LANES,), tl.int64)
    w3 = tl.zeros((LANES,), tl.int64)
    for start in range(0, num_ids, LANES * WIDTH):
        keys = keys_at(logits, start, num_ids, LOWEST, LANES, WIDTH)
        keys = tl.where(keys <= high, keys, LOWEST)
        n0 += tl.sum((keys > low).to(tl.int32), axis=1)
        n1 += tl.sum((keys > t1).to(tl.int32), axis=1)
        n2 += tl.sum((keys > t2).to(tl.int32), axis=1)
        n3 += tl.sum((keys > t3).to(tl.int32), axis=1)
        if IS_MASS:
            weights = key_weight(keys, best, inverse_heat, WEIGHT_ONE, IS_MASS)
            w0 += tl.sum(tl.where(keys > low, weights, 0), axis=1)
            w1 += tl.sum(tl.where(keys > t1, weights, 0), axis=1)
            w2 += tl.sum(tl.where(keys > t2, weights, 0), axis=1)
            w3 += tl.sum(tl.where(keys > t3, weights, 0), axis=1)
    if not IS_MASS:
        w0 += n0
        w1 += n1
        w2 += n2
        w3 += n3
    return (
        tl.sum(n0, axis=0),
        tl.sum(n1, axis=0),
        tl.sum(n2, axis=0),
        tl.sum(n3, axis=0),
        tl.sum(w0, axis=0),
        tl.sum(w1, axis=0),
        tl.sum(w2, axis=0),
        tl.sum(w3, axis=0),
    )


@jit()
def collect(
    logits: tl.tensor,
    num_ids: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    pool: tl.tensor,
    counter: tl.tensor,
    LOWEST: tl.constexpr,
    CAPACITY: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Copy the row's keys in (low, high] into pool, in any order, and return how many there are.

    counter: one int32 that is 0. Of more than CAPACITY, only so many are written.
    """
    found = tl.zeros((LANES,), tl.int32)
    tl.debug_barrier()  # a warp may still be reading what the pool held before
    for start in range(0, num_ids, LANES * WIDTH):
        keys = keys_at(logits, start, num_ids, LOWEST, LANES, WIDTH)
        is_found = (keys > low) & (keys <= high)
        cell = counter + tl.zeros((LANES, WIDTH), tl.int32)
        place = tl.atomic_add(cell, 1, mask=is_found, sem="relaxed")
        tl.store(pool + place, keys, mask=is_found & (place < CAPACITY))
        found += tl.sum(is_found.to(tl.int32), axis=1)
    tl.debug_barrier()  # every warp reads what all have written
    return tl.sum(found, axis=0)


@jit()
def finish(
    pool: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    inverse_heat: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    p: tl.tensor,
    LOWEST: tl.constexpr,
    WEIGHT_ONE: tl.constexpr,
    IS_MASS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> tl.tensor:
    """Return the cut, which lies in (low, high]; pool holds count keys, all of (low, high] there.

    before and target: as narrow() returns them.
    """
    place = tl.arange(0, CAPACITY)
    keys = tl.load(pool + place, mask=place < count, other=LOWEST)
    keys = tl.where((keys > low) & (keys <= high), keys, LOWEST)
    weights = key_weight(keys, best, inverse_heat, WEIGHT_ONE, IS_MASS)
    weights = tl.where(keys > LOWEST, weights, 0)
    if IS_MASS:
        target = tl.where(target < 0, share_of(tl.sum(weights, axis=0), p), target)
    high = tl.max(keys, axis=0)
    low = tl.min(tl.where(keys > LOWEST, keys, high), axis=0) - 1
    while low + 1 < high:
        middle = middle_key(low, high)
        if before + tl.sum(tl.where(keys > middle, weights, 0), axis=0) >= target:
            low = middle
        else:
            high = middle
    return high
