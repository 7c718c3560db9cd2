"""The state and input kernels on a GPU: in a CUDA graph, over pinned memory, with steps in flight.

Their values are checked by tests/cpu, whose files run compiled on a machine with a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from state_cases import POISON, Request, buffers, check_inputs, int32, logits_rows, state_of

from nanorunner.kernels.advance_state import advance_state
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs, prepare_mixed_inputs
from nanorunner.kernels.uva import uva_problem, uva_view, uva_zeros
from nanorunner.workers.pinned_ring import SPARE_FACTOR
from nanorunner.workers.staged_tensor import StagedWriter

DEVICE = torch.device("cuda", 0)
BLOCK_SIZE = 256
SLEEP_CYCLES = 200_000_000  # about 0.1 s


@pytest.fixture
def sync_debug_mode_restored() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def decoding(row: int, length: int = 40) -> Request:
    """Return a request with `length` known tokens, the last one sampled; it goes on counting."""
    first = 1000 * (row + 1)
    tokens = list(range(first, first + length))
    return Request(tokens, length - 1, length - 1, [3 * row, 3 * row + 1, 3 * row + 2])


def test_a_captured_decode_serves_batches_of_any_size() -> None:
    """Input preparation, a model that says "one more", advance: replayed with other headers."""
    bucket, num_rows, ring_size = 8, 16, 4
    requests = {row: decoding(row, 250 + row) for row in range(num_rows)}
    state = state_of(requests, num_rows, 600, 3)
    out, sampled = buffers(bucket, bucket, 3), torch.zeros(bucket, dtype=torch.int64, device=DEVICE)
    header, idx_mapping = int32([0, 0]), int32([0] * bucket)
    ring = torch.full((ring_size, bucket), POISON, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        prepare_decode_inputs(header, idx_mapping, state, out, BLOCK_SIZE)
        torch.add(out.input_ids, 1, out=sampled)
        loc = out.query_start_loc
        advance_state(header, idx_mapping, loc, sampled, state, ring, counter)

    step()  # compiles; an empty batch changes no row
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    counter.zero_()

    batches = [[0], [3, 1, 2], list(range(8, 16)), [], [5, -1, 4], *[[7, 6]] * 9]
    for number, rows in enumerate(batches):
        header.copy_(int32([len(rows), len(rows)]))
        idx_mapping[: len(rows)] = int32(rows)
        graph.replay()
        check_inputs(out, [(requests.get(row), 1) for row in rows], BLOCK_SIZE)
        expected = [requests[row].tokens[-1] + 1 if row >= 0 else -1 for row in rows]
        assert ring[number % ring_size, : len(rows)].tolist() == expected
        for row in rows:
            if row >= 0:
                requests[row].tokens.append(requests[row].tokens[-1] + 1)
                requests[row].num_computed += 1
    assert counter.tolist() == [len(batches)]
    for row, request in requests.items():
        start, length = request.prefill_len + 1, len(request.tokens)
        assert state.token_ids[row, start:length].tolist() == request.tokens[start:]
        assert (int(state.num_computed[row]), int(state.total_len[row])) == (length - 1, length)


@pytest.mark.usefixtures("sync_debug_mode_restored")
def test_a_hundred_steps_wait_for_nothing() -> None:
    writer = StagedWriter(DEVICE, 2)
    table = writer.table("table", (16, 64), torch.int32)
    seeds = writer.table("seeds", (16,), torch.int64)
    requests = {row: decoding(row) for row in range(4)}
    state, out = state_of(requests, 4, 600, 3), buffers(4, 4, 3)
    header, idx_mapping = int32([4, 4]), int32([0, 1, 2, 3])
    ring = torch.zeros(4, 4, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    for number in range(100):
        table.stage(number % 16, number % 60, [number, number + 1])
        seeds.stage_elem(number % 16, -number)
        assert writer.apply() == 1
        prepare_decode_inputs(header, idx_mapping, state, out, BLOCK_SIZE)
        loc = out.query_start_loc
        advance_state(header, idx_mapping, loc, out.input_ids, state, ring, counter)
    torch.cuda.set_sync_debug_mode("default")
    assert int(counter) == 100
    assert state.num_computed.tolist() == [139] * 4
    assert seeds.tensor.tolist() == [-(96 + r) if r < 4 else -(80 + r) for r in range(16)]


@pytest.mark.parametrize("num_applies", [3, 40])
def test_staged_writes_of_steps_in_flight_are_not_overwritten(num_applies: int) -> None:
    """The device is kept busy while the CPU runs ahead, past all buffers that the ring may have."""
    writer = StagedWriter(DEVICE, 1, timeout_s=30.0)
    table = writer.table("table", (4, 5000), torch.int32)
    table.stage_elem(0, 1)
    writer.apply()  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    seen = []
    for number in range(num_applies):
        # The length passes a buffer's first size, so buffers are replaced in flight too.
        table.stage(number % 4, 0, [number] * (1000 + 100 * number))
        writer.apply()
        seen.append(table.tensor[number % 4, : 1000 + 100 * number].clone())
    assert len(writer._ring) <= SPARE_FACTOR * 3
    for number, row in enumerate(seen):
        assert bool((row == number).all()), f"apply {number} was overwritten"


def test_kernels_read_and_write_pinned_host_memory() -> None:
    assert uva_problem(DEVICE) == ""
    base = uva_zeros((8, 5000), torch.int32, DEVICE)
    assert base.device == DEVICE
    writer = StagedWriter(DEVICE, 2)
    table = writer.table("token_ids", (8, 5000), torch.int32, base)
    prompt = list(range(7, 7 + 3000))
    table.stage(6, 0, prompt)
    writer.apply()
    request = Request(prompt, 3000, 100, list(range(12)))
    state = state_of({6: request}, 8, 16_000, 12)._replace(token_ids=table.tensor)
    out, logits = buffers(1, 2900, 12), logits_rows(1)
    out.query_start_loc.copy_(int32([0, 2900]))
    header, idx_mapping, places = int32([1, 2900]), int32([6]), int32([0])
    prepare_mixed_inputs(header, idx_mapping, places, state, out, logits, 2900, BLOCK_SIZE)
    check_inputs(out, [(request, 2900)], BLOCK_SIZE)
    ring = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    loc, ids = out.query_start_loc, torch.tensor([99], device=DEVICE)
    advance_state(header, idx_mapping, loc, ids, state, ring, counter, places)
    assert base[6, 2998:3002].tolist() == [3005, 3006, 99, 0]


def test_a_view_shares_the_hosts_bytes_and_keeps_them_alive() -> None:
    host = torch.arange(1000, dtype=torch.int64).pin_memory()
    view = uva_view(host, DEVICE)
    view[3] = -5
    torch.cuda.synchronize()
    assert host[:5].tolist() == [0, 1, 2, -5, 4]
    host[4] = 77
    assert int(view[4]) == 77
    address = host.data_ptr()
    del host
    gc.collect()
    others = [torch.empty(1000, dtype=torch.int64).pin_memory() for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    assert view[:6].tolist() == [0, 1, 2, -5, 77, 5]


def test_a_view_of_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(ValueError, match="pinned"):
        uva_view(torch.zeros(4, dtype=torch.int32), DEVICE)


def test_a_batch_of_another_size_compiles_nothing() -> None:
    """A compilation in mid-serve stalls every request for seconds."""
    requests = {row: decoding(row) for row in range(40)}
    state = state_of(requests, 40, 600, 3)
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("table", (40, 64), torch.int32)
    ring = torch.zeros(4, 40, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def step(num_reqs: int, num_padding: int) -> None:
        out, logits = buffers(num_reqs, num_reqs + num_padding, 3), logits_rows(num_reqs)
        out.query_start_loc.copy_(int32(list(range(num_reqs + 1))))
        header, rows = int32([num_reqs, num_reqs]), int32(list(range(num_reqs)))
        for row in range(num_reqs):
            table.stage(row, row, [1] * (row % 7 + 1))
        writer.apply()
        prepare_mixed_inputs(header, rows, rows, state, out, logits, 1, BLOCK_SIZE)
        prepare_decode_inputs(header, rows, state, buffers(num_reqs, num_reqs, 3), BLOCK_SIZE)
        loc, ids = out.query_start_loc, logits.indices
        advance_state(header, rows, loc, ids, state, ring, counter, rows)
        advance_state(header, rows, loc, ids, state, ring, counter)

    from triton import knobs

    step(7, 0)
    compiled: list[object] = []

    def count(**arguments: object) -> None:
        compiled.append(arguments["fn"])

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, count
    try:
        for num_reqs, num_padding in ((1, 0), (2, 1), (16, 15), (33, 31), (40, 0)):
            step(num_reqs, num_padding)
    finally:
        knobs.runtime.jit_cache_hook = before
    assert compiled == []
