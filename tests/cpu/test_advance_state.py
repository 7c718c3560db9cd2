"""After sampling, each row stands where a plain Python model puts it; nothing else has moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE
from state_cases import POISON, Request, buffers, check_same, copy_of, int32, state_of

from nanorunner.kernels import advance_state as module
from nanorunner.kernels.advance_state import (
    advance_state,
    advance_state_reference,
    advance_state_triton,
)
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs

ROWS, MAX_LEN, RING = 5, 16, 4
Advance = Callable[..., None]
FORMS = [advance_state_reference, advance_state_triton]


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def empty_ring(width: int) -> torch.Tensor:
    return torch.full((RING, width), POISON, dtype=torch.int64, device=DEVICE)


def loc_of(query_lens: list[int], padded: int = 0) -> torch.Tensor:
    loc = [0, *itertools.accumulate(query_lens)]
    return int32(loc + [loc[-1]] * padded)


@pytest.mark.parametrize("advance", FORMS)
def test_a_decode_moves_on_by_one_token(advance: Advance) -> None:
    state = state_of({2: Request([1, 2, 3, 4, 5], 3, 4)}, ROWS, MAX_LEN, 1)
    before, ring, counter = copy_of(state), empty_ring(2), int64([0])
    advance(int32([1, 1]), int32([2, 2]), loc_of([1], 1), int64([77, 88]), state, ring, counter)
    assert (int(state.num_computed[2]), int(state.total_len[2])) == (5, 6)
    assert int(state.last_sampled[2]) == int(state.token_ids[2, 5]) == 77
    assert ring.tolist() == [[77, POISON], *[[POISON] * 2] * 3]
    assert counter.tolist() == [1]
    before.num_computed[2], before.total_len[2] = 5, 6
    before.last_sampled[2] = before.token_ids[2, 5] = 77
    check_same(state, before)


@pytest.mark.parametrize("advance", FORMS)
@pytest.mark.parametrize("place", [0, -1])
def test_an_unfinished_chunk_only_computes_on(advance: Advance, place: int) -> None:
    """After it seq_len is 4 of a prefill of 10; also when an id was sampled for it."""
    state = state_of({2: Request(list(range(10)), 10, 1)}, ROWS, MAX_LEN, 1)
    before, ring, counter = copy_of(state), empty_ring(1), int64([6])
    arguments = (int32([1, 3]), int32([2]), loc_of([3]), int64([77]), state, ring, counter)
    advance(*arguments, int32([place]))
    before.num_computed[2] = 4
    check_same(state, before)
    assert ring[2].tolist() == [-1 if place == 0 else POISON]
    assert counter.tolist() == [7]


@pytest.mark.parametrize("advance", FORMS)
def test_nobody_changes_nothing(advance: Advance) -> None:
    state = state_of({row: Request([1, 2], 1, 1) for row in range(ROWS)}, ROWS, MAX_LEN, 1)
    before, ring, counter = copy_of(state), empty_ring(3), int64([0])
    # The rows behind the batch are stale, as in a padded graph.
    arguments = (int32([1, 1]), int32([-1, 3, 0]), loc_of([1], 2), int64([7, 8, 9]))
    advance(*arguments, state, ring, counter)
    check_same(state, before)
    assert ring[0].tolist() == [-1, POISON, POISON]


@pytest.mark.parametrize("advance", FORMS)
def test_an_empty_step_only_counts(advance: Advance) -> None:
    state, ring, counter = state_of({}, ROWS, MAX_LEN, 1), empty_ring(1), int64([0])
    advance(int32([0, 0]), int32([0]), loc_of([], 1), int64([7]), state, ring, counter)
    assert counter.tolist() == [1]
    assert bool((ring == POISON).all())


@pytest.mark.parametrize("advance", FORMS)
def test_a_full_row_does_not_run_into_the_next(advance: Advance) -> None:
    state = state_of({0: Request(list(range(16)), 2, 15)}, 2, 16, 1)
    arguments = (int32([1, 1]), int32([0]), loc_of([1]), int64([7]), state)
    advance(*arguments, empty_ring(1), int64([0]))
    assert bool((state.token_ids[1] == POISON).all())
    assert (int(state.total_len[0]), int(state.last_sampled[0])) == (17, 7)


@pytest.mark.parametrize("advance", FORMS)
def test_outputs_go_round_the_ring_one_step_a_launch(advance: Advance) -> None:
    state = state_of({0: Request([5], 1, 0)}, 1, MAX_LEN, 1)
    ring, counter = empty_ring(1), int64([0])
    for step in range(2 * RING + 1):
        ids = int64([100 + step])
        advance(int32([1, 1]), int32([0]), loc_of([1]), ids, state, ring, counter)
        assert int(ring[step % RING, 0]) == 100 + step
    assert counter.tolist() == [2 * RING + 1]
    assert ring[:, 0].tolist() == [108, 105, 106, 107]


@pytest.mark.parametrize("advance", FORMS)
def test_more_requests_than_a_tile_all_move(
    advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE", 4)
    requests = {row: Request([1, 2, 3], 2, 2) for row in range(11)}
    state, ring = state_of(requests, 11, MAX_LEN, 1), empty_ring(11)
    rows = list(range(10, -1, -1))
    arguments = (int32([11, 11]), int32(rows), loc_of([1] * 11), int64(rows), state)
    advance(*arguments, ring, int64([0]))
    assert ring[0].tolist() == rows
    assert state.last_sampled.tolist() == list(range(11))
    assert state.num_computed.tolist() == [3] * 11


@pytest.mark.parametrize("advance", FORMS)
def test_a_steady_decode_has_computed_all_but_its_newest_token(advance: Advance) -> None:
    """Input preparation and advance by turns: each step reads the token of the one before."""
    prompt = [3, 1, 4]
    state = state_of({1: Request([*prompt, 59], 3, 3, [0, 1, 2, 3])}, 2, MAX_LEN, 4)
    ring, counter, out = empty_ring(2), int64([0]), buffers(2, 2, 4)
    header, idx_mapping = int32([1, 1]), int32([1, 0])
    state.token_ids[1, 3] = 59
    for step in range(8):
        prepare_decode_inputs(header, idx_mapping, state, out, 4)
        assert out.input_ids.tolist() == [59 + step, 0]
        assert out.positions.tolist() == [3 + step, 0]
        ids = int64([60 + step, 99])
        advance(header, idx_mapping, out.query_start_loc, ids, state, ring, counter)
        assert int(state.num_computed[1]) == int(state.total_len[1]) - 1
    assert state.token_ids[1, :12].tolist() == [*prompt, *range(59, 68)]
    assert bool((state.token_ids[0] == POISON).all())


@settings(max_examples=25)
@given(st.data())
def test_any_batch_equals_the_model(data: st.DataObject) -> None:
    """Chunks, finished prompts, decodes and nobodies; logits rows in any order."""
    rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=4))
    requests, query_lens, samples = {}, [], []
    for row in rows:
        prefill_len = data.draw(st.integers(1, 8))
        computed = data.draw(st.integers(0, prefill_len + 4))
        known = max(prefill_len, computed + 1)
        query_lens.append(data.draw(st.integers(1, known - computed)))
        requests[row] = Request(list(range(10, 10 + known)), prefill_len, computed)
        samples.append(computed + query_lens[-1] >= prefill_len)
    if data.draw(st.booleans()):
        rows, query_lens, samples = [*rows, -1], [*query_lens, 2], [*samples, True]
    order = data.draw(st.permutations(range(sum(samples))))
    places = [order[sum(samples[:i])] if sampled else -1 for i, sampled in enumerate(samples)]
    ids = [200 + place for place in range(sum(samples))]

    expected = state_of(requests, ROWS, MAX_LEN, 1)
    expected_ring = [POISON] * ROWS
    for row, query_len, place in zip(rows, query_lens, places, strict=True):
        if place >= 0:
            expected_ring[place] = ids[place] if row >= 0 else -1
        if row < 0:
            continue
        expected.num_computed[row] += query_len
        if place >= 0:
            expected.token_ids[row, len(requests[row].tokens)] = ids[place]
            expected.last_sampled[row] = ids[place]
            expected.total_len[row] += 1
    for advance in (*FORMS, advance_state):
        state, ring, counter = state_of(requests, ROWS, MAX_LEN, 1), empty_ring(ROWS), int64([3])
        advance(
            int32([len(rows), sum(query_lens)]),
            int32([*rows, 0]),
            loc_of(query_lens, 1),
            int64([*ids, 0]),
            state,
            ring,
            counter,
            int32([*places, 0]),
        )
        check_same(state, expected)
        assert ring[3].tolist() == expected_ring
        assert counter.tolist() == [4]
