"""A batch as the kernels see it: places, of which a decode that verifies drafts takes several.

    requests     a (verifies 2 drafts)      b (the same)         c (a chunk of its prompt)
    rows         a      a      a            b      b      b      c
    offsets      0      1      2            0      1      2      0
    counts       1      1      1            1      1      1      200
    samples      yes    yes    yes          yes    yes    yes    no

Each place is a request of its own to everything that follows: inputs, attention, sampler. Places of
one request differ in their offset, which is added to the row's num_computed. So speculation needs
no other kernel for verifying: place i is sampled as a plain decode there would be, and its draft,
the next place's input, is right if it is that very id (kernels/accept_drafts.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Places(NamedTuple):
    """One step's places, in batch order: groups that verify, then all others."""

    rows: Int64  # [p] of the state table
    counts: Int64  # [p] tokens
    samples: Mask  # [p] its last token is sampled from
    offsets: Int64 | None = None  # [p] past num_computed; None: all zero
    num_verified: int = 0  # places that belong to groups
    query_len: int = 1  # places of a group
    leaders: Int64 | None = None  # [m] rows that get drafts after this step; None: nobody does

    @property
    def is_plain_decode(self) -> bool:
        """Whether all are single tokens that verify nothing."""
        return self.query_len == 1 and bool((self.counts == 1).all())

    @property
    def num_single(self) -> int:
        """How many places in front have one token each."""
        longer = self.counts > 1
        return int(longer.argmax()) if longer.any() else len(longer)

    @property
    def is_verified_alone(self) -> bool:
        """Whether there are groups only."""
        return self.num_verified == len(self.rows)


NOBODY = Places(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))


def lay_out(rows: Int64, counts: Int64, samples: Mask, is_decoding: Mask) -> Places:
    """Return the places of requests [n] in an engine with speculation.

    counts [n]: tokens of each, which are the places of one that is decoding, all the same number.
    Decoding requests come first.
    """
    repeats = np.where(is_decoding, counts, 1)
    num_decoding = int(np.count_nonzero(is_decoding))
    query_len = int(counts[0]) if num_decoding else 1
    assert is_decoding[:num_decoding].all(), "decodes come first"
    assert (counts[:num_decoding] == query_len).all(), "one length for all groups"
    is_first = np.cumsum(repeats) - repeats
    return Places(
        rows=rows.repeat(repeats),
        counts=np.where(is_decoding, 1, counts).repeat(repeats),
        samples=samples.repeat(repeats),
        offsets=np.arange(int(repeats.sum())) - is_first.repeat(repeats),
        num_verified=num_decoding * query_len if query_len > 1 else 0,
        query_len=query_len,
        leaders=rows[samples],
    )
