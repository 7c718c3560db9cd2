"""All ranks of a ring in one process: sums are exact, and no order of events loses a packet.

The interpreter runs a kernel from beginning to end, so a rank's call is played in its steps (send,
sum, gather), everybody's first step before anybody's second.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_threads import on_threads
from test_distributed import on_ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanorunner.kernels.peer_all_reduce import (
    DTYPES,
    GATHER,
    LARGE_TILE,
    MIN_ROW_WORDS,
    SEND,
    SMALL_TILE,
    SUM,
    all_reduce_add_rms_norm,
    all_reduce_max,
    all_reduce_one_shot,
    all_reduce_two_shot,
    fits_add_rms_norm,
    fits_max,
    is_plain,
    one_shot_bytes,
    sum_in_rank_order,
    two_shot_bytes,
)
from nanorunner.kernels.peer_ring import (
    ABORT,
    CALL_SHARES,
    COUNTER,
    DEFAULT_CAPACITY,
    ERROR,
    NUM_BUFFERS,
    SLOT_BYTES,
    STRIPE,
    PeerRing,
    make_table,
    ring_bytes,
)
from nanorunner.kernels.rms_norm import add_rms_norm, add_rms_norm_triton
from nanorunner.workers.distributed import Group
from nanorunner.workers.peer_memory import MAX_PROGRAMS, PeerMemoryUnavailable, exchange
from nanorunner.workers.peer_reducer import sizes_for

CPU = torch.device("cpu")
EPS = 1e-6
GIVE_UP_AFTER = 20  # looks: far more than a rank needs whose packets are all there

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels run on CPU tensors in the interpreter alone"
)


class Ranks:
    """The rings of n ranks, each with memory of its own."""

    def __init__(self, n: int, capacity: int = 4096, max_programs: int = 3) -> None:
        self.memory = [torch.zeros(ring_bytes(capacity) // 8, dtype=torch.int64) for _ in range(n)]
        self.words = [torch.zeros(2, dtype=torch.int32) for _ in range(n)]
        addresses = [memory.data_ptr() for memory in self.memory]
        self.rings = [
            PeerRing(
                rank=rank,
                ranks=n,
                capacity=capacity,
                max_programs=max_programs,
                table=make_table(addresses, self.words[rank].data_ptr(), GIVE_UP_AFTER, CPU),
                check_every=7,
            )
            for rank in range(n)
        ]

    def start_at(self, call: int) -> None:
        for ring in self.rings:
            ring.table[COUNTER] = call * CALL_SHARES

    def calls(self) -> list[float]:
        return [float(ring.table[COUNTER]) / CALL_SHARES for ring in self.rings]

    def has_given_up(self) -> list[int]:
        return [int(words[ERROR]) for words in self.words]

    def play(self, call: Callable[..., Any], *arguments: list[Any], last: str = SUM) -> list[Any]:
        """Make one call on every rank, step by step; each argument has a value for each rank."""
        steps = [SEND, SUM, GATHER]
        for step in steps[: steps.index(last) + 1]:
            results = [
                call(*(values[rank] for values in arguments), ring, steps=frozenset({step}))
                for rank, ring in enumerate(self.rings)
            ]
        assert self.has_given_up() == [0] * len(self.rings)
        return results


def random_parts(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a part for each rank. bfloat16 gets whole numbers: the interpreter rounds it down."""
    if dtype == torch.bfloat16:
        return [torch.randint(-16, 17, shape).to(dtype) for _ in range(n)]
    return [torch.randn(shape).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_both_forms_give_every_rank_the_bits_of_a_sum_in_rank_order(
    n: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(n)
    ranks = Ranks(n)
    per_word = 8 // dtype.itemsize
    # fewer words than ranks, and an uneven end: with few ranks more than the small tile serves
    for num_words in (1, SMALL_TILE * 3 + 1) if n < 8 else (5, SMALL_TILE + 3):
        parts = random_parts(n, (num_words * per_word,), dtype)
        expected = sum_in_rank_order(parts)
        for call, last in ((all_reduce_one_shot, SUM), (all_reduce_two_shot, GATHER)):
            for out in ranks.play(call, [part.clone() for part in parts], last=last):
                assert torch.equal(out, expected)
    assert ranks.calls() == [4.0] * n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_fused_form_is_the_sum_followed_by_add_rms_norm(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    ranks = Ranks(n)
    for shape in ((3, 200), (1, 512)):
        parts = random_parts(n, shape, dtype)
        residual, weight = random_parts(1, shape, dtype)[0], torch.rand(shape[1]).to(dtype)
        residuals = [residual.clone() for _ in range(n)]
        before = [part.clone() for part in parts]
        epsilons = [EPS] * n
        outs = ranks.play(all_reduce_add_rms_norm, parts, residuals, [weight] * n, epsilons)
        expected = add_rms_norm_triton(sum_in_rank_order(parts), residual, weight, EPS)
        for rank in range(n):
            assert torch.equal(residuals[rank], residual)
            assert torch.equal(outs[rank], outs[0])
            assert torch.equal(parts[rank], before[rank])
        # the squares are added up in another order
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(outs[0], expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_maximum_of_keys_is_exact_over_all_64_bits(n: int) -> None:
    torch.manual_seed(n)
    ranks = Ranks(n)
    for count in (1, SMALL_TILE + 44):
        keys = [torch.randint(-(2**63), 2**63 - 1, (count,)) for _ in range(n)]
        keys[0][0], keys[1][0] = -(2**63), -(2**63) + 1
        expected = torch.stack(keys).amax(0)
        for out in ranks.play(all_reduce_max, keys):
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("n", "order"),
    [
        (2, "random"),
        *((n, order) for n in (3, 4) for order in ("random", "rank 0 first", "rank 0 last")),
        (8, "random"),
        (8, "rank 0 last"),
    ],
)
def test_no_order_of_events_loses_or_overwrites_a_packet(n: int, order: str) -> None:
    """Each rank goes on whenever it need not wait, so a fast one gets as far ahead as it can."""
    draw = random.Random(n)
    ranks = Ranks(n, capacity=STRIPE * 2 * n)  # so small that every slot is wiped every 8 calls
    calls = [plan_call(draw, n) for _ in range(15)]
    done = [(0, 0)] * n  # by rank: calls ended, steps done in the present one

    def may_go(rank: int) -> bool:
        call, step = done[rank]
        if call == len(calls):
            return False
        return step == 0 or all(other >= (call, step) for other in done)

    while able := [rank for rank in range(n) if may_go(rank)]:
        rank = {"random": draw.choice(able), "rank 0 first": able[0]}.get(order, able[-1])
        call, step = done[rank]
        steps, run, check = calls[call]
        run(rank, ranks.rings[rank], frozenset({steps[step]}))
        done[rank] = (call, step + 1)
        if step + 1 == len(steps):
            check(rank)
            done[rank] = (call + 1, 0)
    assert ranks.calls() == [len(calls)] * n
    assert ranks.has_given_up() == [0] * n


def plan_call(draw: random.Random, n: int) -> tuple[list[str], Callable[..., None], Any]:
    """Return a random call: its steps, what runs one of them on a rank, what checks a rank's."""
    kind = draw.choice(["one", "two", "max", "norm"])
    if kind == "norm":
        return plan_norm(draw, n)
    call: Callable[..., torch.Tensor] = {
        "one": all_reduce_one_shot,
        "two": all_reduce_two_shot,
        "max": all_reduce_max,
    }[kind]
    count = draw.randrange(1, STRIPE)
    if kind == "max":
        parts = [torch.tensor([draw.getrandbits(62) for _ in range(count)]) for _ in range(n)]
        expected = torch.stack(parts).amax(0)
    else:
        parts = [torch.tensor([draw.random() for _ in range(2 * count)]) for _ in range(n)]
        expected = sum_in_rank_order(parts)
    tensors = [part.clone() for part in parts]

    def run(rank: int, ring: PeerRing, steps: frozenset[str]) -> None:
        call(tensors[rank], ring, steps=steps)

    def check(rank: int) -> None:
        assert torch.equal(tensors[rank], expected), kind

    return [SEND, SUM, GATHER] if kind == "two" else [SEND, SUM], run, check


def plan_norm(draw: random.Random, n: int) -> tuple[list[str], Callable[..., None], Any]:
    """Return the same of a call of the fused form, whose residual must have all bits of the sum."""
    hidden = 2 * draw.randrange(MIN_ROW_WORDS, STRIPE)
    before, *parts = (torch.tensor([[draw.random() for _ in range(hidden)]]) for _ in range(n + 1))
    residuals = [before.clone() for _ in range(n)]
    expected = before + sum_in_rank_order(parts)

    def run(rank: int, ring: PeerRing, steps: frozenset[str]) -> None:
        weight = torch.ones(hidden)
        all_reduce_add_rms_norm(parts[rank], residuals[rank], weight, EPS, ring, steps=steps)

    def check(rank: int) -> None:
        assert torch.equal(residuals[rank], expected)

    return [SEND, SUM], run, check


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3])
def test_sums_stay_right_where_the_tag_begins_anew(first: int, n: int) -> None:
    ranks = Ranks(n)
    ranks.start_at(first)
    for _ in range(6):
        parts = random_parts(n, (40,), torch.float32)
        expected = sum_in_rank_order(parts)
        for out in ranks.play(all_reduce_one_shot, parts):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("n", [2, 8])
def test_every_slot_is_wiped_before_the_tag_begins_anew(n: int) -> None:
    capacity = 4 * STRIPE
    ranks = Ranks(n, capacity)
    slots = [memory.view(NUM_BUFFERS, capacity, SLOT_BYTES // 8) for memory in ranks.memory]
    for memory in ranks.memory:
        memory.fill_(-1)
    for _ in range(NUM_BUFFERS * capacity // STRIPE + 1):
        ranks.play(all_reduce_one_shot, random_parts(n, (16,), torch.float32))
    for rank in range(n):
        for sender in set(range(n)) - {rank}:
            slots[rank][:, sender * capacity // n :][:, :8] = 0  # what it has just sent
        assert not slots[rank].any()


@pytest.mark.parametrize("n", [2, 4])
def test_a_launch_of_any_number_of_programs_is_one_call(n: int) -> None:
    ranks = Ranks(n, capacity=2048 * n, max_programs=7)
    for programs in (1, 3, 7):
        parts = random_parts(n, (programs * SMALL_TILE * 2,), torch.float32)
        ranks.play(all_reduce_one_shot, parts)
    assert ranks.calls() == [3.0] * n


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("reason", ["abort", "time"])
def test_a_rank_whose_peer_never_comes_gives_up_and_says_so(reason: str, n: int) -> None:
    ranks = Ranks(n)
    for _ in range(NUM_BUFFERS):  # so that old packets lie where it looks for new ones
        ranks.play(all_reduce_one_shot, random_parts(n, (64,), torch.float32))
    for ring in ranks.rings[2:]:  # these have sent: one that is missing is enough
        all_reduce_one_shot(torch.ones(64), ring, steps=frozenset({SEND}))
    if reason == "abort":
        ranks.words[0][ABORT] = 1
        ranks.rings[0].table[1] = 2**62
    x = torch.ones(64)
    all_reduce_one_shot(x, ranks.rings[0])
    assert ranks.has_given_up() == [1] + [0] * (n - 1)
    # its later calls do not wait either: the error word is enough
    ranks.words[0][ABORT] = 0
    ranks.rings[0].table[1] = 2**62
    all_reduce_two_shot(x, ranks.rings[0])
    all_reduce_max(torch.ones(3, dtype=torch.int64), ranks.rings[0])
    all_reduce_add_rms_norm(x.view(1, 64), x.view(1, 64).clone(), x, EPS, ranks.rings[0])
    assert ranks.calls()[0] == NUM_BUFFERS + 4


@pytest.mark.parametrize("first", [0, 2**32])
@pytest.mark.parametrize("n", [2, 8])
def test_memory_that_was_never_written_passes_for_no_packet(n: int, first: int) -> None:
    ranks = Ranks(n)
    ranks.start_at(first)
    all_reduce_one_shot(torch.ones(64), ranks.rings[0])
    assert ranks.has_given_up() == [1] + [0] * (n - 1)


def test_what_the_kernels_do_not_take_is_known_before() -> None:
    ring = Ranks(2, capacity=4096, max_programs=3).rings[0]
    assert one_shot_bytes(ring) == 2048 * 8
    assert two_shot_bytes(ring) == 2048 * 8
    assert one_shot_bytes(Ranks(2, 1 << 16, 3).rings[0]) == 3 * LARGE_TILE * 8
    x = torch.zeros(4, 64)
    assert is_plain(x)
    assert is_plain(x[1:])
    for other in (x[:, :32], x[:0], torch.zeros(3), x.double(), x.int(), torch.zeros(9)[1:]):
        assert not is_plain(other)
    assert fits_add_rms_norm(x[:3], x[:3], x[0], ring)
    assert not fits_add_rms_norm(x, x, x[0], ring), "more rows than programs"
    assert not fits_add_rms_norm(x[:3], x[:3], x[0].bfloat16(), ring)
    assert not fits_add_rms_norm(x[:3, :62], x[:3, :62], x[0, :62], ring)
    keys = torch.zeros(3 * SMALL_TILE, dtype=torch.int64)
    assert fits_max(keys, ring)
    assert not fits_max(torch.zeros(3 * SMALL_TILE + 1, dtype=torch.int64), ring)
    assert not fits_max(keys.float(), ring)


def test_the_sizes_are_those_of_the_next_larger_number_of_ranks() -> None:
    assert sizes_for(3) == sizes_for(4)
    assert sizes_for(5) == sizes_for(8)
    assert all(sizes_for(n).one_shot <= sizes_for(n).two_shot for n in range(2, 9))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_memory_of_a_ring_has_room_for_the_sizes_of_its_forms(n: int) -> None:
    table = torch.zeros(3 + n, dtype=torch.int64)
    ring = PeerRing(
        rank=n - 1, ranks=n, capacity=DEFAULT_CAPACITY, max_programs=MAX_PROGRAMS, table=table
    )
    assert sizes_for(n).one_shot <= one_shot_bytes(ring)
    assert sizes_for(n).two_shot <= two_shot_bytes(ring)
    assert fits_max(torch.zeros(1024, dtype=torch.int64), ring)


def test_ranks_exchange_messages_in_rank_order() -> None:
    def body(store: TCPStore, rank: int) -> object:
        return exchange(store, "first", rank, 3, {"problem": "", "index": rank})

    expected = [{"problem": "", "index": rank} for rank in range(3)]
    assert on_threads(3, body, limit_s=20) == [expected] * 3


def test_one_ranks_problem_is_the_answer_of_all() -> None:
    def body(store: TCPStore, rank: int) -> object:
        problem = "GPU 1 cannot write to GPU 0's memory" if rank == 1 else ""
        with pytest.raises(PeerMemoryUnavailable) as caught:
            exchange(store, "first", rank, 3, {"problem": problem})
        return str(caught.value)

    assert on_threads(3, body, limit_s=20) == ["rank 1: GPU 1 cannot write to GPU 0's memory"] * 3


def test_a_group_without_peer_memory_sums_and_norms_one_after_the_other() -> None:
    def body(group: Group) -> torch.Tensor:
        x = torch.full((2, 8), float(group.rank + 1))
        residual = torch.arange(16.0).view(2, 8)
        out = group.all_reduce_add_rms_norm(x, residual, torch.ones(8), EPS)
        return torch.cat((out, residual))

    residual = torch.arange(16.0).view(2, 8)
    expected = add_rms_norm(torch.full((2, 8), 3.0), residual, torch.ones(8), EPS)
    for both in on_ranks(2, body):
        assert isinstance(both, torch.Tensor)
        assert torch.equal(both, torch.cat((expected, residual)))
