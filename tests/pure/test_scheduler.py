"""The cases on which other engines hung, starved, asserted or lost tokens."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner, run_alone

from nanorunner.engine import Engine
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.messages import StepInput, StepOutput

BLOCK = 4


class Rig:
    """An engine on a fake runner that keeps what came out."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        depth: int = 1,
        max_model_len: int = 100,
        eos: frozenset[int] = frozenset(),
        prefix_cache: bool = False,
    ) -> None:
        is_v1 = depth == 1
        self.eos = eos
        self.runner = FakeRunner(num_blocks, BLOCK, max_num_seqs, budget, is_v1, depth)
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            eos_token_ids=eos,
            prefix_cache=prefix_cache,
            depth=depth,
            send_sampled_ids=is_v1,
            block_size=BLOCK,
        )
        self.engine = Engine(self.scheduler, self.runner.call, vocab_size=VOCAB)
        self.stats = self.engine.stats
        self.output: dict[int, list[int]] = {}
        self.reason: dict[int, str | None] = {}

    def add(self, prompt: list[int], max_tokens: int, *, seed: int = 1, quiet: bool = False) -> int:
        params = SamplingParams(max_tokens=max_tokens, seed=seed)
        request_id = self.engine.add_request(prompt, params, quiet=quiet)
        self.output[request_id] = []
        return request_id

    def step(self) -> None:
        for update in self.engine.step():
            self.output[update.request_id] += update.new_ids
            self.reason[update.request_id] = update.finish_reason
        self.scheduler.check_integrity()

    def finish(self, most_steps: int = 1000) -> None:
        while self.engine.has_unfinished():
            assert most_steps > 0, "it never ends"
            most_steps -= 1
            self.step()


def alone(prompt: list[int], limit: int, eos: frozenset[int] = frozenset()) -> list[int]:
    return run_alone(prompt, 1, limit, eos)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_lone_request_that_outgrows_the_pool_ends_with_the_numbers(quiet: bool) -> None:
    rig = Rig(num_blocks=2)
    request = rig.add([1] * 8, 20, quiet=quiet)
    rig.finish(most_steps=5)
    assert rig.reason[request] == (
        "error: the next token needs 3 KV blocks of 4, but the KV cache has 2"
    )
    assert rig.output[request] == alone([1] * 8, 1)
    assert rig.stats.preemptions == 0
    other = rig.add([2] * 3, 5)
    rig.finish()
    assert rig.output[other] == alone([2] * 3, 5)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_others_go_on_when_one_outgrows_the_pool(depth: int) -> None:
    rig = Rig(num_blocks=4, depth=depth)
    big, small = rig.add([1] * 8, 60), rig.add([2] * 3, 4)
    rig.finish()
    assert (rig.reason[big] or "").startswith("error: the next token needs 5 KV blocks")
    assert rig.output[big] == alone([1] * 8, 9)
    assert rig.output[small] == alone([2] * 3, 4)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=3)
    with pytest.raises(ValueError, match=r"13 tokens need 4 KV blocks of 4, but .* has 3"):
        rig.add([1] * 13, 1)
    request = rig.add([1] * 12, 1)
    rig.finish()
    assert rig.reason[request] == "length"


def test_a_prompt_that_leaves_no_room_for_an_id_is_refused() -> None:
    rig = Rig(max_model_len=10)
    with pytest.raises(ValueError, match=r"10 tokens, but .* 10 \(max_model_len\); use at most 9"):
        rig.add([1] * 10, 1)
    request = rig.add([1] * 9, 50)
    rig.finish()
    assert rig.output[request] == alone([1] * 9, 1)
    assert rig.reason[request] == "length"


def test_decodes_go_on_while_prompts_wait() -> None:
    rig = Rig(budget=8, max_num_seqs=8)
    decoding = rig.add([1, 2], 50)
    rig.step()
    for first in range(5):
        rig.add([first] * 40, 2)
    for count in range(1, 26):
        assert len(rig.output[decoding]) == count
        rig.step()
    assert rig.stats.mixed_steps >= 20


def test_no_step_is_larger_than_the_budget_when_a_hundred_prompts_come() -> None:
    rig = Rig(budget=10, max_num_seqs=10, num_blocks=100)
    for number in range(100):
        rig.add([number % VOCAB] * 7, 3)
    rig.finish()  # the fake runner checks every step
    assert all(len(output) == 3 for output in rig.output.values())


def test_a_long_prompt_waits_until_all_of_it_fits() -> None:
    rig = Rig(num_blocks=12, budget=8, max_num_seqs=2)
    first, second = rig.add([1] * 36, 3), rig.add([2] * 36, 3)
    rig.finish()
    assert rig.stats.preemptions == 0
    assert rig.stats.prefill_tokens == 72
    assert rig.output[first] == alone([1] * 36, 3)
    assert rig.output[second] == alone([2] * 36, 3)


def test_the_reserve_keeps_a_request_out_that_would_be_preempted_soon() -> None:
    rig = Rig(num_blocks=9, max_num_seqs=3)
    for first in range(3):
        rig.add([first] * 11, 10)
    rig.finish()
    # without the reserve this case preempts three times and prefills more than its prompts
    assert rig.stats.preemptions <= 1


def test_no_more_requests_run_than_max_num_seqs_and_all_that_run_decode() -> None:
    rig = Rig(max_num_seqs=2)
    for first in range(6):
        rig.add([first], 4)
    while rig.engine.has_unfinished():
        rig.step()
        assert rig.scheduler.num_running <= 2
    assert {len(batch) for batch in rig.runner.batches} == {2}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_newest_is_preempted_and_the_oldest_never(depth: int) -> None:
    rig = Rig(num_blocks=8, depth=depth, max_num_seqs=3)
    requests = [rig.add([first] * 5, 20) for first in range(3)]
    order = []
    while rig.engine.has_unfinished():
        rig.step()
        order += [r for r in requests if rig.reason.get(r) and r not in order]
    assert rig.stats.preemptions > 0
    assert order == requests
    for first, request in enumerate(requests):
        assert rig.output[request] == alone([first] * 5, 20)


def test_cancelling_everything_leaves_an_engine_that_does_nothing_and_works() -> None:
    rig = Rig(depth=2)
    for first in range(3):
        rig.add([first] * 5, 20)
    rig.step()
    rig.engine.abort_all()
    rig.finish()
    assert rig.engine.step() == []
    assert not rig.engine.has_unfinished()
    request = rig.add([9], 3)
    rig.finish()
    assert rig.output[request] == alone([9], 3)


@pytest.mark.parametrize("length", [4, 5, 8])
def test_an_exact_multiple_of_the_block_size_needs_no_block_too_many(length: int) -> None:
    rig = Rig(num_blocks=2)
    request = rig.add([1] * length, 1)
    rig.finish()
    assert rig.reason[request] == "length"
    assert rig.stats.peak_used_blocks == -(-length // BLOCK)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_an_end_by_length_launches_no_step_too_many(depth: int, max_tokens: int) -> None:
    rig = Rig(depth=depth)
    rig.add([1, 2, 3], max_tokens)
    rig.finish()
    assert len(rig.runner.steps) == max_tokens
    assert rig.stats.dropped_ids == 0


@pytest.mark.parametrize(("depth", "num_dropped"), [(1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_late_eos_drops_the_ids_in_flight_and_no_other(
    depth: int, num_dropped: int, at: int
) -> None:
    prompt = [1, 2, 3]
    ids = alone(prompt, 20)
    eos = ids[at - 1]
    assert ids.index(eos) == at - 1, "choose another prompt: the id comes earlier as well"
    rig = Rig(depth=depth, eos=frozenset({eos}))
    request = rig.add(prompt, 20)
    rig.finish()
    assert rig.output[request] == ids[:at]
    assert rig.reason[request] == "stop"
    assert rig.stats.dropped_ids == num_dropped
    assert len(rig.runner.steps) == at + num_dropped


def test_an_eos_on_the_last_token_stops_with_nothing_in_flight() -> None:
    ids = alone([1, 2, 3], 5)
    rig = Rig(depth=2, eos=frozenset({ids[4]}))
    request = rig.add([1, 2, 3], 5)
    rig.finish()
    assert rig.reason[request] == "stop"
    assert len(rig.runner.steps) == 5


def test_blocks_of_an_ended_request_wait_for_the_step_that_still_reads_them() -> None:
    ids = alone([1, 2, 3], 20)
    rig = Rig(depth=2, eos=frozenset({ids[1]}), num_blocks=2)
    rig.add([1, 2, 3], 20)
    rig.step()
    # the second step brings the EOS while the third is in flight
    rig.step()
    table = rig.scheduler.roster.table
    assert rig.scheduler.num_running == 0
    assert rig.scheduler.num_unread == 1
    assert rig.scheduler.roster.blocks.num_free == 0
    assert table.num_free == table.num_rows - 1
    rig.step()
    assert rig.scheduler.roster.blocks.num_free == 2
    assert table.num_free == table.num_rows


def test_a_short_pool_reads_the_steps_in_flight_before_it_preempts() -> None:
    rig = Rig(depth=2, num_blocks=4, max_num_seqs=2)
    rig.add([1] * 4, 1)  # its block comes back when its only step is read
    rig.add([2] * 4, 9)
    rig.add([3] * 3, 2)
    rig.finish()
    assert rig.stats.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_generated_block_is_published_by_the_first_step_after_its_last_id(depth: int) -> None:
    rig = Rig(depth=depth, prefix_cache=True)
    request = rig.add([1, 2, 3], 30)
    while len(rig.output[request]) < 28:
        num_known = 3 + len(rig.output[request])
        rig.step()
        assert len(rig.scheduler.roster.blocks.prefix_cache) == num_known // BLOCK


def steady_rig(num_requests: int = 256) -> Scheduler:
    scheduler = Scheduler(
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        max_model_len=1024,
        num_blocks=num_requests * 4,
        vocab_size=VOCAB,
        prefix_cache=False,
        depth=1,
    )
    engine = Engine(scheduler, lambda *_: None, vocab_size=VOCAB)
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    for first in range(num_requests):
        engine.add_request([first % VOCAB] * 8, params)
    return scheduler


def answer(scheduler: Scheduler) -> StepInput:
    step = scheduler.schedule()
    assert step is not None
    ids = np.zeros(len(step.sample_ids), np.int32)
    scheduler.update(StepOutput(step.step_input.step_id, step.sample_ids, ids))
    return step.step_input


def test_a_steady_step_says_same_batch_and_pickles_to_little() -> None:
    scheduler = steady_rig()
    steps = [answer(scheduler) for _ in range(5)]
    assert [step.batch is None for step in steps] == [False, False, True, True, True]
    assert len(pickle.dumps(steps[-1].to_wire(), -1)) < 1100  # 1,024 of them are runner v1's ids


def test_the_first_step_after_a_prompt_is_never_called_the_same_batch() -> None:
    scheduler = steady_rig(1)
    first, second, third = (answer(scheduler) for _ in range(3))
    assert first.batch is not None
    assert second.batch is not None, "the last step had eight tokens of it, this one has one"
    assert third.batch is None


def test_an_output_of_another_step_or_of_other_requests_is_refused() -> None:
    for step_id, request_ids, ids, words in [
        (1, [0, 1], [0, 0], "answered step 1; step 0 was due"),
        (0, [1, 0], [0, 0], "other requests"),
        (0, [0], [0], "other requests"),
        (0, [0, 1], [0, -1], "not in the vocabulary"),
        (0, [0, 1], [0, VOCAB], "not in the vocabulary"),
    ]:
        scheduler = steady_rig(2)
        scheduler.schedule()
        output = StepOutput(step_id, np.array(request_ids, np.int32), np.array(ids, np.int32))
        with pytest.raises(RuntimeError, match=words):
            scheduler.update(output)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens 7 is less than max_num_seqs 8"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"max_model_len": 1}, "max_model_len 1"),
        ({"depth": 2}, "depth 2: runner v1"),
    ],
)
def test_settings_that_starve_someone_are_refused(settings: dict[str, int], words: str) -> None:
    good = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "max_model_len": 8,
        "num_blocks": 8,
        "vocab_size": VOCAB,
    }
    with pytest.raises(ValueError, match=words):
        Scheduler(**{**good, **settings})  # type: ignore[arg-type]
