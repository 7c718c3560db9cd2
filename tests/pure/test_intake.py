"""What a user asks becomes requests that the ranks can serve, or a refusal that says why."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nanorunner.intake import Intake, child_seed
from nanorunner.request import Request, check_prompt
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.full_sampling import MAX_LOGPROB_ENTRIES, FullSampling

VOCAB = 50
EOS = frozenset({2, 3, -1, 10_000})  # configurations name ids that no vocabulary has
PROMPT = [5, 6, 7]


def make_intake(
    seed: int = 0, runner: str = "v2", vocab_size: int = VOCAB, num_speculative_tokens: int = 0
) -> Intake:
    scheduler = Scheduler(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_blocks=8,
        vocab_size=vocab_size,
        eos_token_ids=EOS,
        depth=2,
        send_sampled_ids=False,
        num_speculative_tokens=num_speculative_tokens,
    )
    return Intake(scheduler, vocab_size, seed, runner)


def requests(intake: Intake, params: SamplingParams) -> list[Request]:
    return intake.requests(intake.check(PROMPT, params))


def sampling(**settings: Any) -> FullSampling:
    return requests(make_intake(), SamplingParams(**settings))[0].sampling


def test_every_setting_reaches_the_sampler_in_its_form() -> None:
    found = sampling(
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        seed=2**64 - 1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias={"7": -1, 8: 2.5},
        allowed_token_ids=[7, 8, 9],
        bad_words=[[7, 8], (9,)],
        min_tokens=3,
        stop_token_ids=[4],
        logprobs=-1,
        prompt_logprobs=0,
    )
    assert found == FullSampling(
        temperature=0.5,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        seed=-1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias=((7, -1), (8, 2.5)),
        allowed_token_ids=(7, 8, 9),
        bad_words=((7, 8), (9,)),
        min_tokens=3,
        stop_ids=(2, 3, 4),
        logprobs=VOCAB,
        prompt_logprobs=0,
    )


def test_a_request_that_asks_for_nothing_special_crosses_the_wire_short() -> None:
    assert len(sampling(temperature=0, stop_token_ids=[4], seed=0).trimmed()) == 1
    assert sampling(min_tokens=2, ignore_eos=True, stop_token_ids=[4]).stop_ids == (4,)


def test_the_children_of_a_prompt_draw_by_seeds_of_their_own() -> None:
    params = SamplingParams(n=4, seed=5, prompt_logprobs=1)
    children = requests(make_intake(), params)
    assert [request.request_id for request in children] == [0, 1, 2, 3]
    seeds = [request.sampling.seed for request in children]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4
    # the prompt's log-probabilities are read once
    assert [request.sampling.prompt_logprobs for request in children] == [1, -1, -1, -1]
    assert [r.sampling.seed for r in requests(make_intake(seed=9), params)] == seeds


def test_children_without_a_seed_follow_the_engine_s() -> None:
    params = SamplingParams(n=2)
    seeds = [
        [request.sampling.seed for request in requests(make_intake(seed), params)]
        for seed in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1] != seeds[2]


def test_no_two_children_of_near_seeds_share_one() -> None:
    seeds = {child_seed(seed, child) for seed in range(-5, 5) for child in range(20)}
    assert len(seeds) == 200
    assert all(-(2**63) <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"logit_bias": {50: 1}}, "logit_bias: id 50: the vocabulary has 0 to 49"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids: .* ban all 1 of them"),
        ({"bad_words": ["text"]}, "bad_words 'text': the engine has no tokenizer"),
        ({"logprobs": 51}, "logprobs 51: use 0 to 50"),
    ],
)
def test_what_this_vocabulary_cannot_give_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sampling(**settings)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_a_user_s_array_may_change_while_its_request_waits(dtype: type) -> None:
    intake = make_intake()
    ids: npt.NDArray[Any] = np.array(PROMPT, dtype)
    checked = intake.check(ids, SamplingParams())  # type: ignore[arg-type]
    ids[:] = 1
    (request,) = intake.requests(checked)
    assert request.token_ids.dtype == np.int32
    assert request.token_ids.tolist() == PROMPT


@pytest.mark.parametrize(
    "odd", [VOCAB, -1, 2**31, -(2**31) - 1, 2**32 + 5, 2**63, 2**70, 0.5, "a", None]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_list_is_refused_in_the_words_that_a_tuple_is(odd: Any, place: int) -> None:
    """Lists of ints take a road of their own to the array."""
    ids: list[Any] = [5, 6]
    ids.insert(place, odd)
    with pytest.raises(ValueError, match=r"^prompt: token id") as of_a_tuple:
        check_prompt(tuple(ids), VOCAB)
    with pytest.raises(ValueError, match=r"^prompt: token id") as of_a_list:
        check_prompt(ids, VOCAB)
    assert str(of_a_list.value) == str(of_a_tuple.value)


def test_a_bias_that_changed_after_the_check_is_checked_again() -> None:
    intake, params = make_intake(), SamplingParams(logit_bias={7: 1})
    checked = intake.check(PROMPT, params)
    params.logit_bias[VOCAB] = 1.0
    with pytest.raises(ValueError, match="logit_bias: id 50"):
        intake.requests(checked)


def test_a_refusal_after_the_check_shifts_no_other_request_s_seed_or_id() -> None:
    intake, changing = make_intake(), SamplingParams(logit_bias={7: 1})
    checked = intake.check(PROMPT, changing)
    changing.logit_bias[VOCAB] = 1.0
    with pytest.raises(ValueError, match="logit_bias: id 50"):
        intake.requests(checked)
    (after,) = requests(intake, SamplingParams())
    (alone,) = requests(make_intake(), SamplingParams())
    assert (after.request_id, after.sampling) == (alone.request_id, alone.sampling)


def test_what_another_engine_has_checked_is_refused() -> None:
    """The other one may have more words, features or room for log-probabilities."""
    intake, other = make_intake(), make_intake(vocab_size=2 * VOCAB)
    for checked in (
        other.check([VOCAB], SamplingParams()),
        other.check_embedding([VOCAB], "last"),
    ):
        with pytest.raises(ValueError, match="checked by another engine"):
            intake.requests(checked)


def test_the_seeds_that_prompts_draw_are_those_of_the_engine_s_random_numbers() -> None:
    intake, numbers = make_intake(seed=4), Random(4)
    for params in (SamplingParams(n=2), SamplingParams(seed=1), SamplingParams()):
        seed = numbers.getrandbits(64)
        if params.seed is not None:
            seed = params.seed
        (first, *_) = requests(intake, params)
        assert first.sampling.seed % 2**64 == seed


def test_log_probabilities_that_the_ranks_have_no_room_for_are_refused() -> None:
    vocab_size = MAX_LOGPROB_ENTRIES // 20
    intake = make_intake(vocab_size=vocab_size)
    intake.check([5] * 10, SamplingParams(prompt_logprobs=-1))
    with pytest.raises(
        ValueError, match=rf"30 prompt tokens .* the limit is {MAX_LOGPROB_ENTRIES}"
    ):
        intake.check([5] * 30, SamplingParams(prompt_logprobs=-1))


def test_a_runner_s_lack_is_found_before_anything_is_queued() -> None:
    intake = make_intake(runner="v1")
    with pytest.raises(ValueError, match="logprobs 1: runner v1"):
        intake.check(PROMPT, SamplingParams(logprobs=1))
    with pytest.raises(ValueError, match="embed: runner v1"):
        intake.check_embedding(PROMPT, "last")


def test_an_embedding_may_fill_the_whole_length_and_samples_nothing() -> None:
    intake = make_intake()
    (request,) = intake.requests(intake.check_embedding([5] * 64, "mean"))
    assert (request.limit, request.prompt_len, request.pooling) == (64, 64, "mean")
    assert request.sampling == FullSampling()
    assert np.array_equal(request.token_ids, [5] * 64)
    for prompt, pooling, words in (
        ([5] * 65, "last", "at most 64"),
        (PROMPT, "cls", "last or mean"),
    ):
        with pytest.raises(ValueError, match=words):
            intake.check_embedding(prompt, pooling)


def test_drafts_multiply_the_log_probabilities_of_a_step() -> None:
    vocab_size = MAX_LOGPROB_ENTRIES // 4
    params = SamplingParams(logprobs=vocab_size)
    make_intake(vocab_size=vocab_size, num_speculative_tokens=2).check([1, 2], params)
    with pytest.raises(ValueError, match="in 5 places"):
        make_intake(vocab_size=vocab_size, num_speculative_tokens=4).check([1, 2], params)
