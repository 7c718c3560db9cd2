"""What the scheduler makes of a verify step's output, written here by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from drafting_rig import ByHand, pairs
from fake_runner import VOCAB

from nanorunner.request import RequestUpdate
from nanorunner.workers.messages import RequestExtras, TokenLogprobs


def test_what_was_not_accepted_is_taken_off_the_upper_bound() -> None:
    hand = ByHand(2)
    table = hand.scheduler.roster.table
    step = hand.step()
    assert table.computed[[0, 1]].tolist() == [3 + 5, 3 + 5]
    assert table.sure[[0, 1]].tolist() == [4 + 1, 4 + 1]
    hand.read(step, [2, 2, -1, -1, -1, 3, 3, 3, 3, 3])
    assert table.known[[0, 1]].tolist() == [6, 9]
    assert table.computed[[0, 1]].tolist() == [5, 8]
    assert table.sure[[0, 1]].tolist() == [6, 9]


def test_with_two_steps_in_flight_each_counts_with_its_own_rows() -> None:
    hand = ByHand(depth=2)
    table = hand.scheduler.roster.table
    first, second = hand.step(), hand.step()
    assert (table.known[0], table.computed[0], table.sure[0]) == (4, 3 + 10, 4 + 2)
    hand.read(first, [2, -1, -1, -1, -1])
    assert (table.known[0], table.computed[0], table.sure[0]) == (5, 4 + 5, 5 + 1)
    hand.read(second, [2, 2, 2, -1, -1])
    assert (table.known[0], table.computed[0], table.sure[0]) == (8, 7, 8)


def test_a_verify_step_says_how_many_tokens_a_decode_has_and_whose_the_places_are() -> None:
    hand = ByHand(2)
    late = hand.engine.add_request([5] * 6, hand.params)
    step = hand.step()
    first, second = hand.ids
    assert pairs(step) == [[first, 5], [second, 5], [late, 6]]
    assert step.sample_ids.tolist() == [first] * 5 + [second] * 5 + [late]
    updates = hand.read(step, [2, -1, -1, -2, -2, 3, 4, -1, -1, -1, 9])
    assert [update.new_ids for update in updates] == [[2], [3, 4], [9]]


def test_the_same_batch_is_told_by_nothing_until_its_rows_change() -> None:
    hand = ByHand(2)
    ids = [2, -1, -1, -1, -1] * 2
    told = []
    for query_len in (5, 5, 5, 1, 1, 5, 5):
        hand.told.wanted = query_len
        step = hand.step()
        told.append(step.step_input.batch is not None)
        hand.read(step, ids if query_len > 1 else [2, 2])
    assert told == [True, False, False, True, False, True, False]
    assert len(pickle.dumps(step.step_input.to_wire(), -1)) < 64


def test_a_limit_that_is_sure_to_be_reached_by_what_is_in_flight_launches_no_step() -> None:
    hand = ByHand(max_tokens=7, depth=3)
    first, second, third = hand.step(), hand.step(), hand.step()
    hand.read(first, [2, 2, 2, 2, -1])  # of six, and the two others bring one each at least
    assert hand.scheduler.schedule() is None
    hand.read(second, [3, -1, -1, -1, -1])
    updates = hand.read(third, [4, -1, -1, -1, -1])
    assert updates == [RequestUpdate(hand.ids[0], [4], "length")]


def test_a_step_that_left_before_the_limit_was_known_brings_nothing() -> None:
    hand = ByHand(max_tokens=7, depth=2)
    first, second = hand.step(), hand.step()
    assert [u.finish_reason for u in hand.read(first, [2, 2, 2, 2, -1])] == [None]
    third = hand.step()
    assert [u.finish_reason for u in hand.read(second, [3, 3, -1, -1, -1])] == ["length"]
    assert hand.read(third, [-1, -1, -1, -2, -2]) == []
    assert hand.scheduler.stats.dropped_ids == 0
    assert hand.scheduler.roster.table.num_free == hand.scheduler.roster.table.num_rows


def test_a_plain_step_may_be_empty_for_a_request_that_reached_its_limit_before_it() -> None:
    hand = ByHand(max_tokens=7, depth=2)
    hand.read(hand.step(), [2, -1, -1, -1, -1])
    first = hand.step()
    hand.told.wanted = 1
    plain = hand.step()
    assert [u.finish_reason for u in hand.read(first, [2, 2, 2, 2, 2])] == ["length"]
    assert hand.read(plain, [-1]) == []


def test_a_stop_among_the_ids_ends_the_request_there_and_drops_the_rest() -> None:
    hand = ByHand(2)
    logprobs = TokenLogprobs(
        np.arange(10).reshape(5, 2), np.zeros((5, 2), np.float32), np.arange(5, dtype=np.int32)
    )
    extras = {request_id: RequestExtras(logprobs=logprobs) for request_id in hand.ids}
    updates = hand.read(hand.step(), [2, 2, 7, 7, 5, 3, 4, 5, 6, 8], extras)
    first, second = updates
    # min_tokens 4: the ids are the second and following of the output, so 7 is the fourth
    assert first[:3] == (hand.ids[0], [2, 2, 7], "stop")
    assert second[:3] == (hand.ids[1], [3, 4, 5, 6, 8], None)
    assert first.extras is not None
    assert first.extras.logprobs is not None
    assert [len(array) for array in first.extras.logprobs] == [3, 3, 3]
    assert second.extras is extras[hand.ids[1]]
    assert hand.scheduler.stats.dropped_ids == 2


def test_a_stop_before_min_tokens_is_none() -> None:
    hand = ByHand()
    updates = hand.read(hand.step(), [7, 7, 7, 5, -1])
    assert updates == [RequestUpdate(hand.ids[0], [7, 7, 7], "stop")]


def test_a_stop_at_the_limit_is_a_stop() -> None:
    hand = ByHand(max_tokens=6)
    updates = hand.read(hand.step(), [2, 2, 2, 2, 7])
    assert [update.finish_reason for update in updates] == ["stop"]


@pytest.mark.parametrize("depth", [2, 3])
def test_ids_that_come_for_a_request_after_its_stop_are_counted_as_dropped(depth: int) -> None:
    hand = ByHand(depth=depth)
    steps = [hand.step() for _ in range(depth)]
    hand.read(steps[0], [2, 2, 7, -1, -1])
    for step in steps[1:]:
        assert hand.read(step, [2, 2, -1, -1, -1]) == []
    assert hand.scheduler.stats.dropped_ids == 2 * (depth - 1)


def test_an_abort_in_flight_leaves_the_bounds_of_the_others_right() -> None:
    hand = ByHand(2)
    late = hand.engine.add_request([5] * 6, hand.params)
    step = hand.step()
    hand.engine.abort(hand.ids[0])
    updates = hand.read(step, [3, 3, -1, -1, -1, 2, 2, 2, -1, -1, 9])  # and looks at the books
    assert [(u.request_id, u.new_ids) for u in updates] == [(hand.ids[1], [2, 2, 2]), (late, [9])]
    assert hand.scheduler.stats.dropped_ids == 2


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([-1, -1, -1, -1, -1], "a request that goes on got no id"),
        ([2, -1, 2, -1, -1], "accepted behind one that was not"),
        ([2, 2, -3, -1, -1], "not in the vocabulary"),
        ([2, 2, VOCAB, -1, -1], "not in the vocabulary"),
    ],
)
def test_a_group_that_no_device_may_answer_is_refused(ids: list[int], words: str) -> None:
    hand = ByHand()
    step = hand.step()
    with pytest.raises(RuntimeError, match=words):
        hand.read(step, ids)


def test_a_plain_step_must_bring_each_request_an_id() -> None:
    hand = ByHand()
    hand.told.wanted = 1
    step = hand.step()
    with pytest.raises(RuntimeError, match="got no id"):
        hand.read(step, [-1])


def test_an_embedding_beside_drafts_comes_and_ends() -> None:
    hand = ByHand()
    pooled = hand.engine.add_embedding([4] * 6, "last")
    step = hand.step()
    assert step.sample_ids.tolist() == [hand.ids[0]] * 5
    extras = {pooled: RequestExtras(embedding=np.ones(2, np.float32))}
    updates = hand.read(step, [2, 2, -1, -1, -1], extras)
    assert [(u.request_id, u.new_ids) for u in updates] == [(hand.ids[0], [2, 2]), (pooled, [])]


def test_the_stats_say_how_often_each_place_was_right() -> None:
    hand = ByHand(2, max_tokens=9)
    hand.read(hand.step(), [2, 2, 2, -1, -1, 3, -1, -2, -2, -2])
    stats, by_place = hand.scheduler.stats, hand.scheduler.drafts.stats
    assert by_place.meant.tolist() == [2, 1, 1, 1]
    assert by_place.accepted.tolist() == [1, 1, 0, 0]
    assert by_place.acceptance.tolist() == [0.5, 1, 0, 0]
    assert (stats.verify_steps, stats.verified_rows) == (1, 2)
    assert (stats.drafts_meant, stats.drafts_accepted) == (5, 2)
    assert stats.mean_accepted_length == 2
    assert stats.decode_tokens == 10
    # the first has room for five more ids, the second for seven: all places may still come true
    hand.read(hand.step(), [2, 2, -1, -1, -1, 3, -1, -1, -1, -1])
    assert by_place.meant.tolist() == [4, 3, 3, 3]
    # then the first has room for three
    hand.read(hand.step(), [2, -1, -1, -1, -1, 3, -1, -1, -1, -1])
    assert by_place.meant.tolist() == [6, 5, 4, 4]
