"""Examines the one-shot all-reduce exercise, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanorunner.kernels.peer_all_reduce import SEND, SUM, sum_in_rank_order
from nanorunner.workshop.code_exercises import Finding, Functions
from nanorunner.workshop.sandbox_ranks import make_rings, run_ranks

RANKS = 3
NUM_VALUES = 500
NUM_CALLS = 20
ONLY_SEND, ONLY_SUM = frozenset({SEND}), frozenset({SUM})


def examine(functions: Functions) -> Iterator[Finding]:
    """Yield what holds of the learner's function."""
    all_reduce = functions["all_reduce_one_shot"]
    yield Finding("the send step posts to every rank and leaves x alone", _send(all_reduce))
    for dtype in (torch.float32, torch.bfloat16):
        yield Finding(
            f"every rank has the same bits of {dtype}: float32, rank 0 first, rounded once",
            _step_by_step(all_reduce, dtype),
        )
    yield Finding("x itself holds the sum, and is returned", _in_place(all_reduce))
    yield Finding(
        f"{NUM_CALLS} calls in a row, each rank at its own speed", _many_calls(all_reduce)
    )


def _send(all_reduce: Callable[..., Any]) -> str:
    rings = make_rings(RANKS)
    x = _inputs(torch.float32)[0]
    before = x.clone()
    all_reduce(x, rings[0], steps=ONLY_SEND)
    if not torch.equal(x, before):
        return "x has changed"
    others = [ring.num_waiting() for ring in rings[1:]]
    return "" if others == [1] * (RANKS - 1) else f"packets at the other ranks: {others}"


def _step_by_step(all_reduce: Callable[..., Any], dtype: torch.dtype) -> str:
    rings, xs = make_rings(RANKS), _inputs(dtype)
    expected = sum_in_rank_order([x.clone() for x in xs])
    for ring, x in zip(rings, xs, strict=True):
        all_reduce(x, ring, steps=ONLY_SEND)
    for ring, x in zip(rings, xs, strict=True):
        all_reduce(x, ring, steps=ONLY_SUM)
    for rank, x in enumerate(xs):
        if not torch.equal(x, expected):
            off = int((x != expected).sum())
            return f"rank {rank}: {off} of {NUM_VALUES} values have other bits"
    left = [ring.num_waiting() for ring in rings]
    return "" if not any(left) else f"packets that nobody took: {left}"


def _in_place(all_reduce: Callable[..., Any]) -> str:
    rings, xs = make_rings(RANKS), _inputs(torch.float32)
    results = run_ranks(RANKS, lambda rank: all_reduce(xs[rank], rings[rank]))
    return "" if all(r is x for r, x in zip(results, xs, strict=True)) else "another tensor came"


def _many_calls(all_reduce: Callable[..., Any]) -> str:
    rings = make_rings(RANKS)
    expected = sum_in_rank_order(_inputs(torch.float32))

    def run(rank: int) -> bool:
        return all(
            torch.equal(all_reduce(_inputs(torch.float32)[rank], rings[rank]), expected)
            for _ in range(NUM_CALLS)
        )

    right = run_ranks(RANKS, run)
    return "" if all(right) else f"rank {right.index(False)} got a wrong sum"


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return each rank's tensor; sizes differ widely, so that the order of sums shows in bits."""
    generator = torch.Generator().manual_seed(0)
    return [
        (10.0 ** (rank - 1) * torch.randn(NUM_VALUES, generator=generator)).to(dtype)
        for rank in range(RANKS)
    ]
