"""With speculation each request gets the ids of plain decoding: that is all that it may change.

Toy models in float32, requests of every kind that the sampler has, through the engine: together, in
chunks, preempted, from the cache, split over ranks, at every depth. Prompts repeat themselves, so
that drafts are right often; the engine's own count says that some were, and some not.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.draft_control import DraftController
from nanorunner.outputs import CompletionOutput
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model

NUM_TOKENS = 16
STOP_ID = 17
NGRAM: dict[str, Any] = {
    "speculative": "ngram",
    "num_speculative_tokens": 3,
    "ngram_min": 1,
    "speculative_adaptive": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "together": {},
    "depth 1": {"async_depth": 1},
    "depth 3": {"async_depth": 3, "max_num_reqs": 64},
    "in chunks": {"max_num_batched_tokens": 64},
    "cached": {"prefix_cache": True},
    "one draft": {"num_speculative_tokens": 1},
    "15 drafts": {"num_speculative_tokens": 15, "max_num_batched_tokens": 400},
    "two ranks": {"tp": 2},
    "now and then": {"speculative_adaptive": True},
}


class Said(NamedTuple):
    """What a request gets."""

    ids: list[int]
    reason: str
    logprob_ids: list[list[int]] | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 700}
    return make_toy_model(tmp_path_factory.mktemp("tiny-qwen3"), fields)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Said]:
    with make_llm(folder) as llm:
        return generate(llm)


def make_llm(folder: Path, **settings: Any) -> LLM:
    """Return the toy with a small pool and no cache, unless settings say otherwise."""
    small = {"max_num_seqs": 16, "num_blocks": 40, "prefix_cache": False}
    fixed = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    return LLM(folder, max_model_len=611, **{**fixed, **small, **settings})


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, some of which repeat themselves, and settings of every kind."""
    random = Random(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 2},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8, "logprobs": 0},
        {"temperature": 1.3, "seed": 3, "top_k": 40},
        {"temperature": 0.4, "seed": 4, "min_p": 0.05, "frequency_penalty": 0.7},
        {"temperature": 0.0, "logit_bias": {STOP_ID: 3.0}, "stop_token_ids": [STOP_ID]},
        {
            "temperature": 0.2,
            "seed": 5,
            "allowed_token_ids": [5, 6, STOP_ID],
            "stop_token_ids": [STOP_ID],
            "min_tokens": 9,
        },
        {"temperature": 0.3, "seed": 6, "allowed_token_ids": [5, 6, 7]},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "logprobs": 70},
        {"temperature": 0.9, "seed": 8, "n": 2},
    ]
    prompts = []
    for index in range(len(kinds)):
        length = (250, 3, 256, 249, 17, 1, 90, 300)[index % 8]
        period = (1, 3, 7, 600)[index % 4]
        piece = [random.randrange(3, 500) for _ in range(min(period, length))]
        prompts.append((piece * length)[:length])
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return prompts, [SamplingParams(**{**common, **kind}) for kind in kinds]


def generate(llm: LLM) -> list[Said]:
    prompts, params = make_requests()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [said(completion) for output in outputs for completion in output.outputs]


def said(completion: CompletionOutput) -> Said:
    ids = None
    if completion.logprobs is not None:
        ids = [list(place) for place in completion.logprobs]
    return Said(completion.token_ids, str(completion.finish_reason), ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ids_are_those_of_plain_decoding(
    folder: Path, plain: list[Said], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = Random(4)
    monkeypatch.setattr(DraftController, "query_len", lambda self, _: dice.choice((1, 4)))
    with make_llm(folder, **{**NGRAM, **VARIANTS[name]}) as llm:
        assert generate(llm) == plain
        stats = llm.engine.stats
        if name == "cached":
            assert generate(llm) == plain
            assert stats.cached_tokens > 0
        if "chunks" in name:
            assert stats.mixed_steps > 0
        if name == "now and then":
            assert 0.3 < stats.verify_steps / stats.steps < 0.7
        assert 0 < stats.drafts_accepted < stats.drafts_meant
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("settings", [{}, {"async_depth": 1, "max_num_batched_tokens": 48}])
def test_a_preempted_request_goes_on_with_its_own_ids(
    folder: Path, settings: dict[str, Any]
) -> None:
    """All start in their first blocks, and there are not as many second ones."""
    random = Random(2)
    prompts = [[random.randrange(3, 500) for _ in range(210)] for _ in range(4)]
    # two ids to choose from: drafts are right about as often for each, so none gets far ahead
    common: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True, "allowed_token_ids": (5, 6)}
    kinds: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"temperature": 0.8},
        {"repetition_penalty": 1.2},
        {"top_k": 2},
    ]
    params = [SamplingParams(**common, **kind, seed=seed) for seed, kind in enumerate(kinds)]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for speculation in ({}, NGRAM):
        small = {"num_blocks": 4, "max_num_seqs": 4, **settings}
        with make_llm(folder, **{**speculation, **small}) as llm:
            outputs = llm.generate(requests, params, use_tqdm=False)
            found.append([said(output.outputs[0]) for output in outputs])
            assert llm.engine.stats.preemptions > 0
            llm.engine.scheduler.check_integrity()
    assert found[0] == found[1]


def test_fewer_steps_are_needed_where_drafts_are_right(folder: Path) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7] * 40}
    params = SamplingParams(
        temperature=0.1, seed=1, max_tokens=60, ignore_eos=True, allowed_token_ids=(5,)
    )
    steps = []
    for settings in ({}, NGRAM):
        with make_llm(folder, async_depth=1, **settings) as llm:
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == [5] * 60
            steps.append(llm.engine.stats.steps)
    assert steps[0] == 60
    # a run of one id is found again from its third one on; then every step brings 1 + 3
    assert steps[1] <= 1 + 3 + 15


def test_a_request_at_the_models_length_writes_nothing_behind_it(folder: Path) -> None:
    """Drafts would pass the last position; every depth may launch past the end as well."""
    random = Random(1)
    prompts = [[random.randrange(3, 500)] * (611 - room) for room in (1, 2, 3, 5, 9)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    said = []
    for settings in ({}, NGRAM, {**NGRAM, "async_depth": 1}):
        with make_llm(folder, **settings) as llm:
            outputs = llm.generate(requests, params, use_tqdm=False)
            said.append([output.outputs[0].token_ids for output in outputs])
    assert [len(ids) for ids in said[0]] == [1, 2, 3, 5, 9]
    assert said[0] == said[1] == said[2]


def test_what_a_row_held_before_is_no_draft(folder: Path) -> None:
    """The same request again has the same row, where its own last output would be right by luck."""
    random = Random(3)
    request = {"prompt_token_ids": [random.randrange(3, 500) for _ in range(20)]}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    with make_llm(folder, **{**NGRAM, "ngram_min": 3}) as llm:
        steps, ids = [0], []
        for _ in range(3):
            output = llm.generate([request], params, use_tqdm=False)[0]
            ids.append(output.outputs[0].token_ids)
            steps.append(llm.engine.stats.steps)
    assert ids[0] == ids[1] == ids[2]
    assert steps[1] - steps[0] == steps[2] - steps[1] == steps[3] - steps[2]
