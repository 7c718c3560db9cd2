"""A token and its value as one int64, so that "best" is a plain maximum: on a tile, over ranks.

    bit 63          32 31                 0
       | value, orderable | 2**32 - 1 - id |

The larger key has the larger value or, among equal values, the lower id. NaN counts as -inf and
-0.0 as 0.0. So every ordered choice among tokens (argmax, the k likeliest, a nucleus) is a choice
of one key: all tokens whose key reaches it belong to the set, and ties are never in doubt.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.triton_support import constant, jit, tl

LOW_WORD = 2**32 - 1
KEEP_ALL = -(2**63)  # as a cut: every token's key reaches it
SKIP_ROW = 2**63 - 1  # as a cut: no key reaches it
# The key of no token: below every token's, and key_ids reads it as id 0, which can be embedded.
NO_KEY = -(2**63) + LOW_WORD
LOWEST_KEY = -0x7F800000 * 2**32 - 2**32  # value -inf, the highest id that there could be

_NO_KEY, _NO_ID = constant(NO_KEY), constant(2**31 - 1)


@jit()
def token_key(value: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the int64 keys of float32 values and int64 ids, blocks of one shape."""
    value = tl.where(value == value, value, float("-inf"))
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # negative floats order backwards as integers
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids)


@jit()
def best_key(values: tl.tensor, ids: tl.tensor, kept: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the largest key along AXIS of the float32 values that are kept, NO_KEY where none is.

    ids int32. One key is made, of the best: a comparison of two floats takes a third of the
    instructions that a comparison of two int64 takes.
    """
    values = tl.where(kept & (values == values), values, float("-inf"))
    best = tl.max(values, axis=AXIS, keep_dims=True)
    ids = tl.min(tl.where(kept & (values == best), ids, _NO_ID), axis=AXIS, keep_dims=True)
    key = tl.where(ids == _NO_ID, _NO_KEY, token_key(best, ids.to(tl.int64)))
    return tl.max(key, axis=AXIS)  # of one: the axis goes


@jit()
def key_value(key: tl.tensor) -> tl.tensor:
    """Return the float32 values of keys."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


def token_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the int64 keys of float values and int64 ids, which broadcast."""
    values = values.float()
    values = torch.where(values.isnan(), float("-inf"), values)
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (LOW_WORD - ids)


def key_values(keys: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of keys."""
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def key_ids(keys: torch.Tensor) -> torch.Tensor:
    """Return the int64 ids of keys."""
    return torch.bitwise_not(keys).bitwise_and_(LOW_WORD)
