"""Rows of the state table: stable, reused last in first out, and stale outputs are found out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorunner.workers.dummy_batch import split_tokens
from nanorunner.workers.request_rows import NoFreeRow, RequestRows, StaleRow


def test_rows_go_from_the_last_down_and_a_freed_one_is_the_next() -> None:
    rows = RequestRows(4)
    assert [rows.add(request) for request in (10, 11, 12, 13)] == [3, 2, 1, 0]
    assert rows.remove(11) == 2
    assert rows.add(14) == 2
    assert rows.remove(11) is None
    assert rows.row_of(14) == 2
    assert 11 not in rows
    assert len(rows) == 4


def test_one_request_too_many_is_named_and_changes_nothing() -> None:
    rows = RequestRows(2)
    rows.add(1)
    rows.add(2)
    with pytest.raises(NoFreeRow, match="request 3: all 2 rows are taken"):
        rows.add(3)
    assert rows.remove(1) == 1
    assert rows.add(3) == 1


def test_a_request_cannot_have_two_rows() -> None:
    rows = RequestRows(2)
    rows.add(1)
    with pytest.raises(ValueError, match="request 1 already has row 1"):
        rows.add(1)
    assert len(rows) == 1


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="0 rows"):
        RequestRows(0)


def test_an_output_of_the_rows_former_owner_is_refused() -> None:
    rows = RequestRows(3)
    row = rows.add(1)
    generation = rows.generation(row)
    rows.check(row, generation)
    rows.remove(1)
    rows.check(row, generation)  # freed, but nobody else's yet
    assert rows.add(2) == row
    with pytest.raises(StaleRow, match="row 2: an output of its owner 1 came after owner 2"):
        rows.check(row, generation)
    rows.check(row, rows.generation(row))


def test_a_batch_is_checked_at_once() -> None:
    rows = RequestRows(8)
    batch = np.array([rows.add(request) for request in range(5)])
    generations = rows.generations(batch)
    rows.check_all(batch, generations)
    rows.remove(3)
    rows.add(9)
    with pytest.raises(StaleRow, match="row 4"):
        rows.check_all(batch, generations)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_no_two_requests_share_a_row_and_none_moves(actions: list[tuple[bool, int]]) -> None:
    rows, model = RequestRows(5), dict[int, int]()
    free = list(range(5))
    for is_add, request in actions:
        if not is_add:
            assert rows.remove(request) == model.get(request)
            if request in model:
                free.append(model.pop(request))
        elif request not in model and free:
            model[request] = rows.add(request)
            assert model[request] == free.pop()
        assert {request: rows.row_of(request) for request in model} == model
        assert len(set(model.values())) == len(rows) == len(model)


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "expected"),
    [(256, 496, [1] * 16 + [2] * 240), (3, 8, [2, 3, 3]), (1, 7, [7]), (4, 4, [1, 1, 1, 1])],
)
def test_a_dummy_batch_spreads_its_remainder(
    num_reqs: int, num_tokens: int, expected: list[int]
) -> None:
    assert split_tokens(num_reqs, num_tokens) == expected


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(0, 3), (4, 3)])
def test_a_dummy_batch_without_a_token_for_each_is_refused(num_reqs: int, num_tokens: int) -> None:
    with pytest.raises(ValueError, match="each needs at least 1"):
        split_tokens(num_reqs, num_tokens)
