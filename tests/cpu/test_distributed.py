"""Ranks sum and gather over gloo without any global process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_threads import on_threads
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanorunner.workers.distributed import Group

CPU = torch.device("cpu")


def on_ranks(tp: int, body: Callable[[Group], object]) -> list[object]:
    """Run body(group) on tp threads, one rank each, and return the results by rank."""

    def run(store: TCPStore, rank: int) -> object:
        group = Group(store, rank, tp, CPU, timeout_s=60)
        result = body(group)
        group.close()
        return result

    return on_threads(tp, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_reduce_sums_in_place_on_every_rank(dtype: torch.dtype) -> None:
    def body(group: Group) -> torch.Tensor:
        x = torch.full((3, 5), float(group.rank + 1), dtype=dtype)
        assert group.all_reduce(x) is x
        return x

    for x in on_ranks(3, body):
        assert torch.equal(x, torch.full((3, 5), 6.0, dtype=dtype))  # type: ignore[arg-type]


def test_a_gather_reaches_rank_0_alone_in_rank_order() -> None:
    def body(group: Group) -> list[float] | None:
        parts = group.gather(torch.full((2,), float(group.rank)))
        return None if parts is None else [float(part[0]) for part in parts]

    assert on_ranks(3, body) == [[0.0, 1.0, 2.0], None, None]


def test_one_rank_alone_needs_no_store_and_changes_nothing() -> None:
    group = Group(None, 0, 1, CPU, timeout_s=1)
    x = torch.randn(4)
    assert group.all_reduce(x) is x
    parts = group.gather(x)
    assert parts is not None
    assert parts[0] is x
    group.close()
    group.close()
    assert not dist.is_initialized()


def test_several_ranks_without_a_store_are_refused() -> None:
    with pytest.raises(ValueError, match="tp 2 needs a store"):
        Group(None, 0, 2, CPU, timeout_s=1)
