"""A prefix is hit when, and only when, every token up to its end is the same."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner

from nanorunner.engine import Engine
from nanorunner.prefix_cache import PrefixCache, extend_digests
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.messages import BLOCK_SIZE

ONE = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)


def digests(ids: list[int], block_size: int = 4) -> list[bytes]:
    found: list[bytes] = []
    extend_digests(found, np.array(ids, np.int32), len(ids) // block_size, block_size)
    return found


def make_engine(
    num_blocks: int = 16, max_num_seqs: int = 300, budget: int = 4096, block_size: int = 4
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks, block_size, max_num_seqs, budget, is_v1=True)
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=4096,
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        block_size=block_size,
    )
    return Engine(scheduler, runner.call, vocab_size=VOCAB), runner


def run(engine: Engine, *prompts: list[int], params: SamplingParams = ONE) -> None:
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_unfinished():
        engine.step()
        engine.scheduler.check_integrity()


def test_a_digest_depends_on_every_token_before_it() -> None:
    first, second = digests([1, 2, 3, 4, 5, 6, 7, 8]), digests([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert digests([5, 6, 7, 8])[0] != first[1]


def test_digests_are_made_once_and_a_part_of_a_block_has_none() -> None:
    ids = np.arange(10, dtype=np.int32)
    found: list[bytes] = []
    extend_digests(found, ids, 1, 4)
    extend_digests(found, ids, 2, 4)
    assert found == digests(list(range(8)))
    kept = list(found)
    extend_digests(found, np.full(10, 3, np.int32), 2, 4)
    assert found == kept


def test_equal_prompts_have_equal_digests_in_every_process() -> None:
    code = (
        "import numpy as np; from nanorunner.prefix_cache import extend_digests; d = [];"
        "extend_digests(d, np.arange(8, dtype=np.int32), 2, 4); print(d[1].hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == digests(list(range(8)))[1].hex()


def test_the_first_mapping_of_a_prefix_stays() -> None:
    cache = PrefixCache()
    assert cache.publish(3, b"a")
    assert not cache.publish(5, b"a")
    assert cache.match([b"a"], 1) == [3]
    cache.forget(5)
    assert cache.match([b"a"], 1) == [3]
    cache.forget(3)
    assert cache.match([b"a"], 1) == []
    assert len(cache) == 0


def test_a_match_ends_at_the_first_gap() -> None:
    cache = PrefixCache()
    cache.publish(0, b"a")
    cache.publish(2, b"c")
    assert cache.match([b"a", b"b", b"c"], 3) == [0]


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    engine, _ = make_engine(block_size=BLOCK_SIZE)
    prompt = [i % VOCAB for i in range(2 * BLOCK_SIZE)]
    run(engine, prompt)
    run(engine, prompt)
    assert engine.stats.cached_tokens == BLOCK_SIZE
    assert engine.stats.prefill_tokens == 3 * BLOCK_SIZE
    # and the chain is whole: a longer prompt hits both blocks
    run(engine, [*prompt, 1])
    assert engine.stats.cached_tokens == 3 * BLOCK_SIZE


def test_equal_prompts_that_arrive_together_prefill_their_prefix_once() -> None:
    engine, runner = make_engine(num_blocks=600, block_size=BLOCK_SIZE)
    prompt = [i % VOCAB for i in range(2 * BLOCK_SIZE + 3)]
    run(engine, *[prompt] * 256)
    assert engine.stats.prefill_tokens == len(prompt) + 255 * 3
    assert engine.stats.waits_for_prefix == 255
    assert len(runner.batches) == 2


def test_a_long_equal_prefix_is_prefilled_once_in_chunks() -> None:
    engine, _ = make_engine(num_blocks=100, budget=10, max_num_seqs=8)
    prompt = [i % VOCAB for i in range(41)]
    run(engine, prompt, prompt, prompt)
    assert engine.stats.prefill_tokens == 41 + 1 + 1


def test_a_prompt_that_came_between_two_chunks_hits_only_what_was_written() -> None:
    engine, _ = make_engine(num_blocks=40, budget=8, max_num_seqs=8)
    prompt = [i % VOCAB for i in range(20)]
    engine.add_request(prompt, ONE)
    engine.step()
    run(engine, prompt)
    assert engine.stats.cached_tokens == 16


def test_a_recycled_block_is_not_found_under_its_old_prefix() -> None:
    engine, _ = make_engine(num_blocks=3)
    first, second = [1] * 9, [2] * 9
    run(engine, first)
    run(engine, second)
    cached = engine.stats.cached_tokens
    run(engine, first)
    assert engine.stats.cached_tokens == cached == 0


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    engine, _ = make_engine(num_blocks=40)
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=14, ignore_eos=True, seed=1)
    turn = [*prompt]
    engine.add_request(prompt, params)
    while engine.has_unfinished():
        for update in engine.step():
            turn += update.new_ids
    run(engine, [*turn, 5])
    # 17 tokens are known and 16 of them have KV: four whole blocks
    assert engine.stats.cached_tokens == 16


def test_a_resumed_request_hits_what_it_wrote_before_it_was_preempted() -> None:
    engine, _ = make_engine(num_blocks=9, max_num_seqs=3)
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    run(engine, [1] * 9, [2] * 9, [3] * 9, params=params)
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_tokens > 0


def test_a_prefix_that_was_not_enqueued_is_withdrawn() -> None:
    engine, _ = make_engine()
    scheduler = engine.scheduler
    engine.add_request([1] * 9, ONE)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.published) == 2
    scheduler.withdraw(step)
    assert len(scheduler.roster.blocks.prefix_cache) == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_chunked_prompt_at_a_block_edge_gives_the_same_first_id(length: int) -> None:
    ids = []
    for budget in (3, 300):
        engine, _ = make_engine(budget=budget, max_num_seqs=2)
        engine.add_request([i % VOCAB for i in range(length)], ONE)
        while engine.has_unfinished():
            ids += [update.new_ids for update in engine.step()]
    assert ids[0] == ids[1]
