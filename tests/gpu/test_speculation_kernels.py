"""The kernels of speculation on a GPU: in a CUDA graph, without a wait, compiled once.

Their values are checked by tests/cpu, whose files run compiled on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from state_cases import (
    Request,
    buffers,
    check_same,
    copy_of,
    int32,
    logits_rows,
    state_of,
    with_limits,
)

from nanorunner.kernels.accept_drafts import accept_drafts
from nanorunner.kernels.ngram_drafts import ngram_drafts
from nanorunner.kernels.penalties import DraftTokens, apply_penalties
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs, prepare_mixed_inputs
from nanorunner.kernels.state_tables import InputBuffers, StateTables
from nanorunner.kernels.token_counts import count_sampled
from nanorunner.kernels.write_drafts import write_drafts

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCK_SIZE, MAX_BLOCKS, MAX_LEN, ROWS, RING = 256, 3, 600, 16, 4
NUM_DRAFTS, QUERY_LEN, MAX_REQS = 3, 4, 4


@pytest.fixture
def sync_debug_mode_restored() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class Batch(NamedTuple):
    """What a verify step reads and writes beside the state table, for MAX_REQS groups."""

    header: torch.Tensor
    idx_mapping: torch.Tensor
    offsets: torch.Tensor
    leader_header: torch.Tensor
    leaders: torch.Tensor
    out: InputBuffers
    ring: torch.Tensor
    counter: torch.Tensor
    accepted: torch.Tensor

    def fill(self, rows: list[int]) -> None:
        """Let the next step be of these rows."""
        count = len(rows) * QUERY_LEN
        words = torch.tensor([count, count, count, QUERY_LEN], dtype=torch.int32)
        self.header.copy_(words)
        self.leader_header.copy_(torch.tensor([len(rows), len(rows)], dtype=torch.int32))
        rows = rows + [-1] * (MAX_REQS - len(rows))
        self.leaders.copy_(torch.tensor(rows, dtype=torch.int32))
        self.idx_mapping.copy_(self.leaders.repeat_interleave(QUERY_LEN))


def make_batch(device: torch.device) -> Batch:
    places = MAX_REQS * QUERY_LEN
    out = buffers(places, places, MAX_BLOCKS)
    return Batch(
        header=int32([0] * 4).to(device),
        idx_mapping=int32([-1] * places).to(device),
        offsets=int32(list(range(QUERY_LEN)) * MAX_REQS).to(device),
        leader_header=int32([0] * 2).to(device),
        leaders=int32([-1] * MAX_REQS).to(device),
        out=InputBuffers(*(tensor.to(device) for tensor in out)),
        ring=torch.zeros(RING, places, dtype=torch.int64, device=device),
        counter=torch.zeros(1, dtype=torch.int64, device=device),
        accepted=int32([0] * places).to(device),
    )


def make_state(num_rows: int) -> StateTables:
    """Return rows of counting text, some tokens of which are known as drafts already."""
    requests = {}
    for row in range(num_rows):
        tokens = [i % 7 for i in range(20 + row)]
        requests[row] = Request(tokens, 5, len(tokens) - 1, [3 * row, 3 * row + 1, 3 * row + 2])
    state = with_limits(state_of(requests, num_rows, MAX_LEN, MAX_BLOCKS), [590] * num_rows)
    for row, request in requests.items():
        state.token_ids[row] = 0
        state.token_ids[row, : len(request.tokens)] = int32(request.tokens)
    return state


def verify(batch: Batch, state: StateTables) -> None:
    """Run one step of a model that counts to 7, and begins anew at every tenth position."""
    prepare_decode_inputs(
        batch.header, batch.idx_mapping, state, batch.out, BLOCK_SIZE, batch.offsets
    )
    following = (batch.out.input_ids + 1) % 7
    sampled = torch.where(batch.out.positions % 10 == 0, 0, following)
    accept_drafts(
        batch.header,
        batch.idx_mapping,
        batch.out.query_start_loc,
        sampled,
        state,
        batch.ring,
        batch.counter,
        batch.accepted,
    )
    ngram_drafts(batch.leader_header, batch.leaders, state, NUM_DRAFTS)


def test_a_captured_verify_step_serves_batches_of_any_size() -> None:
    """Every replay leaves what the references leave on the CPU."""
    state, batch, twin = make_state(ROWS), make_batch(DEVICE), make_batch(CPU)
    expected = copy_of(state, CPU)
    verify(batch, state)  # compiles; an empty batch changes no row
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify(batch, state)
    batch.counter.zero_()
    for rows in ([0], [3, 1, 2], [8, 9, 10, 11], [], [5, -1, 4], *[[7, 6]] * 20):
        for one in (batch, twin):
            one.fill(rows)
        graph.replay()
        verify(twin, expected)
        check_same(copy_of(state, CPU), expected)
        count = len(rows) * QUERY_LEN
        assert torch.equal(batch.ring[:, :count].cpu(), twin.ring[:, :count])
        assert torch.equal(batch.accepted.cpu(), twin.accepted)
        for name, now in batch.out._asdict().items():
            if name != "block_tables":  # past a row's length it holds what was there before
                assert torch.equal(now.cpu(), getattr(twin.out, name)), name
    assert int(state.total_len[7]) > 27 + 20, "not one draft was right"
    assert int(state.total_len[7]) < 27 + 20 * QUERY_LEN, "not one draft was wrong"


@pytest.mark.usefixtures("sync_debug_mode_restored")
def test_a_hundred_verify_steps_wait_for_nothing() -> None:
    state, batch = make_state(ROWS), make_batch(DEVICE)
    batch.fill([0, 1, 2, 3])
    verify(batch, state)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(100):
        verify(batch, state)
    torch.cuda.set_sync_debug_mode("default")
    assert int(batch.counter) == 101
    assert bool((state.num_computed[:4] == state.total_len[:4] - 1).all())
    assert bool((state.total_len[:4] > 24 + 100).all())


def test_a_batch_of_another_size_compiles_nothing() -> None:
    """A compilation in mid-serve stalls every request for seconds."""
    num_rows = 40
    state = make_state(num_rows)
    ring = torch.zeros(4, 512, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    accepted = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    slots = int32([0] * num_rows)
    bits = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(1, 64, dtype=torch.int32, device=DEVICE)
    one = torch.ones(num_rows, device=DEVICE)

    def step(num_reqs: int, query_len: int, shift: int) -> None:
        count = num_reqs * query_len
        num_verified = count if query_len > 1 else 0
        header = int32([count, count, num_verified, query_len])
        # views into packed memory, at every alignment
        rows = int32([0] * shift + [i // query_len for i in range(count)])[shift:]
        offsets = int32([0] * shift + [i % query_len for i in range(count)])[shift:]
        places = int32([0] * shift + list(range(count)))[shift:]
        out, logits = buffers(count, count, MAX_BLOCKS), logits_rows(count)
        prepare_decode_inputs(header, rows, state, out, BLOCK_SIZE, offsets)
        prepare_mixed_inputs(header, rows, places, state, out, logits, 1, BLOCK_SIZE, offsets)
        history = DraftTokens(state.token_ids, state.total_len, out.positions)
        line = torch.zeros(count, 64, device=DEVICE)
        apply_penalties(line, rows, slots, one, one, one, bits, counts, history)
        for given in (None, places):
            whose = accepted[shift : shift + count]
            loc, ids = out.query_start_loc, out.input_ids
            accept_drafts(header, rows, loc, ids, state, ring, counter, whose, given)
        count_sampled(ids, whose, out.positions, slots, state.prefill_len, counts)
        for index in (0, 1, 3):
            write_drafts(header, rows, ids, index, state, offsets)
        ngram_drafts(header, rows, state, NUM_DRAFTS, offsets=offsets)

    from triton import knobs

    step(7, 4, 0)
    compiled: list[object] = []

    def count(**arguments: object) -> None:
        compiled.append(arguments["fn"])

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, count
    try:
        for num_reqs, query_len, shift in ((1, 1, 1), (1, 5, 0), (16, 16, 3), (33, 2, 2)):
            step(num_reqs, query_len, shift)
    finally:
        knobs.runtime.jit_cache_hook = before
    assert compiled == []
