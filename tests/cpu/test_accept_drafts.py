"""After a verify step each row stands where plain Python puts it; without drafts as ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE
from state_cases import POISON, Request, check_same, copy_of, int32, state_of, with_limits

from nanorunner.kernels import accept_drafts as module
from nanorunner.kernels.accept_drafts import (
    NO_DRAFT,
    REJECTED,
    accept_drafts,
    accept_drafts_reference,
    accept_drafts_triton,
)
from nanorunner.kernels.advance_state import advance_state_reference
from nanorunner.kernels.state_tables import StateTables

ROWS, MAX_LEN, RING = 6, 24, 4
Accept = Callable[..., None]
FORMS = [accept_drafts_reference, accept_drafts_triton]


@dataclass
class Step:
    """A batch: groups of query_len ids each, then other places, and what the step leaves."""

    state: StateTables
    groups: list[tuple[int, list[int]]]  # row, the ids that its places sampled
    others: list[tuple[int, int, int]] = field(default_factory=list)  # row, tokens, id or -1
    query_len: int = 1
    places: list[int] | None = None  # rows of logits of all places
    step: int = 0
    padding: int = 0  # stale places behind the batch

    def run(self, accept: Accept) -> tuple[list[int], list[int]]:
        """Return the ring's row and accepted_rows, each as wide as the rows of logits."""
        rows = [row for row, ids in self.groups for _ in ids] + [row for row, _, _ in self.others]
        counts = [1 for _, ids in self.groups for _ in ids] + [count for _, count, _ in self.others]
        ids = [i for _, ids in self.groups for i in ids] + [i for _, _, i in self.others]
        places = self.places if self.places is not None else list(range(len(rows)))
        width = max([*places, -1]) + 1 + self.padding
        sampled = torch.full((width,), 10**7, dtype=torch.int64, device=DEVICE)
        for place, new_id in zip(places, ids, strict=True):
            if place >= 0:
                sampled[place] = new_id
        loc = [0, *itertools.accumulate(counts)]
        num_verified = len(self.groups) * self.query_len if self.query_len > 1 else 0
        ring = torch.full((RING, width + 1), POISON, dtype=torch.int64, device=DEVICE)
        counter = torch.tensor([self.step], dtype=torch.int64, device=DEVICE)
        accepted = int32([POISON] * width)
        arguments = [int32([len(rows), loc[-1], num_verified, self.query_len])]
        arguments += [int32([*rows, *[0] * self.padding])]
        arguments += [int32(loc + loc[-1:] * self.padding), sampled]
        given = int32([*places, *[0] * self.padding]) if self.places is not None else None
        accept(*arguments, self.state, ring, counter, accepted, given)
        assert int(counter) == self.step + 1
        others = [row for row in range(RING) if row != self.step % RING]
        assert bool((ring[others] == POISON).all()), "another step's row of the ring was written"
        return ring[self.step % RING, :width].tolist(), accepted.tolist()


def verifying(
    tokens: list[int], drafts: list[int], num_drafts: int | None = None, limit: int = MAX_LEN
) -> StateTables:
    """Return tables in which row 2 has tokens, of which 2 are the prompt, and drafts behind."""
    state = with_limits(
        state_of({2: Request(tokens, 2, len(tokens) - 1)}, ROWS, MAX_LEN, 1), [9] * 6
    )
    known = [*tokens, *drafts][:MAX_LEN]
    state.token_ids[2, : len(known)] = int32(known)
    assert state.num_drafts is not None
    assert state.token_limit is not None
    state.num_drafts[2] = len(drafts) if num_drafts is None else num_drafts
    state.token_limit[2] = limit
    return state


def after(state: StateTables, ids: list[int]) -> StateTables:
    """Return what row 2 must be when these ids were taken."""
    expected = copy_of(state)
    total = int(state.total_len[2])
    expected.token_ids[2, total : total + len(ids)] = int32(ids)
    expected.num_computed[2] += len(ids)
    expected.total_len[2] += len(ids)
    if ids:
        expected.last_sampled[2] = ids[-1]
    return expected


@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize(
    ("ids", "drafts", "taken"),
    [
        ([7, 8, 9], [7, 8], [7, 8, 9]),  # all right: one more than the drafts
        ([5, 8, 9], [7, 8], [5]),  # all wrong: the next token alone; the second is right by chance
        ([7, 5, 9], [7, 8], [7, 5]),
        ([0, 0, 0], [0, 0], [0, 0, 0]),  # id 0 is an id like the others
        ([5], [], [5]),
        ([7] * 17, [7] * 16, [7] * 17),
        ([7] * 16 + [3], [7] * 15 + [2], [7] * 16),
    ],
)
def test_ids_are_taken_up_to_the_first_that_is_no_draft(
    accept: Accept, ids: list[int], drafts: list[int], taken: list[int]
) -> None:
    state = verifying([1, 2, 3], drafts)
    expected = after(state, taken)
    ring, accepted = Step(state, [(2, ids)], query_len=len(ids), step=5).run(accept)
    check_same(state, expected)
    assert ring == taken + [REJECTED] * (len(ids) - len(taken))
    assert accepted == [2] * len(taken) + [-1] * (len(ids) - len(taken))
    assert int(state.num_computed[2]) == int(state.total_len[2]) - 1


@pytest.mark.parametrize("accept", FORMS)
def test_the_ring_tells_a_wrong_draft_from_none(accept: Accept) -> None:
    """Two drafts were meant; what lies behind them is old, and is not taken though it is right."""
    state = verifying([1, 2, 3], [7, 8, 6, 4], num_drafts=2)
    ring, _ = Step(state, [(2, [7, 5, 6, 4, 1])], query_len=5).run(accept)
    assert ring == [7, 5, REJECTED, NO_DRAFT, NO_DRAFT]
    state = verifying([1, 2, 3], [7, 8, 6, 4], num_drafts=0)
    ring, _ = Step(state, [(2, [7, 8, 5, 4, 1])], query_len=5).run(accept)
    assert ring == [7, NO_DRAFT, NO_DRAFT, NO_DRAFT, NO_DRAFT]
    state = verifying([1, 2, 3], [7, 8, 6, 4], num_drafts=1)
    ring, _ = Step(state, [(2, [7, 8, 6, 4, 1])], query_len=5).run(accept)
    assert ring == [7, 8, NO_DRAFT, NO_DRAFT, NO_DRAFT]


@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize(("limit", "num_taken"), [(3, 0), (4, 1), (5, 2), (6, 3), (7, 3)])
def test_no_id_passes_the_limit(accept: Accept, limit: int, num_taken: int) -> None:
    state = verifying([1, 2, 3], [7, 8], limit=limit)
    expected = after(state, [7, 8, 9][:num_taken])
    ring, accepted = Step(state, [(2, [7, 8, 9])], query_len=3).run(accept)
    check_same(state, expected)
    assert ring == [7, 8, 9][:num_taken] + [REJECTED] * (3 - num_taken)
    assert accepted == [2] * num_taken + [-1] * (3 - num_taken)


@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize("behind", [8, 5])
def test_a_full_row_does_not_run_into_the_next(accept: Accept, behind: int) -> None:
    """The row behind may have the very id that would match; the limit alone would let it come."""
    tokens = list(range(100, 100 + MAX_LEN - 1))
    state = verifying(tokens, [7], limit=MAX_LEN + 9)
    state.token_ids[3, :4] = int32([behind, 9, 9, 9])
    expected = after(state, [7])
    expected.num_computed[2], expected.total_len[2] = MAX_LEN, MAX_LEN + 1
    expected.last_sampled[2] = 8
    ring, _ = Step(state, [(2, [7, 8, 9])], query_len=3).run(accept)
    check_same(state, expected)
    assert ring == [7, 8, NO_DRAFT]


@pytest.mark.parametrize("accept", FORMS)
def test_nobody_changes_nothing_and_stale_places_neither(accept: Accept) -> None:
    state = with_limits(
        state_of({row: Request([1, 2], 1, 1) for row in range(ROWS)}, ROWS, MAX_LEN, 1), [9] * ROWS
    )
    before = copy_of(state)
    ring, accepted = Step(state, [(-1, [4, 5, 6])], query_len=3, padding=3).run(accept)
    check_same(state, before)
    assert ring == [REJECTED] * 3 + [POISON] * 3
    assert accepted == [-1] * 6


@pytest.mark.parametrize("accept", FORMS)
def test_an_empty_step_only_counts(accept: Accept) -> None:
    state = with_limits(state_of({}, ROWS, MAX_LEN, 1), [9] * ROWS)
    before = copy_of(state)
    assert Step(state, [], query_len=3, padding=2).run(accept) == ([POISON] * 2, [-1] * 2)
    check_same(state, before)


@pytest.mark.parametrize("accept", FORMS)
def test_groups_and_chunks_share_a_step(accept: Accept) -> None:
    """A group, a chunk inside its prompt, one that ends it, one that is only read; out of order."""
    requests = {
        0: Request([1, 2, 3, 4], 2, 3),
        1: Request(list(range(10)), 10, 2),
        3: Request(list(range(8)), 8, 3),
        5: Request(list(range(4)), 4, 0),
    }
    state = with_limits(state_of(requests, ROWS, MAX_LEN, 1), [MAX_LEN] * ROWS)
    state.token_ids[0, :6] = int32([1, 2, 3, 4, 77, 78])
    assert state.num_drafts is not None
    state.num_drafts[0] = 2
    expected = copy_of(state)
    others = [(1, 4, -1), (3, 5, 55), (5, 4, -1)]
    step = Step(state, [(0, [77, 12, 13])], others, 3, places=[3, 0, 2, -1, 1, -1])
    ring, accepted = step.run(accept)
    assert ring == [12, 55, REJECTED, 77]
    assert accepted == [0, 3, -1, 0]
    expected.token_ids[0, 5], expected.token_ids[3, 8] = 12, 55
    expected.last_sampled[0], expected.last_sampled[3] = 12, 55
    expected.total_len[0], expected.total_len[3] = 6, 9
    for row, computed in ((0, 5), (1, 6), (3, 8), (5, 4)):
        expected.num_computed[row] = computed
    check_same(state, expected)


@pytest.mark.parametrize("accept", FORMS)
def test_a_row_at_its_limit_keeps_its_last_token_as_input(accept: Accept) -> None:
    """Steps in flight may still decode a request that has all its tokens, one place a step."""
    state = with_limits(state_of({1: Request([1, 2, 3], 2, 2)}, ROWS, MAX_LEN, 1), [3] * ROWS)
    before = copy_of(state)
    for number in range(3):
        ring, accepted = Step(state, [], [(1, 1, 40 + number)]).run(accept)
        assert (ring, accepted) == ([REJECTED], [-1])
        check_same(state, before)


@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize("query_len", [1, 5])
def test_more_groups_than_a_tile_all_move(
    accept: Accept, query_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_TILE", 4)
    monkeypatch.setattr(module, "TILE", 4)
    requests = {row: Request([1, 2, 3], 2, 2) for row in range(11)}
    state = with_limits(state_of(requests, 11, 10, 1), [10] * 11)
    state.token_ids[:, 3:] = 7
    assert state.num_drafts is not None
    state.num_drafts.fill_(query_len - 1)
    groups = [
        (row, [7] * (row % query_len) + [9] * (query_len - row % query_len)) for row in range(11)
    ]
    others = [(row, 1, ids[0]) for row, ids in groups] if query_len == 1 else []
    step = Step(state, [] if others else groups, others, query_len=query_len)
    ring, accepted = step.run(accept)
    assert state.last_sampled.tolist() == [9] * 11
    assert state.num_computed.tolist() == [3 + row % query_len for row in range(11)]
    for row in range(11):
        new, start = row % query_len + 1, row * query_len
        assert accepted[start : start + query_len] == [row] * new + [-1] * (query_len - new)
        assert ring[start : start + new] == [7] * (new - 1) + [9]


@settings(max_examples=25)
@given(st.data())
def test_without_groups_and_limits_in_reach_it_is_advance_state(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=4))
    requests, others = {}, []
    places: list[int] = []
    for row in rows:
        prefill_len = data.draw(st.integers(1, 8))
        computed = data.draw(st.integers(0, prefill_len + 4))
        known = max(prefill_len, computed + 1)
        count = data.draw(st.integers(1, known - computed))
        requests[row] = Request(list(range(10, 10 + known)), prefill_len, computed)
        has_place = computed + count >= prefill_len and data.draw(st.booleans())
        places.append(len([p for p in places if p >= 0]) if has_place else -1)
        others.append((row, count, 200 + row))
    if data.draw(st.booleans()):
        others.append((-1, 2, 300))
        places.append(len([p for p in places if p >= 0]))

    def advance(*arguments: Any) -> None:
        advance_state_reference(*arguments[:7], *arguments[8:])

    results = []
    forms: list[Accept] = [advance, *FORMS, accept_drafts]
    for form in forms:
        state = with_limits(state_of(requests, ROWS, MAX_LEN, 1), [MAX_LEN] * ROWS)
        ring, accepted = Step(state, [], others, places=places, step=3).run(form)
        results.append((state, ring, accepted))
    for state, ring, accepted in results[1:]:
        check_same(state, results[0][0])
        assert ring == results[0][1]
        assert accepted == [
            next((row for (row, _, _), at in zip(others, places, strict=True) if at == place), -1)
            for place in range(len(ring))
        ]


@settings(max_examples=40)
@given(st.data())
def test_any_verify_step_equals_the_model(data: st.DataObject) -> None:
    """Ids and drafts of two values, so that some match; limits near; places in any order."""
    query_len = data.draw(st.integers(2, 5))
    rows = data.draw(st.lists(st.integers(-1, ROWS - 1), unique=True, max_size=4))
    requests, groups, drafts = {}, [], {}
    limits = [data.draw(st.integers(3, 12)) for _ in range(ROWS)]
    meant = [data.draw(st.integers(0, query_len - 1)) for _ in range(ROWS)]
    for row in rows:
        groups.append(
            (row, data.draw(st.lists(st.integers(7, 8), min_size=query_len, max_size=query_len)))
        )
        if row >= 0:
            length = data.draw(st.integers(2, limits[row]))
            requests[row] = Request(list(range(10, 10 + length)), 1, length - 1)
            drafts[row] = data.draw(st.lists(st.integers(7, 8), min_size=6, max_size=6))
    places = data.draw(st.permutations(range(len(rows) * query_len)))

    def fresh() -> StateTables:
        state = with_limits(state_of(requests, ROWS, MAX_LEN, 1), limits)
        for row, some in drafts.items():
            known = [*requests[row].tokens, *some]
            state.token_ids[row, : len(known)] = int32(known)
        return state._replace(num_drafts=int32(meant))

    expected = fresh()
    ring, accepted = [0] * len(places), [-1] * len(places)
    for number, (row, ids) in enumerate(groups):
        request, kept = requests.get(row), 0
        while request is not None and kept < query_len:
            if len(request.tokens) + kept >= limits[row]:
                break
            kept += 1
            if kept > meant[row] or ids[kept - 1] != drafts[row][kept - 1]:
                break
        for j, new_id in enumerate(ids):
            place = places[number * query_len + j]
            has_draft = row < 0 or j <= meant[row]
            ring[place] = new_id if j < kept else REJECTED if has_draft else NO_DRAFT
            accepted[place] = row if j < kept else -1
        if request is not None and kept:
            start = len(request.tokens)
            expected.token_ids[row, start : start + kept] = int32(ids[:kept])
            expected.last_sampled[row] = ids[kept - 1]
            expected.total_len[row] += kept
            expected.num_computed[row] += kept
    for accept in FORMS:
        state = fresh()
        step = Step(state, groups, query_len=query_len, places=list(places), step=9)
        assert step.run(accept) == (ring, accepted)
        check_same(state, expected)
