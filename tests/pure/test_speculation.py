"""What drafts change in the scheduler, case by case."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from fake_runner import VOCAB, run_alone
from speculating_device import SpeculatingDevice

from nanorunner.draft_control import DraftController
from nanorunner.engine import Engine
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.step_plan import ScheduledStep
from nanorunner.workers.messages import Int32, RequestExtras, StepOutput, TokenLogprobs

BLOCK = 4
PROMPT = [1, 2, 3]
NO_EOS: frozenset[int] = frozenset()


class Rig:
    """An engine on a device whose drafts are right with the given share."""

    def __init__(
        self,
        *,
        num_drafts: int = 4,
        depth: int = 1,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        eos: frozenset[int] = NO_EOS,
        prefix_cache: bool = False,
        share: float = 1.0,
    ) -> None:
        self.device = SpeculatingDevice(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=100,
            num_drafts=num_drafts,
            depth=depth,
            share=share,
        )
        self.scheduler = make_scheduler(
            num_drafts=num_drafts,
            depth=depth,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            eos=eos,
            prefix_cache=prefix_cache,
        )
        self.engine = Engine(self.scheduler, self.device.call, vocab_size=VOCAB)
        self.stats = self.scheduler.stats
        self.updates: list[RequestUpdate] = []

    def add(self, prompt: list[int], max_tokens: int) -> int:
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=1))

    def finish(self, most_steps: int = 200) -> None:
        while self.engine.has_unfinished():
            assert most_steps > 0, "it never ends"
            most_steps -= 1
            self.updates += self.engine.step()
            self.scheduler.check_integrity()

    def output(self, request_id: int) -> list[int]:
        updates = [update for update in self.updates if update.request_id == request_id]
        return [token_id for update in updates for token_id in update.new_ids]


def make_scheduler(
    *,
    num_drafts: int = 4,
    depth: int = 1,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    eos: frozenset[int] = NO_EOS,
    prefix_cache: bool = False,
    controller: DraftController | None = None,
) -> Scheduler:
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=100,
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        prefix_cache=prefix_cache,
        depth=depth,
        send_sampled_ids=False,
        block_size=BLOCK,
        num_speculative_tokens=num_drafts,
        controller=controller,
    )


class Told(DraftController):
    """Takes as many rows as it is told."""

    wanted = 5

    def query_len(self, num_decodes: int) -> int:
        return self.wanted


class ByHand:
    """A scheduler whose outputs the test writes itself; every request's prompt is PROMPT."""

    def __init__(self, num_requests: int = 1, *, max_tokens: int = 20, depth: int = 1) -> None:
        self.told = Told(4)
        self.scheduler = make_scheduler(depth=depth, eos=frozenset({7}), controller=self.told)
        self.engine = Engine(self.scheduler, lambda *_: None, vocab_size=VOCAB)
        self.params = SamplingParams(max_tokens=max_tokens, seed=1, min_tokens=4)
        self.ids = [self.engine.add_request(PROMPT, self.params) for _ in range(num_requests)]
        self.read(self.step(), [1] * num_requests)

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def read(
        self,
        step: ScheduledStep,
        ids: Sequence[int],
        extras: dict[int, RequestExtras] | None = None,
    ) -> list[RequestUpdate]:
        sampled: Int32 = np.array(ids, np.int32)
        output = StepOutput(step.step_input.step_id, step.sample_ids, sampled, extras)
        updates = self.scheduler.update(output)
        self.scheduler.check_integrity()
        return updates


def pairs(step: ScheduledStep) -> list[list[int]]:
    assert step.step_input.batch is not None
    found: list[list[int]] = np.frombuffer(step.step_input.batch, np.int32).reshape(-1, 2).tolist()
    return found


def test_right_drafts_bring_five_ids_a_step_and_wrong_ones_one() -> None:
    for share, num_steps in [(1.0, 1 + 4), (0.0, 1 + 20)]:
        rig = Rig(share=share)
        rig.device.random.choice = lambda options: options[0]  # type: ignore[assignment, method-assign]
        request = rig.add(PROMPT, 21)
        rig.finish()
        assert rig.output(request) == run_alone(PROMPT, 1, 21, NO_EOS)
        assert len(rig.device.steps) == num_steps


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


def test_the_budget_counts_each_place() -> None:
    rig = Rig(max_num_seqs=12)
    for first in range(11):
        rig.add([first, 2], 40)
    rig.updates += rig.engine.step()
    late = rig.add([1] * 30, 2)
    rig.updates += rig.engine.step()
    assert rig.device.batches[-1][-1] == (late, 64 - 11 * 5)
    rig.finish()
    assert rig.output(late) == run_alone([1] * 30, 1, 2, NO_EOS)


def test_a_step_takes_several_small_blocks_at_once() -> None:
    rig = Rig(num_drafts=11)
    request = rig.add(PROMPT, 30)
    rig.finish()
    most = max(len(packed) for step in rig.device.steps for _, packed in step.new_blocks)
    assert most == 3 * 4  # bytes of three blocks
    assert rig.output(request) == run_alone(PROMPT, 1, 30, NO_EOS)


def test_drafts_past_the_limit_need_no_block() -> None:
    rig = Rig(num_drafts=11, num_blocks=2)
    rig.device.random.choice = lambda options: options[0]  # type: ignore[assignment, method-assign]
    request = rig.add(PROMPT, 5)
    rig.finish()
    assert rig.output(request) == run_alone(PROMPT, 1, 5, NO_EOS)
    assert len(rig.device.steps) == 2, "the second one has drafts"


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_cost_nobody_a_block_that_the_next_token_needs(depth: int) -> None:
    rig = Rig(num_blocks=5, depth=depth, max_num_seqs=2)
    first, second = rig.add([1] * 7, 6), rig.add([2] * 5, 4)
    rig.finish()
    # without drafts both have room to their end
    assert rig.stats.preemptions == 0
    assert rig.output(first) == run_alone([1] * 7, 1, 6, NO_EOS)
    assert rig.output(second) == run_alone([2] * 5, 1, 4, NO_EOS)
    assert rig.stats.verify_steps < rig.stats.steps - 1, "some step had to go without drafts"


def test_a_lone_request_that_outgrows_the_pool_ends_where_it_would_without_drafts() -> None:
    rig = Rig(num_blocks=3)
    request = rig.add(PROMPT, 40)
    rig.finish()
    assert rig.output(request) == run_alone(PROMPT, 1, 10, NO_EOS)
    assert rig.updates[-1].finish_reason == (
        "error: the next token needs 4 KV blocks of 4, but the KV cache has 3"
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_without_luck_an_end_by_length_launches_no_step_too_many(
    depth: int, max_tokens: int
) -> None:
    rig = Rig(depth=depth, share=0.0)
    rig.add(PROMPT, max_tokens)
    rig.finish()
    assert len(rig.device.steps) == max_tokens
    assert rig.stats.dropped_ids == 0


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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_generated_block_is_published_by_the_first_step_after_its_last_id(depth: int) -> None:
    rig = Rig(depth=depth, prefix_cache=True, share=0.8)
    rig.add(PROMPT, 60)
    num_ids = 0
    while num_ids < 50:
        num_known = len(PROMPT) + num_ids
        updates = rig.engine.step()
        assert len(rig.scheduler.roster.blocks.prefix_cache) == num_known // BLOCK
        num_ids += sum(len(update.new_ids) for update in updates)


def test_the_ranks_hear_of_the_limit_with_speculation_only() -> None:
    for num_drafts, told in [(0, 0), (4, 8)]:
        scheduler = make_scheduler(num_drafts=num_drafts)
        engine = Engine(scheduler, lambda *_: None, vocab_size=VOCAB)
        engine.add_request(PROMPT, SamplingParams(max_tokens=5))
        step = scheduler.schedule()
        assert step is not None
        (new,) = step.step_input.new
        assert new.token_limit == told
        assert len(step.step_input.to_wire()[2][0]) == (8 if told else 7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": 19}, "19 is less than max_num_seqs 4 times 5"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens -1"),
        ({"send_sampled_ids": True}, "num_speculative_tokens 4: .* runner v1"),
    ],
)
def test_drafts_that_no_step_could_take_are_refused(settings: dict[str, int], words: str) -> None:
    good = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 20,
        "max_model_len": 8,
        "num_blocks": 8,
        "vocab_size": VOCAB,
        "send_sampled_ids": False,
        "num_speculative_tokens": 4,
    }
    Scheduler(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        Scheduler(**{**good, **settings})  # type: ignore[arg-type]
