"""A step's inputs are those that a plain Python model computes, padding included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE
from sparse_memory import sparse_int32
from state_cases import (
    POISON,
    Request,
    buffers,
    check_inputs,
    int32,
    logits_rows,
    state_of,
)

from nanorunner.kernels.prepare_inputs import (
    TOKEN_TILE,
    prepare_decode_inputs,
    prepare_decode_inputs_reference,
    prepare_decode_inputs_triton,
    prepare_mixed_inputs,
    prepare_mixed_inputs_reference,
    prepare_mixed_inputs_triton,
)
from nanorunner.kernels.state_tables import InputBuffers, LogitsRows

pytestmark = pytest.mark.beside

BLOCK_SIZE, MAX_BLOCKS, MAX_LEN, ROWS = 4, 5, 20, 6
Prepare = Callable[..., None]
DECODES = [prepare_decode_inputs_reference, prepare_decode_inputs_triton]
MIXED = [prepare_mixed_inputs_reference, prepare_mixed_inputs_triton]


def request_of(prefill_len: int, num_computed: int, num_new: int = 1, first: int = 10) -> Request:
    """Return a request whose next num_new tokens are known, as a scheduler would have it."""
    length = max(prefill_len, num_computed + num_new)
    blocks = [7 * first + i for i in range(-(-length // BLOCK_SIZE))]
    return Request(list(range(first, first + length)), prefill_len, num_computed, blocks)


def run_mixed(
    prepare: Prepare,
    requests: dict[int, Request],
    rows: list[int],
    query_lens: list[int],
    padded: tuple[int, int] = (0, 0),
    samples: list[bool] | None = None,
) -> tuple[InputBuffers, LogitsRows]:
    """Prepare a batch of these rows; padded: further requests and tokens."""
    num_reqs, num_tokens = len(rows) + padded[0], sum(query_lens) + padded[1]
    out = buffers(num_reqs, num_tokens, MAX_BLOCKS)
    loc = [0, *(sum(query_lens[: i + 1]) for i in range(len(rows)))]
    out.query_start_loc.copy_(int32(loc + [loc[-1]] * padded[0]))
    samples = samples or [True] * len(rows)
    places = [sum(samples[:i]) if sampled else -1 for i, sampled in enumerate(samples)]
    logits = logits_rows(sum(samples))
    prepare(
        int32([len(rows), sum(query_lens)]),
        int32([*rows, *[0] * padded[0]]),
        int32([*places, *[0] * padded[0]]),
        state_of(requests, ROWS, MAX_LEN, MAX_BLOCKS),
        out,
        logits,
        max(query_lens, default=0),
        BLOCK_SIZE,
    )
    return out, logits


def run_decode(
    prepare: Prepare, requests: dict[int, Request], rows: list[int], bucket: int
) -> InputBuffers:
    out = buffers(bucket, bucket, MAX_BLOCKS)
    prepare(
        int32([len(rows), len(rows)]),
        int32([*rows, *[0] * (bucket - len(rows))]),  # stale rows behind the batch
        state_of(requests, ROWS, MAX_LEN, MAX_BLOCKS),
        out,
        BLOCK_SIZE,
    )
    return out


@pytest.mark.parametrize("prepare", MIXED)
def test_a_chunk_reads_its_part_of_the_prompt(prepare: Prepare) -> None:
    """Tokens 10 to 19, 3 of them from position 4, then the last 3."""
    for num_computed, expected in ((4, [14, 15, 16]), (7, [17, 18, 19])):
        out, _ = run_mixed(prepare, {3: request_of(10, num_computed)}, [3], [3])
        assert out.input_ids.tolist() == expected
        assert out.positions.tolist() == list(range(num_computed, num_computed + 3))


@pytest.mark.parametrize("prepare", MIXED)
def test_a_mixed_batch_has_its_positions_lengths_and_logits(prepare: Prepare) -> None:
    requests = {1: request_of(3, 5), 4: request_of(4, 0), 0: request_of(9, 9, first=50)}
    out, logits = run_mixed(prepare, requests, [1, 4, 0], [1, 4, 1], padded=(2, 3))
    assert out.query_start_loc.tolist() == [0, 1, 5, 6, 6, 6]
    assert out.seq_lens.tolist() == [6, 4, 10, 0, 0]
    assert out.positions.tolist() == [5, 0, 1, 2, 3, 9, 0, 0, 0]
    assert logits.indices.tolist() == [0, 4, 5]
    assert logits.idx_mapping.tolist() == [1, 4, 0]
    assert logits.positions.tolist() == [5, 3, 9]
    batch: list[tuple[Request | None, int]] = [(requests[1], 1), (requests[4], 4), (requests[0], 1)]
    check_inputs(out, batch, BLOCK_SIZE)


@pytest.mark.parametrize("prepare", MIXED)
def test_slots_follow_the_block_table_and_nobody_has_none(prepare: Prepare) -> None:
    """Block size 4, blocks [7, 8]: positions 1, 2, 3 are slots 29, 30, 31."""
    request = Request([1, 2, 3, 4], 4, 1, [7, 8])
    out, _ = run_mixed(prepare, {2: request}, [2, -1], [3, 3], padded=(0, 2))
    assert out.slot_mapping.tolist() == [29, 30, 31, -1, -1, -1, -1, -1]
    check_inputs(out, [(request, 3), (None, 3)], BLOCK_SIZE)


@pytest.mark.parametrize("prepare", MIXED)
def test_an_unfinished_chunk_has_no_logits_row(prepare: Prepare) -> None:
    requests = {0: request_of(12, 4), 1: request_of(5, 5), 2: request_of(9, 6)}
    arguments = (requests, [1, 0, 2], [1, 5, 3])
    out, logits = run_mixed(prepare, *arguments, samples=[True, False, True])
    assert logits.indices.tolist() == [0, 8]
    assert logits.idx_mapping.tolist() == [1, 2]
    assert logits.positions.tolist() == [5, 8]
    check_inputs(out, [(requests[1], 1), (requests[0], 5), (requests[2], 3)], BLOCK_SIZE)


@pytest.mark.parametrize("prepare", DECODES)
def test_a_padded_decode_is_neutral_behind_its_requests(prepare: Prepare) -> None:
    requests = {5: request_of(3, 7)}
    out = run_decode(prepare, requests, [5], bucket=4)
    assert out.query_start_loc.tolist() == [0, 1, 1, 1, 1]
    check_inputs(out, [(requests[5], 1)], BLOCK_SIZE)
    assert not out.block_tables[1:].any()


@pytest.mark.parametrize("prepare", DECODES)
def test_nobody_in_a_decode_keeps_its_place_and_writes_nothing(prepare: Prepare) -> None:
    requests = {0: request_of(3, 4), 4: request_of(6, 6)}
    out = run_decode(prepare, requests, [0, -1, 4], bucket=3)
    check_inputs(out, [(requests[0], 1), (None, 1), (requests[4], 1)], BLOCK_SIZE)


@pytest.mark.parametrize("prepare", DECODES)
def test_a_decode_may_read_the_last_prompt_token(prepare: Prepare) -> None:
    """A prompt whose other tokens were all in the prefix cache."""
    request = request_of(9, 8)
    out = run_decode(prepare, {2: request}, [2], bucket=1)
    assert out.input_ids.tolist() == [18]


@pytest.mark.parametrize("prepare", DECODES)
def test_a_full_bucket_and_an_empty_batch_both_fit(prepare: Prepare) -> None:
    requests = {row: request_of(3, 3 + row, first=10 * (row + 1)) for row in range(ROWS)}
    out = run_decode(prepare, requests, list(range(ROWS)), bucket=ROWS)
    check_inputs(out, [(requests[row], 1) for row in range(ROWS)], BLOCK_SIZE)
    check_inputs(run_decode(prepare, requests, [], bucket=3), [], BLOCK_SIZE)


@pytest.mark.parametrize("prepare", DECODES)
def test_a_position_past_the_block_table_has_no_slot(prepare: Prepare) -> None:
    """A step too far, as after a late stop, must not write another request's KV."""
    request = Request(list(range(21)), 3, 20, [1, 2, 3, 4, 5])
    out = run_decode(prepare, {0: request}, [0], bucket=1)
    assert out.slot_mapping.tolist() == [-1]


@pytest.mark.parametrize("prepare", DECODES)
def test_the_same_buffers_serve_batches_of_any_size(prepare: Prepare) -> None:
    requests = {row: request_of(3, 4 + row, first=10 * (row + 1)) for row in range(4)}
    state = state_of(requests, ROWS, MAX_LEN, MAX_BLOCKS)
    out = buffers(4, 4, MAX_BLOCKS)
    addresses = [tensor.data_ptr() for tensor in out]
    for rows in ([0, 1, 2, 3], [2], [3, 0, 1]):
        header, idx_mapping = int32([len(rows), 0]), int32([*rows, *[1] * (4 - len(rows))])
        prepare(header, idx_mapping, state, out, BLOCK_SIZE)
        check_inputs(out, [(requests[row], 1) for row in rows], BLOCK_SIZE)
    assert [tensor.data_ptr() for tensor in out] == addresses


@settings(max_examples=25)
@given(st.data())
def test_any_decode_equals_the_model(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from([-1, *range(ROWS)]), max_size=5))
    requests = {}
    for row in range(ROWS):
        computed = data.draw(st.integers(1, MAX_LEN - 2))
        requests[row] = request_of(
            data.draw(st.integers(1, computed + 1)), computed, first=10 * (row + 1)
        )
    bucket = max(1, len(rows) + data.draw(st.integers(0, 2)))
    for prepare in DECODES:
        out = run_decode(prepare, requests, rows, bucket)
        check_inputs(out, [(requests.get(row), 1) for row in rows], BLOCK_SIZE)


@settings(max_examples=25)
@given(st.data())
def test_any_mixed_batch_equals_the_model(data: st.DataObject) -> None:
    """Chunks, decodes, nobodies and empty requests, with padding behind."""
    rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=4))
    requests, query_lens, samples = {}, [], []
    for row in rows:
        prefill_len = data.draw(st.integers(1, 12))
        computed = data.draw(st.integers(0, prefill_len + 4))
        left = max(prefill_len - computed, 1)
        query_lens.append(data.draw(st.integers(0, left)))
        samples.append(computed + query_lens[-1] >= prefill_len and query_lens[-1] > 0)
        requests[row] = request_of(prefill_len, computed, first=10 * (row + 1))
    if data.draw(st.booleans()):
        rows, query_lens, samples = [*rows, -1], [*query_lens, 2], [*samples, True]
    padded = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 5))
    sampling = [i for i, sampled in enumerate(samples) if sampled]
    for prepare in MIXED:
        out, logits = run_mixed(prepare, requests, rows, query_lens, padded, samples)
        batch = [(requests.get(row), length) for row, length in zip(rows, query_lens, strict=True)]
        check_inputs(out, batch, BLOCK_SIZE)
        assert logits.indices.tolist() == [sum(query_lens[: i + 1]) - 1 for i in sampling]
        assert logits.idx_mapping.tolist() == [rows[i] for i in sampling]
        assert logits.positions.tolist() == out.positions[logits.indices].tolist()


@pytest.mark.parametrize("prepare", MIXED)
def test_a_prompt_longer_than_a_tile_is_whole(prepare: Prepare) -> None:
    length = 2 * TOKEN_TILE + 3
    blocks = [(5 * i) % 1009 for i in range(-(-length // BLOCK_SIZE))]
    requests = {1: Request(list(range(length)), length, 0, blocks), 0: request_of(2, 2)}
    out = buffers(2, length + 1 + 2 * TOKEN_TILE, len(blocks))
    out.query_start_loc.copy_(int32([0, 1, length + 1]))
    logits = logits_rows(2)
    prepare(
        int32([2, length + 1]),
        int32([0, 1]),
        int32([1, 0]),
        state_of(requests, 2, length, len(blocks)),
        out,
        logits,
        length,
        BLOCK_SIZE,
    )
    check_inputs(out, [(requests[0], 1), (requests[1], length)], BLOCK_SIZE)
    assert logits.indices.tolist() == [length, 0]


def test_a_row_beyond_two_to_the_31_elements_is_read_where_it_lies() -> None:
    state = state_of({}, 2560, 1, 1)
    shape = (2560, 1_000_000)
    if DEVICE.type == "cuda":
        token_ids = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    else:
        token_ids = sparse_int32(*shape)
    token_ids[2559, 1:3] = int32([5, 6])
    state = state._replace(token_ids=token_ids)
    state.num_computed[2559], state.prefill_len[2559], state.block_tables[2559, 0] = 1, 3, 0
    for decode in DECODES:
        out = buffers(1, 1, 1)
        decode(int32([1, 1]), int32([2559]), state, out, BLOCK_SIZE)
        assert out.input_ids.tolist() == [5]
    for mixed in MIXED:
        out, logits = buffers(1, 2, 1), logits_rows(1)
        out.query_start_loc.copy_(int32([0, 2]))
        mixed(int32([1, 2]), int32([2559]), int32([0]), state, out, logits, 2, BLOCK_SIZE)
        assert out.input_ids.tolist() == [5, 6]


def test_the_public_functions_choose_a_form_by_device() -> None:
    requests = {0: request_of(3, 3)}
    check_inputs(run_decode(prepare_decode_inputs, requests, [0], 2), [(requests[0], 1)], 4)
    out, _ = run_mixed(prepare_mixed_inputs, requests, [0], [1], padded=(1, 1))
    check_inputs(out, [(requests[0], 1)], BLOCK_SIZE)
    assert POISON not in out.input_ids.tolist()
