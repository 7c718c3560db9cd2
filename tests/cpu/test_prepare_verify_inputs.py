"""With offsets a request's drafts are inputs too, and nothing reaches past its token limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import POISON, Request, buffers, int32, logits_rows, state_of, with_limits

from nanorunner.kernels.prepare_inputs import (
    prepare_decode_inputs,
    prepare_decode_inputs_reference,
    prepare_decode_inputs_triton,
    prepare_mixed_inputs,
    prepare_mixed_inputs_reference,
    prepare_mixed_inputs_triton,
)
from nanorunner.kernels.state_tables import InputBuffers, LogitsRows, StateTables

pytestmark = pytest.mark.beside

BLOCK_SIZE, MAX_BLOCKS, MAX_LEN, ROWS = 4, 5, 20, 4
Prepare = Callable[..., None]
DECODES = [prepare_decode_inputs_reference, prepare_decode_inputs_triton, prepare_decode_inputs]
MIXED = [prepare_mixed_inputs_reference, prepare_mixed_inputs_triton, prepare_mixed_inputs]


class Place(NamedTuple):
    """One entry of a batch: a row (-1: nobody), where it begins past num_computed, its tokens."""

    row: int
    offset: int
    num_tokens: int = 1


def decoding(length: int, prefill_len: int, first: int) -> Request:
    """Return a request of `length` tokens that has computed all but the last one."""
    blocks = [7 * first + i for i in range(-(-length // BLOCK_SIZE))]
    return Request(list(range(first, first + length)), prefill_len, length - 1, blocks)


def state_with_drafts(
    requests: dict[int, Request], drafts: dict[int, list[int]], limits: list[int]
) -> StateTables:
    """Return tables whose rows know all their tokens, and drafts behind them.

    A row that has sampled has poison in place of its newest token: last_sampled has that one.
    """
    state = state_of(requests, ROWS, MAX_LEN, MAX_BLOCKS)
    for row, request in requests.items():
        known = [*request.tokens, *drafts.get(row, [])][:MAX_LEN]
        state.token_ids[row, : len(known)] = int32(known)
        if len(request.tokens) > request.prefill_len:
            state.token_ids[row, len(request.tokens) - 1] = POISON
    return with_limits(state, limits)


def run_decode(
    prepare: Prepare, state: StateTables, places: list[Place], bucket: int
) -> InputBuffers:
    """Prepare a decode; what lies behind the batch is stale."""
    out, stale = buffers(bucket, bucket, MAX_BLOCKS), bucket - len(places)
    prepare(
        int32([len(places), len(places)]),
        int32([place.row for place in places] + [1] * stale),
        state,
        out,
        BLOCK_SIZE,
        int32([place.offset for place in places] + [2] * stale),
    )
    return out


def run_mixed(
    prepare: Prepare, state: StateTables, places: list[Place], padding: int
) -> tuple[InputBuffers, LogitsRows]:
    """Prepare a batch in which every place samples."""
    counts = [place.num_tokens for place in places]
    out, logits = buffers(len(places) + 1, sum(counts) + padding, MAX_BLOCKS), logits_rows(16)
    loc = [sum(counts[:i]) for i in range(len(places) + 1)]
    out.query_start_loc.copy_(int32([*loc, loc[-1]]))
    prepare(
        int32([len(places), sum(counts)]),
        int32([*(place.row for place in places), 1]),
        int32([*range(len(places)), 5]),
        state,
        out,
        logits,
        max(counts, default=0),
        BLOCK_SIZE,
        int32([*(place.offset for place in places), 2]),
    )
    return out, logits


def check_places(
    out: InputBuffers,
    places: list[Place],
    requests: dict[int, Request],
    drafts: dict[int, list[int]],
    limits: list[int],
) -> None:
    """Fail unless `out` is what plain Python makes of the places."""
    ids, positions, slots, seq_lens, tables = [], [], [], [], []
    for row, offset, count in places:
        request = requests.get(row, Request([], 0, 0))
        limit = limits[row] if row >= 0 else 0
        known = [*request.tokens, *drafts.get(row, [])]
        first = request.num_computed + offset
        is_somebody = 0 <= first < limit
        for position in range(first, first + count):
            is_ours = 0 <= position < limit
            ids.append(known[position] if is_ours else 0)
            positions.append(position if is_ours else 0)
            has_block = is_ours and position // BLOCK_SIZE < len(request.blocks)
            slots.append(
                request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                if has_block
                else -1
            )
        seq_lens.append(first + count if is_somebody else 0)
        tables.append(request.blocks[: -(-seq_lens[-1] // BLOCK_SIZE)])
    num_padded = len(out.input_ids) - len(ids)
    assert out.input_ids.tolist() == ids + [0] * num_padded
    assert out.positions.tolist() == positions + [0] * num_padded
    assert out.slot_mapping.tolist() == slots + [-1] * num_padded
    assert out.seq_lens.tolist() == seq_lens + [0] * (len(out.seq_lens) - len(seq_lens))
    for table, used in zip(out.block_tables.tolist(), tables, strict=False):
        assert table[: len(used)] == used
        assert used or table == [0] * MAX_BLOCKS, "a row of nobody is not zero"


@pytest.mark.parametrize("prepare", DECODES)
def test_a_verify_group_reads_its_newest_token_and_its_drafts(prepare: Prepare) -> None:
    """6 tokens of which 5 were the prompt, the last one sampled as 100; drafts 7 and 8."""
    request = Request([1, 2, 3, 4, 5, 100], 5, 5, [6, 9])
    state = state_with_drafts({2: request}, {2: [7, 8]}, [MAX_LEN] * ROWS)
    places = [Place(2, 0), Place(2, 1), Place(2, 2)]
    out = run_decode(prepare, state, places, bucket=3)
    assert out.input_ids.tolist() == [100, 7, 8]
    assert out.positions.tolist() == [5, 6, 7]
    assert out.seq_lens.tolist() == [6, 7, 8]
    assert out.slot_mapping.tolist() == [37, 38, 39]
    assert out.query_start_loc.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("prepare", DECODES)
def test_an_offset_of_minus_one_reads_the_token_before(prepare: Prepare) -> None:
    """A draft model's first run; a first token has none before it, and its place is nobody."""
    requests = {0: decoding(6, 5, 10), 3: Request([40], 1, 0, [2])}
    state = state_with_drafts(requests, {}, [MAX_LEN] * ROWS)
    places = [Place(0, -1), Place(0, 0), Place(3, -1), Place(3, 0)]
    out = run_decode(prepare, state, places, bucket=4)
    assert out.input_ids.tolist() == [14, 15, 0, 40]
    assert out.seq_lens.tolist() == [5, 6, 0, 1]
    check_places(out, places, requests, {}, [MAX_LEN] * ROWS)


@pytest.mark.parametrize("prepare", MIXED)
def test_groups_and_a_chunk_share_a_batch(prepare: Prepare) -> None:
    requests = {1: decoding(7, 3, 10), 0: Request(list(range(50, 62)), 12, 3, [4, 5, 6])}
    drafts, limits = {1: [91, 92]}, [MAX_LEN] * ROWS
    places = [Place(1, 0), Place(1, 1), Place(1, 2), Place(0, 0, 9)]
    out, logits = run_mixed(prepare, state_with_drafts(requests, drafts, limits), places, 2)
    assert out.input_ids.tolist() == [16, 91, 92, *range(53, 62), 0, 0]
    assert logits.indices[:4].tolist() == [0, 1, 2, 11]
    assert logits.idx_mapping[:4].tolist() == [1, 1, 1, 0]
    assert logits.positions[:4].tolist() == [6, 7, 8, 11]
    assert out.seq_lens.tolist() == [7, 8, 9, 12, 0]


@pytest.mark.parametrize("prepare", MIXED)
def test_past_the_limit_a_place_is_nobody_but_keeps_its_row(prepare: Prepare) -> None:
    requests, drafts = {2: decoding(7, 3, 10)}, {2: [91, 92]}
    limits = [0, 0, 8, 0]
    places = [Place(2, 0), Place(2, 1), Place(2, 2)]
    out, logits = run_mixed(prepare, state_with_drafts(requests, drafts, limits), places, 0)
    assert out.input_ids.tolist() == [16, 91, 0]
    assert out.positions.tolist() == [6, 7, 0]
    assert out.slot_mapping.tolist()[2] == -1
    assert out.seq_lens.tolist() == [7, 8, 0, 0]
    assert logits.idx_mapping[:3].tolist() == [2, 2, 2]
    assert logits.positions[:3].tolist() == [6, 7, 0]


@pytest.mark.parametrize("prepare", DECODES)
def test_the_last_place_of_a_full_row_reads_nothing_behind_the_tables(prepare: Prepare) -> None:
    """Row, limit and block table all end at 20: the drafts' places lie past every table."""
    requests = {3: decoding(20, 3, 10)}
    limits = [MAX_LEN] * ROWS
    places = [Place(3, 0), Place(3, 1), Place(3, 15)]
    out = run_decode(prepare, state_with_drafts(requests, {}, limits), places, bucket=4)
    assert out.input_ids.tolist() == [29, 0, 0, 0]
    assert out.seq_lens.tolist() == [20, 0, 0, 0]
    check_places(out, places, requests, {}, limits)


@settings(max_examples=20)
@given(st.data())
def test_any_batch_with_offsets_equals_the_model(data: st.DataObject) -> None:
    query_len = data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(ROWS)))
    limits = [data.draw(st.integers(2, MAX_LEN)) for _ in range(ROWS)]
    requests, drafts, places = {}, {}, []
    for row in order[: data.draw(st.integers(0, 2))]:
        length = data.draw(st.integers(2, limits[row]))
        requests[row] = decoding(length, data.draw(st.integers(1, length - 1)), 20 * (row + 1))
        requests[row].blocks = [9 * row + i for i in range(MAX_BLOCKS)]
        drafts[row] = [500 + 10 * row + i for i in range(4)]
        start = data.draw(st.sampled_from([-1, 0]))
        places += [Place(row, start + i) for i in range(query_len)]
    if data.draw(st.booleans()):
        places += [Place(-1, i) for i in range(query_len)]
    for decode in DECODES[:2]:
        state = state_with_drafts(requests, drafts, limits)
        out = run_decode(decode, state, places, max(1, len(places) + data.draw(st.integers(0, 2))))
        check_places(out, places, requests, drafts, limits)

    row = order[-1]
    prefill_len = data.draw(st.integers(1, limits[row]))
    computed = data.draw(st.integers(0, prefill_len - 1))
    blocks = [70 + i for i in range(MAX_BLOCKS)]
    requests[row] = Request(list(range(100, 100 + prefill_len)), prefill_len, computed, blocks)
    places.append(Place(row, 0, data.draw(st.integers(1, prefill_len - computed))))
    for mixed in MIXED[:2]:
        state = state_with_drafts(requests, drafts, limits)
        out, logits = run_mixed(mixed, state, places, data.draw(st.integers(0, 3)))
        check_places(out, places, requests, drafts, limits)
        last = out.query_start_loc[1 : len(places) + 1] - 1
        assert logits.indices[: len(places)].tolist() == last.tolist()
        assert logits.positions[: len(places)].tolist() == out.positions[last].tolist()
        assert logits.idx_mapping[: len(places)].tolist() == [place.row for place in places]


def test_offsets_without_token_limits_are_refused() -> None:
    state = state_of({0: decoding(4, 3, 10)}, ROWS, MAX_LEN, MAX_BLOCKS)
    with pytest.raises(AssertionError, match="token limits"):
        prepare_decode_inputs(
            int32([1, 1]), int32([0]), state, buffers(1, 1, MAX_BLOCKS), BLOCK_SIZE, int32([0])
        )


def test_offsets_of_zero_change_nothing() -> None:
    requests = {0: decoding(6, 5, 10), 2: decoding(9, 2, 40), 3: Request([1, 2, 3], 3, 2, [8])}
    rows = [2, -1, 0, 3]
    for prepare in DECODES:
        state = state_with_drafts(requests, {}, [MAX_LEN] * ROWS)
        plain = buffers(4, 4, MAX_BLOCKS)
        prepare(int32([4, 4]), int32(rows), state, plain, BLOCK_SIZE)
        out = run_decode(prepare, state, [Place(row, 0) for row in rows], bucket=4)
        for now, then in zip(out, plain, strict=True):
            assert torch.equal(now, then)
