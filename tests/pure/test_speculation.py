"""What drafts change in the steps that the scheduler makes."""

from __future__ import annotations

import pytest
from drafting_rig import BLOCK, NO_EOS, PROMPT, Rig, make_scheduler
from fake_runner import VOCAB, run_alone

from nanorunner.engine import Engine
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler


def test_right_drafts_bring_five_ids_a_step_and_wrong_ones_one() -> None:
    for share, num_steps in [(1.0, 1 + 4), (0.0, 1 + 20)]:
        rig = Rig(share=share)
        rig.device.random.choice = lambda options: options[0]  # type: ignore[assignment, method-assign]
        request = rig.add(PROMPT, 21)
        rig.finish()
        assert rig.output(request) == run_alone(PROMPT, 1, 21, NO_EOS)
        assert len(rig.device.steps) == num_steps


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
