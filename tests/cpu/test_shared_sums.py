"""Ranks add up through shared memory: every call right, however far apart they run."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable
from random import Random

import pytest
import torch
from rank_threads import on_threads
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanorunner.kernels.peer_all_reduce import sum_in_rank_order
from nanorunner.workers import shared_sums
from nanorunner.workers.distributed import Group
from nanorunner.workers.shared_sums import SLOT_BYTES, SharedSums, SharedSumsUnavailable

LIMIT_S = 60.0  # of a wait that ends in milliseconds

Body = Callable[[SharedSums, int], object]


def on_ranks(tp: int, body: Body, give_up_after_s: float = LIMIT_S) -> list[object]:
    """Run body(sums, rank) on tp threads and return the results, or errors, by rank."""

    def run(store: TCPStore, rank: int) -> object:
        try:
            sums = SharedSums(store, rank, tp, give_up_after_s)
            result = body(sums, rank)
            sums.close()
        except (RuntimeError, TimeoutError) as error:
            return error
        return result

    return on_threads(tp, run)


def tensor(dtype: torch.dtype, count: int, rank: int, call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(count, generator=generator).to(dtype)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_many_calls_of_any_size_are_right_at_any_pace(tp: int) -> None:
    dice = Random(tp)
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    calls = [(dice.choice(dtypes), dice.choice((1, 7, 576, 9000))) for _ in range(300)]

    def body(sums: SharedSums, rank: int) -> int:
        pace = Random(rank)
        for call, (dtype, count) in enumerate(calls):
            if pace.random() < 0.1:
                time.sleep(pace.random() * 0.004)  # now this one is late, now that one
            x = tensor(dtype, count, rank, call)
            assert sums.try_sum(x)
            parts = [tensor(dtype, count, other, call) for other in range(tp)]
            assert torch.equal(x, sum_in_rank_order(parts)), f"rank {rank}, call {call}"
        return len(calls)

    assert on_ranks(tp, body) == [300] * tp


def test_the_largest_key_wins_on_every_rank() -> None:
    def body(sums: SharedSums, rank: int) -> list[int]:
        keys = torch.tensor([[rank, -rank, 5 - rank]]) << 40
        assert sums.try_max(keys)
        return (keys[0] >> 40).tolist()

    assert on_ranks(3, body) == [[2, 0, 5]] * 3


def test_what_is_too_large_or_has_holes_is_left_to_gloo() -> None:
    def body(sums: SharedSums, rank: int) -> list[bool]:
        whole = torch.ones(SLOT_BYTES // 4)
        return [
            sums.try_sum(whole),
            sums.try_sum(torch.ones(SLOT_BYTES // 4 + 1)),
            sums.try_sum(torch.ones(4, 4)[:, ::2]),
        ]

    assert on_ranks(2, body) == [[True, False, False]] * 2


def test_a_wait_ends_when_it_is_stopped_or_has_been_too_long() -> None:
    over = threading.Event()  # until then rank 1 neither comes nor leaves

    def stopped(sums: SharedSums, rank: int) -> None:
        if rank == 0:
            threading.Timer(0.2, sums.abort).start()
            wait_in_vain(sums)
        assert over.wait(LIMIT_S)

    def wait_in_vain(sums: SharedSums) -> None:
        try:
            sums.try_sum(torch.ones(3))
        finally:
            over.set()

    error, _ = on_ranks(2, stopped)
    assert isinstance(error, RuntimeError)
    assert "rank 0: the all-reduce was stopped" in str(error)

    def left_alone(sums: SharedSums, rank: int) -> None:
        if rank == 0:
            sums.try_sum(torch.ones(3))

    error, _ = on_ranks(2, left_alone)
    assert isinstance(error, RuntimeError)
    assert "rank 1 has left" in str(error)

    over.clear()

    def late(sums: SharedSums, rank: int) -> None:
        if rank == 0:
            wait_in_vain(sums)
        assert over.wait(LIMIT_S)

    error, _ = on_ranks(2, late, give_up_after_s=0.3)
    assert isinstance(error, TimeoutError)
    assert "for rank 1" in str(error)


def test_a_processor_that_reorders_stores_has_none_on_any_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(shared_sums, "IS_X86", False)
    for error in on_ranks(2, lambda sums, rank: sums):
        assert isinstance(error, SharedSumsUnavailable)
        assert "aarch64" in str(error)

    def run(store: TCPStore, rank: int) -> float:
        group = Group(store, rank, 2, torch.device("cpu"), timeout_s=LIMIT_S)
        total = float(group.all_reduce(torch.ones(1)))
        group.close()
        return total

    assert on_threads(2, run) == [2.0, 2.0]
