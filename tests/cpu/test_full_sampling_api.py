"""Everything that SamplingParams and embed() offer, through LLM, against transformers.

A toy of 259 ids in float32 on runner v2, whose steps are so small that prompts come in chunks and
beside decodes; at tp 1 and 2, with one and with two steps in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers_reference import Reference, check_logprobs

from nanorunner import LLM, SamplingParams
from nanorunner.outputs import RequestOutput
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model

EOS = 2
VOCAB = 259
ENGINES = [(tp, depth) for tp in (1, 2) for depth in (1, 2)]
PROMPT = "a prompt of a few words"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**load_preset("tiny-llama"), "vocab_size": VOCAB}
    return make_toy_model(tmp_path_factory.mktemp("toy"), fields, has_tokenizer=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"max_model_len": 612, "num_blocks": 24, "max_num_seqs": 6}
    fixed = {"runner": "v2", "device": "cpu", "dtype": "float32"}
    return LLM(folder, **{**defaults, **fixed, "max_num_batched_tokens": 32, **settings})


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[tuple[int, int], LLM]]:
    llms = {(tp, depth): make_llm(folder, tp=tp, async_depth=depth) for tp, depth in ENGINES}
    yield llms
    for llm in llms.values():
        llm.close()


@pytest.fixture(params=ENGINES, ids=lambda e: f"tp {e[0]}, depth {e[1]}")
def llm(engines: dict[tuple[int, int], LLM], request: pytest.FixtureRequest) -> LLM:
    return engines[request.param]


@pytest.fixture
def one(engines: dict[tuple[int, int], LLM]) -> LLM:
    """Return one rank with two steps in flight, for what tp cannot change."""
    return engines[1, 2]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "temperature": 0, **settings})


def generate(llm: LLM, prompts: Any, settings: Any) -> list[RequestOutput]:
    return llm.generate(prompts, settings, use_tqdm=False)


def make_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


MIXED = [
    params(logprobs=3, prompt_logprobs=2),
    params(),
    params(logprobs=0, prompt_logprobs=0, temperature=1.5, seed=3),
    params(logprobs=2, temperature=1.0, seed=4, top_k=20, top_p=0.9, min_p=0.01),
    params(logprobs=-1, max_tokens=3),
    params(prompt_logprobs=1, temperature=1.0, seed=5),
    params(logprobs=1, prompt_logprobs=3, logit_bias={7: 20.0}, repetition_penalty=1.3),
]
LENGTHS = (5, 40, 90, 33, 2, 1, 64)


def test_logprobs_are_those_of_transformers_in_chunks_and_beside_others(
    llm: LLM, reference: Reference
) -> None:
    outputs = generate(llm, make_prompts(LENGTHS), MIXED)
    for output, asked in zip(outputs, MIXED, strict=True):
        assert len(output.token_ids) == asked.max_tokens
        check_logprobs(output, asked, reference)


def test_ranks_and_steps_in_flight_change_nothing(engines: dict[tuple[int, int], LLM]) -> None:
    found = []
    for llm in engines.values():
        outputs = generate(llm, make_prompts(LENGTHS), MIXED)
        found.append([(output.token_ids, output.finish_reason) for output in outputs])
    assert found[1:] == found[:-1]


def test_logprobs_come_once_each_when_requests_are_preempted(
    folder: Path, reference: Reference
) -> None:
    asked = params(logprobs=2, prompt_logprobs=1, max_tokens=12)
    prompts = make_prompts((250, 252, 249, 248))
    with make_llm(folder, num_blocks=5, max_num_batched_tokens=300) as llm:
        outputs = generate(llm, prompts, asked)
        assert llm.engine.stats.preemptions > 0
    for output in outputs:
        check_logprobs(output, asked, reference)


def test_a_prompt_that_is_preempted_half_read_has_its_logprobs_once(
    folder: Path, reference: Reference
) -> None:
    first, second, long = make_prompts((220, 219, 500))
    asked = params(prompt_logprobs=1, max_tokens=2)
    plain = params(max_tokens=120)
    # eight tokens a step: both others reach their second block while the long prompt comes in
    with make_llm(folder, num_blocks=5, max_num_batched_tokens=8) as llm:
        outputs = generate(llm, [first, second, long], [plain, plain, asked])
        assert llm.engine.stats.preemptions > 0
        assert llm.engine.stats.prefill_tokens > 220 + 219 + 500
        embedding = llm.embed([long], pooling="mean", use_tqdm=False)[0].outputs.embedding
    check_logprobs(outputs[2], asked, reference)
    wanted = reference.hidden(long).mean(0)
    torch.testing.assert_close(torch.from_numpy(embedding), wanted, atol=2e-4, rtol=1e-4)


def test_a_prompt_whose_prefix_is_cached_has_all_its_logprobs(
    one: LLM, reference: Reference
) -> None:
    (prompt,) = make_prompts((300,))
    asked = params(prompt_logprobs=1, max_tokens=2)
    for _ in range(2):  # the second time its first block is in the cache
        check_logprobs(generate(one, [prompt], asked)[0], asked, reference)


def test_n_completions_are_different_and_the_first_is_that_of_n_1(
    llm: LLM, reference: Reference
) -> None:
    (prompt,) = make_prompts((300,))
    prompt[0] = 250 - llm.resolved.config.tp  # no other test's prefix
    asked = params(n=3, temperature=1.0, seed=9, logprobs=1, prompt_logprobs=0)
    before = llm.engine.stats.cached_tokens
    (output,) = generate(llm, [prompt], asked)
    # the first reads the whole prompt, the others wait for its block
    assert llm.engine.stats.cached_tokens - before == 2 * 256
    check_logprobs(output, asked, reference)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    (single,) = generate(llm, [prompt], params(temperature=1.0, seed=9))
    assert single.token_ids == output.token_ids
    (again,) = generate(llm, [prompt], params(n=3, temperature=1.0, seed=9))
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_penalties_are_what_plain_python_computes(llm: LLM, reference: Reference) -> None:
    prompts = make_prompts((40, 7))
    asked = params(
        repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=1.1, max_tokens=20
    )
    plain = generate(llm, prompts, params(max_tokens=20))
    outputs = generate(llm, prompts, [asked, params(frequency_penalty=2.0, max_tokens=20)])
    for output, untouched in zip(outputs, plain, strict=True):
        repeats = len(untouched.token_ids) - len(set(untouched.token_ids))
        assert len(output.token_ids) - len(set(output.token_ids)) < repeats
    prompt, ids = outputs[0].prompt_token_ids, outputs[0].token_ids
    logits = reference.logits(prompt + ids)
    for place, token_id in enumerate(ids):
        row = logits[len(prompt) + place - 1].tolist()
        for other in {*prompt, *ids[:place]}:
            row[other] = row[other] / 1.4 if row[other] > 0 else row[other] * 1.4
        for other in set(ids[:place]):
            row[other] -= 0.7 + 1.1 * ids[:place].count(other)
        assert row[token_id] == pytest.approx(max(row), abs=1e-4)


def test_more_requests_with_penalties_than_slots_all_finish(folder: Path) -> None:
    asked = params(presence_penalty=2.0, max_tokens=3)
    with make_llm(folder, max_num_seqs=70, num_blocks=80, max_num_batched_tokens=512) as llm:
        outputs = generate(llm, [[5, 6, 7]] * 70, asked)
        assert llm.engine.stats.waits_for_pool > 0
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert len(set(outputs[0].token_ids)) == 3


def test_bad_words_never_come_however_they_are_given(llm: LLM) -> None:
    (plain,) = generate(llm, [PROMPT], params(max_tokens=12))
    ids = plain.token_ids
    banned = params(max_tokens=12, bad_words=[[ids[0]], ids[2:4]])
    (output,) = generate(llm, [PROMPT], banned)
    assert ids[0] not in output.token_ids
    assert (ids[2], ids[3]) not in list(pairwise(output.token_ids))
    assert llm.tokenizer is not None
    letter = next(c for c in map(chr, range(33, 127)) if c in plain.text)
    (output,) = generate(llm, [PROMPT], params(max_tokens=12, bad_words=letter))
    assert letter not in output.text


def test_only_allowed_ids_come_and_a_bias_moves_the_choice(llm: LLM) -> None:
    allowed = (5, 77, 200)
    settings = [
        params(allowed_token_ids=allowed, temperature=1.5, seed=1),
        params(allowed_token_ids=list(allowed)),
        params(logit_bias={"123": 100}),
    ]
    outputs = generate(llm, [PROMPT] * 3, settings)
    assert set(outputs[0].token_ids) | set(outputs[1].token_ids) <= set(allowed)
    assert outputs[2].token_ids == [123] * 6


def test_min_p_of_one_leaves_the_best_alone(one: LLM) -> None:
    (greedy,) = generate(one, [PROMPT], params())
    (drawn,) = generate(one, [PROMPT], params(temperature=2.0, seed=1, min_p=1.0))
    assert drawn.token_ids == greedy.token_ids


def test_no_eos_is_sampled_before_min_tokens(llm: LLM) -> None:
    wanted = {"logit_bias": {EOS: 100}, "ignore_eos": False, "max_tokens": 9}
    outputs = generate(llm, [PROMPT] * 2, [params(**wanted, min_tokens=m) for m in (4, 0)])
    assert [len(output.token_ids) for output in outputs] == [5, 1]
    assert EOS not in outputs[0].token_ids[:4]
    assert all(output.token_ids[-1] == EOS for output in outputs)
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_an_embedding_is_the_last_or_the_mean_hidden_state(llm: LLM, reference: Reference) -> None:
    prompts = make_prompts((1, 40, 612, 300))  # the third fills max_model_len
    hidden = [reference.hidden(prompt) for prompt in prompts]
    for pooling, expected in (
        ("last", [states[-1] for states in hidden]),
        ("mean", [states.mean(0) for states in hidden]),
    ):
        for _ in range(2):  # the second time from the prefix cache, where that is allowed
            outputs = llm.embed(prompts, pooling=pooling, use_tqdm=False)
            for output, wanted in zip(outputs, expected, strict=True):
                found = torch.from_numpy(output.outputs.embedding)
                torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    (unit,) = llm.embed(PROMPT, normalize=True, use_tqdm=False)
    assert float((unit.outputs.embedding**2).sum()) == pytest.approx(1, abs=1e-5)


def test_embeddings_and_a_stream_share_the_steps(one: LLM) -> None:
    whole = generate(one, [PROMPT], params(max_tokens=20))[0].text
    (alone,) = one.embed(PROMPT, pooling="mean", use_tqdm=False)
    stream = one.stream(PROMPT, params(max_tokens=20))
    text = next(stream)
    (beside,) = one.embed(PROMPT, pooling="mean", use_tqdm=False)
    assert text + "".join(stream) == whole
    assert beside.outputs.embedding == pytest.approx(alone.outputs.embedding, abs=1e-5)


def test_a_stop_string_cuts_logprobs_like_ids(one: LLM) -> None:
    (whole,) = generate(one, [PROMPT], params(max_tokens=30))
    stop = next(c for c in whole.text[5:] if c.isprintable() and c != "\ufffd")
    (cut,) = generate(one, [PROMPT], params(max_tokens=30, stop=stop, logprobs=1))
    assert cut.outputs[0].logprobs is not None
    assert len(cut.outputs[0].logprobs) == len(cut.token_ids) < 30


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: id 259: the vocabulary has 0 to 258"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids: id 999"),
        ({"bad_words": [[300]]}, "bad_words: id 300"),
        ({"bad_words": "  "}, "bad_words '  ': give more than spaces"),
        ({"logprobs": 260}, "logprobs 260: use 0 to 259"),
    ],
)
def test_what_the_vocabulary_does_not_have_is_refused(
    one: LLM, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        generate(one, [PROMPT], params(**asked))
    with pytest.raises(ValueError, match=r"pooling 'max': use last or mean"):
        one.embed(PROMPT, pooling="max")
    with pytest.raises(ValueError, match="n 2: a stream is one completion"):
        next(one.stream(PROMPT, params(n=2, temperature=1.0)))
