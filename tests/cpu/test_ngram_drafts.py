"""Drafts by look-up are those of a plain search; drafts of a model land where they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE
from state_cases import Request, check_same, copy_of, int32, state_of, with_limits

from nanorunner.kernels import ngram_drafts as module
from nanorunner.kernels.ngram_drafts import (
    ngram_drafts,
    ngram_drafts_reference,
    ngram_drafts_triton,
)
from nanorunner.kernels.state_tables import StateTables
from nanorunner.kernels.write_drafts import (
    write_drafts,
    write_drafts_reference,
    write_drafts_triton,
)

ROWS, MAX_LEN = 4, 40
Propose = Callable[..., None]
FORMS = [ngram_drafts_reference, ngram_drafts_triton]
WRITES = [write_drafts_reference, write_drafts_triton, write_drafts]


def searched(tokens: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """Return the drafts by the words of the rule, a place at a time."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(num_drafts):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


def known(rows: dict[int, list[int]], limits: list[int], width: int = MAX_LEN) -> StateTables:
    """Return tables of rows that have sampled their last token, with old drafts behind (5)."""
    requests = {row: Request(tokens, 1, len(tokens) - 1) for row, tokens in rows.items()}
    state = with_limits(state_of(requests, ROWS, width, 1), limits)
    for row, tokens in rows.items():
        state.token_ids[row, : len(tokens)] = int32(tokens)
        state.token_ids[row, len(tokens) :] = 5
    assert state.num_drafts is not None
    state.num_drafts.fill_(99)
    return state


def expect(state: StateTables, row: int, drafts: list[int]) -> None:
    total = int(state.total_len[row])
    state.token_ids[row, total : total + len(drafts)] = int32(drafts)
    assert state.num_drafts is not None
    state.num_drafts[row] = len(drafts)


@pytest.mark.parametrize("propose", FORMS)
@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 8, 2, 3], [4, 8, 2, 3]),
        ([1, 2, 3, 4, 9, 3, 8, 1, 2, 3], [4, 9, 3, 8]),  # the longer suffix, though it is older
        ([3, 4, 0, 3, 6, 0, 3], [6, 0, 3, 6]),  # the latest of equals
        ([7, 1, 2, 1, 2], [1, 2, 1, 2]),  # drafts read on into themselves
        ([6, 6], [6, 6, 6, 6]),
        ([1, 2, 3], []),
        ([1, 2], []),
    ],
)
def test_the_longest_suffix_is_continued_as_it_was_last(
    propose: Propose, tokens: list[int], drafts: list[int]
) -> None:
    state = known({2: tokens}, [MAX_LEN] * ROWS)
    expected = copy_of(state)
    expect(expected, 2, drafts)
    propose(int32([1, 1]), int32([2]), state, 4)
    check_same(state, expected)
    assert searched(tokens, 4, 1, 3) == drafts


@pytest.mark.parametrize("propose", FORMS)
def test_a_short_suffix_may_be_too_short(propose: Propose) -> None:
    for tokens, drafts in (([3, 4, 0, 3], []), ([3, 4, 0, 3, 4], [0, 3, 4, 0])):
        state = known({0: tokens}, [MAX_LEN] * ROWS)
        expected = copy_of(state)
        expect(expected, 0, drafts)
        propose(int32([1, 1]), int32([0]), state, 4, 2, 4)
        check_same(state, expected)


@pytest.mark.parametrize("propose", FORMS)
@pytest.mark.parametrize(
    ("limit", "width", "count"), [(9, 9, 4), (8, 9, 3), (9, 7, 2), (6, 9, 1), (5, 9, 0), (5, 5, 0)]
)
def test_drafts_end_at_the_limit_and_at_the_width(
    propose: Propose, limit: int, width: int, count: int
) -> None:
    state = known({1: [3, 4, 3, 4, 3], 2: [9, 9]}, [limit] * ROWS, width)
    expected = copy_of(state)
    expect(expected, 1, [4, 3, 4, 3][:count])
    propose(int32([1, 1]), int32([1]), state, 4)
    check_same(state, expected)


@pytest.mark.parametrize("propose", FORMS)
def test_who_gets_drafts(propose: Propose) -> None:
    """Leaders of groups; not nobody, not who is inside its prompt, not stale rows."""
    state = known({row: [4, 4, 4] for row in range(ROWS)}, [MAX_LEN] * ROWS)
    state.prefill_len[3] = 3
    expected = copy_of(state)
    for row in (0, 2):
        expect(expected, row, [4, 4])
    rows, offsets = [0, 0, 3, -1, 2, 1], [0, 1, 0, 0, 0, 0]
    propose(int32([5, 5]), int32(rows), state, 2, 1, 3, int32(offsets))
    check_same(state, expected)


@settings(max_examples=30)
@given(st.data())
def test_any_text_equals_the_search(data: st.DataObject) -> None:
    """Few values, so that suffixes of every length occur; tiles of 4, so that searches cross."""
    texts = st.lists(st.integers(1, 3), min_size=2, max_size=30)
    rows = {row: data.draw(texts) for row in range(data.draw(st.integers(1, 3)))}
    max_n = data.draw(st.integers(1, 5))
    min_n = data.draw(st.integers(1, max_n))
    num_drafts = data.draw(st.integers(1, 6))
    state = known(rows, [MAX_LEN] * ROWS)
    expected = copy_of(state)
    for row, tokens in rows.items():
        expect(expected, row, searched(tokens, num_drafts, min_n, max_n))
    before, module.TILE = module.TILE, 4
    try:
        for propose in FORMS:
            got = copy_of(state)
            header, mapping = int32([len(rows), len(rows)]), int32(list(rows))
            propose(header, mapping, got, num_drafts, min_n, max_n)
            check_same(got, expected)
    finally:
        module.TILE = before


@pytest.mark.parametrize("propose", [*FORMS, ngram_drafts])
def test_a_long_text_is_searched_to_its_beginning(propose: Propose) -> None:
    """131,072 tokens, of which the first four come again only at the end."""
    length = 1 << 17
    tokens = torch.arange(length, dtype=torch.int32) + 10
    tokens[-3:] = tokens[:3].clone()
    state = with_limits(state_of({}, 2, 1, 1), [length + 8] * 2)
    table = torch.zeros(2, length + 8, dtype=torch.int32)
    table[1, :length] = tokens
    state = state._replace(token_ids=table.to(DEVICE))
    state.total_len[1], state.num_computed[1], state.prefill_len[1] = length, length - 1, 5
    propose(int32([1, 1]), int32([1]), state, 7)
    assert state.token_ids[1, length:].tolist() == [*range(13, 20), 0]
    assert state.num_drafts is not None
    assert int(state.num_drafts[1]) == 7


@pytest.mark.parametrize("write", WRITES)
def test_a_models_drafts_lie_one_behind_the_other(write: Propose) -> None:
    state = known({0: [1, 2], 1: [1, 2, 3], 3: [1] * 39}, [MAX_LEN, 5, 0, MAX_LEN])
    expected = copy_of(state)
    header, rows = int32([4, 4]), int32([3, -1, 0, 1, 2])
    for index in range(3):
        ids = torch.tensor([70, 71, 72, 73, 74], device=DEVICE) + 10 * index
        write(header, rows, ids, index, state)
    expect(expected, 0, [72, 82, 92])
    expect(expected, 1, [73, 83])  # its limit
    expect(expected, 3, [70])  # the width
    check_same(state, expected)


@pytest.mark.parametrize("write", WRITES)
def test_only_the_place_at_the_drafts_offset_writes(write: Propose) -> None:
    """A draft model's first run has two places a row, of which the second draws the draft."""
    state = known({0: [1, 2], 2: [1, 2, 3]}, [MAX_LEN] * ROWS)
    expected = copy_of(state)
    ids = torch.tensor([60, 61, 62, 63], device=DEVICE)
    write(int32([4, 4]), int32([2, 2, 0, 0]), ids, 0, state, int32([-1, 0, -1, 0]))
    expect(expected, 0, [63])
    expect(expected, 2, [61])
    check_same(state, expected)


@pytest.mark.parametrize("write", WRITES)
def test_more_ids_than_a_tile_are_all_written(write: Propose) -> None:
    count = 1100
    state = with_limits(state_of({}, count, 4, 1), [4] * count)
    state.total_len.fill_(2)
    ids = torch.arange(count, device=DEVICE)
    write(int32([count, count]), int32(list(range(count))), ids, 1, state)
    assert state.token_ids[:, 3].tolist() == list(range(count))
    assert state.num_drafts is not None
    assert state.num_drafts.tolist() == [2] * count
