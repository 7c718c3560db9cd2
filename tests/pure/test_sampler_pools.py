"""Requests wait for the ranks' sampler pools, and embeddings pass through the scheduler.

The fake runner refuses a step in which more requests hold a pool than it has, or whose removals
name a request that an unread step contains.
"""

from __future__ import annotations

import pytest
from fake_runner import VOCAB, FakeRunner, chain

from nanorunner.engine import Engine
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.full_sampling import MAX_LOGPROB_ENTRIES, NUM_PENALTY_SLOTS

BLOCK = 4


def make_engine(
    depth: int = 2,
    max_num_seqs: int = 80,
    num_blocks: int = 400,
    budget: int = 512,
    eos: frozenset[int] = frozenset(),
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks, BLOCK, max_num_seqs, budget, False, depth)
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=64,
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        depth=depth,
        send_sampled_ids=False,
        block_size=BLOCK,
    )
    return Engine(scheduler, runner.call, vocab_size=VOCAB), runner


def run(engine: Engine) -> dict[int, list[RequestUpdate]]:
    found: dict[int, list[RequestUpdate]] = {}
    while engine.has_unfinished():
        for update in engine.step():
            found.setdefault(update.request_id, []).append(update)
        engine.scheduler.check_integrity()
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_without_penalties_passes_those_that_wait_for_a_slot(depth: int) -> None:
    engine, runner = make_engine(depth)
    penalised = SamplingParams(presence_penalty=0.5, max_tokens=4)
    for _ in range(NUM_PENALTY_SLOTS + 9):
        engine.add_request([1, 2, 3], penalised)
    plain = engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    assert plain in runner.sequences
    assert len(runner.sequences) == NUM_PENALTY_SLOTS + 1
    engine.abort(0)  # its slot goes to the first that waits
    found = run(engine)
    assert len(found) == NUM_PENALTY_SLOTS + 9
    pools = engine.scheduler.roster.pools
    assert (pools.penalty_slots, pools.logprob_entries) == (0, 0)
    assert engine.stats.waits_for_pool > 0


def test_wide_log_probabilities_take_turns() -> None:
    engine, runner = make_engine()
    wide = SamplingParams(logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1, max_tokens=2)
    engine.scheduler.roster.pools.logprob_entries = MAX_LOGPROB_ENTRIES - 5 * VOCAB
    for _ in range(3):
        engine.add_request([1, 2, 3], wide)
    engine.step()
    assert len(runner.sequences) == 1
    assert len(run(engine)) == 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_ends_with_its_prompt_and_samples_nothing(depth: int, pooling: str) -> None:
    engine, runner = make_engine(depth, max_num_seqs=4, budget=8)
    beside = engine.add_request([9, 8, 7], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    prompts = [[1, 2, 3], [4] * 20, [5], [1, 2, 3] * 8]
    ids = [engine.add_embedding(prompt, pooling) for prompt in prompts]
    found = run(engine)
    for prompt, request_id in zip(prompts, ids, strict=True):
        (update,) = found[request_id]
        assert (update.new_ids, update.finish_reason) == ([], "stop")
        value = 0
        for token_id in prompt:
            value = chain(value, token_id)
        assert update.extras is not None
        assert update.extras.embedding is not None
        assert update.extras.embedding.tolist() == [value % VOCAB]
    assert len(found[beside]) == 9
    assert all(update.extras is None for update in found[beside])
    assert runner.num_sampled == 9


def test_an_aborted_embedding_brings_nothing_and_its_blocks_return() -> None:
    engine, _ = make_engine(max_num_seqs=4, budget=8)
    gone, kept = (engine.add_embedding([7] * 20, "mean") for _ in range(2))
    engine.step()
    engine.abort(gone)
    assert list(run(engine)) == [kept]
    blocks = engine.scheduler.roster.blocks
    assert blocks.num_free == blocks.num_blocks


def test_a_row_is_not_given_away_while_a_step_that_reads_it_is_unread() -> None:
    """A request that stops early is still in a step that was launched before its stop was seen."""
    engine, _ = make_engine(max_num_seqs=2, eos=frozenset(range(0, VOCAB, 2)))
    for seed in range(30):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=20, seed=seed))
    assert len(run(engine)) == 30
    assert engine.stats.dropped_ids > 0
