"""Who holds what: the arithmetic that splits heads, MLP columns and vocabulary over tp ranks.

Any tp from 1 to the number of query heads works. What does not divide is padded with zeros, and
every rank holds the same local shape, so one program and one KV shape serve all ranks.

    9 query heads, 3 KV heads, tp 2            1 KV head, 4 query heads, tp 3
    rank 0: kv 0 1   q 0 1 2 3 4 5             rank 0: kv 0          q 0 1
    rank 1: kv 2 .   q 6 7 8 . . .             rank 1: kv 0 (copy)   q 2 3
    (a dot is a zero head)                     rank 2: kv .          q . .

A zero head adds exactly nothing: its V rows and its columns of the output projection are zero.
Pure Python: rank 0 uses it before any process exists, and the shard map prints it.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A half-open range start..stop-1; empty when both are equal."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many indices the span holds."""
        return self.stop - self.start


class EvenShard(NamedTuple):
    """One rank's share of MLP columns or vocabulary ids."""

    local_size: int  # the same on every rank, padding included
    span: Span  # the whole model's indices that this rank really holds


class HeadShard(NamedTuple):
    """One rank's share of the attention heads; local head i is heads.start + i, then zero heads."""

    local_heads: int  # the same on every rank, zero heads included
    local_kv_heads: int  # the same on every rank, zero heads included
    heads: Span  # query heads of the whole model that this rank computes
    kv_heads: Span  # their KV heads
    is_kv_copy: bool  # a lower rank holds the same KV heads


def check_tp(tp: int, num_heads: int) -> None:
    """Return if a model of num_heads query heads can run on tp ranks; else raise ValueError."""
    if not 1 <= tp <= num_heads:
        raise ValueError(f"tp {tp}: the model has {num_heads} query heads; use 1 to {num_heads}")


def even_shard(size: int, tp: int, rank: int) -> EvenShard:
    """Return rank's share of `size` indices, cut into tp pieces of ceil(size / tp)."""
    local_size = -(-size // tp)
    start = min(rank * local_size, size)
    return EvenShard(local_size, Span(start, min(start + local_size, size)))


def head_shard(num_heads: int, num_kv_heads: int, tp: int, rank: int) -> HeadShard:
    """Return rank's query heads and the KV heads that they read.

    With at least one KV head a rank, whole groups (a KV head and its query heads) are dealt out.
    With fewer, tp // num_kv_heads ranks share each KV head, each with a part of its query heads;
    the ranks left over hold zero heads. Raises ValueError when tp exceeds num_heads.
    """
    check_tp(tp, num_heads)
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        local_kv_heads, kv_heads = even_shard(num_kv_heads, tp, rank)
        heads = Span(kv_heads.start * group, kv_heads.stop * group)
        return HeadShard(local_kv_heads * group, local_kv_heads, heads, kv_heads, False)

    num_sharers = tp // num_kv_heads
    kv_head, sharer = divmod(rank, num_sharers)
    local_heads, part = even_shard(group, num_sharers, sharer)
    if kv_head >= num_kv_heads or part.size == 0:
        return HeadShard(local_heads, 1, Span(0, 0), Span(0, 0), False)
    heads = Span(kv_head * group + part.start, kv_head * group + part.stop)
    return HeadShard(local_heads, 1, heads, Span(kv_head, kv_head + 1), sharer > 0)
