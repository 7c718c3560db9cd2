"""Requests in, updates out: stops, streams, aborts, Ctrl-C and failures."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fake_runner import VOCAB, FakeHandle, FakeRunner, run_alone

from nanorunner.engine import Engine
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler

BLOCK = 4
PROMPT = [1, 2, 3]
IDS = run_alone(PROMPT, 1, 20, frozenset())


class BrokenRank(RuntimeError):
    """What this test's runner raises."""


class Runner(FakeRunner):
    """A fake runner that can fail or be interrupted in its next step."""

    def __init__(self, depth: int) -> None:
        super().__init__(32, BLOCK, 4, 64, depth == 1, depth)
        self.fails = False
        self.num_interrupts = 0

    def call(self, method: str, *args: Any) -> FakeHandle:
        for _ in range(self.num_interrupts):
            os.kill(os.getpid(), signal.SIGINT)
        self.num_interrupts = 0
        if self.fails:
            raise BrokenRank("rank 1 died")
        return super().call(method, *args)


def make_engine(
    *, depth: int = 1, eos: frozenset[int] = frozenset(), seed: int = 0
) -> tuple[Engine, Runner]:
    runner = Runner(depth)
    scheduler = Scheduler(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_blocks=32,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        depth=depth,
        send_sampled_ids=depth == 1,
        block_size=BLOCK,
    )
    return Engine(scheduler, runner.call, vocab_size=VOCAB, seed=seed), runner


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 20, **settings})


def run(engine: Engine, request_id: int) -> tuple[list[int], str | None]:
    output: list[int] = []
    reason = None
    while engine.has_unfinished():
        for update in engine.step():
            if update.request_id == request_id:
                output += update.new_ids
                reason = update.finish_reason
    return output, reason


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "it has no token ids"),
        ([1, VOCAB], "token id 50 at position 1 .* use 0 to 49"),
        ([-1], "token id -1 at position 0"),
        ([2**31], "token id 2147483648"),
        ([2**70], "flat list of integers"),
        ([1.5], "flat list of integers, not float64"),
        ([[1, 2]], "flat list of integers, not int64"),
        ([True], "flat list of integers, not bool"),
        (["a"], "flat list of integers"),
        ([1] * 64, "64 tokens"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_and_the_rest_goes_on(
    prompt: list[Any], words: str
) -> None:
    engine, _ = make_engine()
    request = engine.add_request(PROMPT, params())
    with pytest.raises(ValueError, match=words):
        engine.add_request(prompt, params())
    with pytest.raises(ValueError, match=words):
        engine.check_request(prompt, params())
    assert run(engine, request) == (IDS, "length")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_quiet_request_brings_all_its_ids_with_its_only_update(depth: int) -> None:
    engine, _ = make_engine(depth=depth, eos=frozenset({IDS[6]}))
    first = IDS.index(IDS[6]) + 1
    stopped = engine.add_request(PROMPT, params(), quiet=True)
    loud = engine.add_request(PROMPT, params(max_tokens=3))
    full = engine.add_request(PROMPT, params(max_tokens=3), quiet=True)
    updates: list[RequestUpdate] = []
    while engine.has_unfinished():
        updates += engine.step()
    assert [u for u in updates if u.request_id == stopped] == [
        RequestUpdate(stopped, IDS[:first], "stop")
    ]
    assert [u for u in updates if u.request_id == full] == [RequestUpdate(full, IDS[:3], "length")]
    assert [u.new_ids for u in updates if u.request_id == loud] == [[i] for i in IDS[:3]]


def test_a_request_for_logprobs_is_never_quiet() -> None:
    engine, _ = make_engine(depth=2)
    engine.add_request(PROMPT, params(logprobs=1), quiet=True)
    assert [update.new_ids for update in engine.step()] == [IDS[:1]]


def test_a_stop_id_outside_the_vocabulary_is_refused() -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match="stop_token_ids: 50"):
        engine.add_request(PROMPT, params(stop_token_ids=(50,)))


def test_any_eos_of_the_set_stops_and_is_part_of_the_ids() -> None:
    engine, _ = make_engine(eos=frozenset({IDS[4], 10_000, -1}))
    assert run(engine, engine.add_request(PROMPT, params())) == (IDS[:5], "stop")


def test_ignore_eos_ignores_the_eos_but_not_stop_token_ids() -> None:
    engine, _ = make_engine(eos=frozenset({IDS[2]}))
    one = engine.add_request(PROMPT, params(ignore_eos=True))
    assert run(engine, one) == (IDS, "length")
    two = engine.add_request(PROMPT, params(ignore_eos=True, stop_token_ids=(IDS[5],)))
    assert run(engine, two) == (IDS[:6], "stop")


def test_stops_before_min_tokens_are_ignored() -> None:
    first = IDS.index(IDS[2])
    engine, _ = make_engine(eos=frozenset({IDS[2]}))
    later = [at for at, token_id in enumerate(IDS) if token_id == IDS[2] and at > first]
    output, _ = run(engine, engine.add_request(PROMPT, params(min_tokens=first + 2)))
    assert output == (IDS[: later[0] + 1] if later else IDS)
    output, _ = run(engine, engine.add_request(PROMPT, params(min_tokens=first + 1)))
    assert output == IDS[: first + 1]


def test_a_request_without_a_seed_draws_it_from_the_engines() -> None:
    seeds = []
    for seed in (5, 5, 6):
        engine, runner = make_engine(seed=seed)
        engine.add_request(PROMPT, params(seed=None))
        engine.add_request(PROMPT, params(seed=3))
        engine.add_request(PROMPT, params(seed=None))
        engine.step()
        seeds.append([new.sampling.seed for new in runner.steps[0].new])
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[0][1] == 3
    assert seeds[0][0] != seeds[0][2]


def test_every_64_bit_seed_crosses_as_a_signed_number() -> None:
    engine, runner = make_engine()
    for seed in (-(2**63), -1, 2**63 - 1, 2**64 - 1):
        engine.add_request(PROMPT, params(seed=seed))
    engine.step()
    seeds = [new.sampling.seed for new in runner.steps[0].new]
    assert seeds == [-(2**63), -1, 2**63 - 1, -1]
    np.array(seeds, dtype=np.int64)


def test_top_k_minus_one_crosses_as_off() -> None:
    engine, runner = make_engine()
    engine.add_request(PROMPT, params(top_k=-1, temperature=0.5, top_p=0.25))
    engine.step()
    assert runner.steps[0].new[0].sampling[:3] == (0.5, 0, 0.25)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_brings_nothing_more(depth: int) -> None:
    engine, _ = make_engine(depth=depth)
    gone, kept = engine.add_request(PROMPT, params()), engine.add_request(PROMPT, params())
    engine.step()
    assert engine.abort(gone)
    assert not engine.abort(gone)
    assert not engine.abort(12345)
    assert run(engine, gone) == ([], None)
    assert not engine.abort(kept)


def test_the_ranks_hear_of_an_abort_in_the_next_step() -> None:
    engine, runner = make_engine()
    request = engine.add_request(PROMPT, params())
    engine.step()
    engine.abort(request)
    assert request in runner.sequences
    engine.add_request(PROMPT, params())
    engine.step()
    assert request not in runner.sequences
    waiting = engine.add_request(PROMPT, params())
    engine.abort(waiting)  # no rank has heard of it
    engine.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_finish_ends_a_request_at_a_stop_string(depth: int) -> None:
    engine, _ = make_engine(depth=depth)
    request = engine.add_request(PROMPT, params())
    output: list[int] = []
    while engine.has_unfinished():
        for update in engine.step():
            output += update.new_ids
            if len(output) == 3:
                assert engine.finish(request, 2, "stop")
                assert not engine.finish(request, 2, "stop")
    assert output == IDS[:3]


@pytest.mark.parametrize("depth", [1, 2])
def test_two_streams_and_a_plain_request_get_each_their_own(depth: int) -> None:
    engine, _ = make_engine(depth=depth)
    plain = engine.add_request(PROMPT, params(max_tokens=4))
    one = engine.stream(PROMPT, params())
    two = engine.stream(PROMPT, params(seed=2))
    outputs: list[list[int]] = [[], []]
    for pair in zip(one, two, strict=True):
        for output, update in zip(outputs, pair, strict=True):
            output += update.new_ids
    assert outputs == [IDS, run_alone(PROMPT, 2, 20, frozenset())]
    assert run(engine, plain) == (IDS[:4], "length")


def test_a_stream_that_is_left_early_is_aborted() -> None:
    engine, _ = make_engine(depth=2)
    stream = engine.stream(PROMPT, params())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    run(engine, -1)
    assert engine.scheduler.roster.table.num_free == 8


def test_a_stream_refuses_its_prompt_at_once() -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match="no token ids"):
        engine.stream([], params())


def test_an_aborted_stream_ends_with_abort() -> None:
    engine, _ = make_engine()
    stream = engine.stream(PROMPT, params())
    first = next(stream)
    engine.abort(first.request_id)
    assert list(stream) == [RequestUpdate(first.request_id, [], "abort")]


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_ends_the_step_aborts_everything_and_leaves_the_engine_usable(
    depth: int, is_loop: bool
) -> None:
    engine, runner = make_engine(depth=depth)
    for _ in range(6):
        engine.add_request(PROMPT, params())
    with engine.stepping() if is_loop else nullcontext():
        engine.step()
        runner.num_interrupts = 1
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert engine.scheduler.request_ids() == []
    request = engine.add_request(PROMPT, params())
    assert run(engine, request) == (IDS, "length")
    assert list(runner.sequences) == [request]
    engine.scheduler.check_integrity()


def test_a_second_ctrl_c_gets_out_at_once_and_the_engine_says_so_afterwards() -> None:
    engine, runner = make_engine()
    engine.add_request(PROMPT, params())
    runner.num_interrupts = 2
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert runner.steps == []
    with pytest.raises(RuntimeError, match="stopped half-way"):
        engine.step()
    engine.abort_all()
    engine.close()


def test_a_failed_step_breaks_the_engine_with_the_same_error_ever_after() -> None:
    engine, runner = make_engine()
    request = engine.add_request(PROMPT * 4, params())
    runner.fails = True
    for _ in range(2):
        with pytest.raises(BrokenRank, match="rank 1 died"):
            engine.step()
    # what was never written can never be hit
    assert len(engine.scheduler.roster.blocks.prefix_cache) == 0
    runner.fails = False
    with pytest.raises(BrokenRank, match="rank 1 died"):
        engine.add_request(PROMPT, params())
    with pytest.raises(BrokenRank, match="rank 1 died"):
        engine.stream(PROMPT, params())
    assert not engine.abort(request)
    engine.close()


def test_a_step_that_fails_when_it_is_read_breaks_the_engine_too() -> None:
    engine, runner = make_engine(depth=2)
    engine.add_request(PROMPT, params())
    engine.step()
    runner.unread[0].output = runner.unread[0].output._replace(step_id=77)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="answered step 77"):
            engine.step()


def test_a_closed_engine_says_so_and_closes_once() -> None:
    closed = []
    engine, runner = make_engine()
    engine = Engine(engine.scheduler, runner.call, vocab_size=VOCAB, close=lambda: closed.append(1))
    engine.close()
    engine.close()
    assert closed == [1]
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request(PROMPT, params())


def test_request_ids_start_again_and_skip_those_in_use() -> None:
    engine, _ = make_engine()
    assert engine.add_request(PROMPT, params()) == 0
    engine._intake.next_id = 2**31 - 1
    assert engine.add_request(PROMPT, params()) == 2**31 - 1
    assert engine.add_request(PROMPT, params()) == 1
