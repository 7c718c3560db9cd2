"""The main job: a real model answers with the same ids however it is split, batched or scheduled.

SmolLM2-135M-Instruct in float32, greedy. The reference is transformers' own generate, computed
once a run. "Equal" means identical token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanorunner import LLM, SamplingParams
from nanorunner.embedded_model import embedded_model_folder
from nanorunner.outputs import RequestOutput
from nanorunner.tokenizer import load_tokenizer

# The whole file takes about two minutes on two idle cores.
pytestmark = pytest.mark.limit(400)

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Question: What is 12 + 30?\nAnswer:",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make a simple tomato soup, first chop the onions, then",
    "In 1969, the first human beings",
]

# Long prompts end 8 ids short of a 256-token block, so that each request outgrows its first block.
LONG_PROMPT_TOKENS = 248
NUM_LONG_PROMPTS = 4
NUM_LONG_TOKENS = 24

Ids = list[list[int]]


class Reference(NamedTuple):
    """What transformers generates."""

    short: Ids  # of PROMPTS, NUM_TOKENS each
    long_prompts: Ids
    long: Ids  # of long_prompts, NUM_LONG_TOKENS each


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Run transformers' generate on all prompts, in float32."""
    folder = str(embedded_model_folder())
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Never end early: the ids after an EOS are compared as well.
    model.generation_config.eos_token_id = None
    text = " ".join(f"{number}. {prompt}" for number, prompt in enumerate(PROMPTS * 4))
    ids = tokenizer.encode(text)
    long_prompts = [ids[i : i + LONG_PROMPT_TOKENS] for i in range(NUM_LONG_PROMPTS)]
    return Reference(
        short=generate(model, [tokenizer.encode(prompt) for prompt in PROMPTS], NUM_TOKENS),
        long_prompts=long_prompts,
        long=generate(model, long_prompts, NUM_LONG_TOKENS),
    )


def generate(model: Any, prompts: Ids, num_tokens: int) -> Ids:
    """Return transformers' greedy ids, the prompts in one batch, padded on the left."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens
    )
    ids: Ids = output[:, width:].tolist()
    return ids


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def ids_of(outputs: list[RequestOutput]) -> Ids:
    return [output.outputs[0].token_ids for output in outputs]


def as_ids(prompts: Ids) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@pytest.fixture(scope="module")
def llm(reference: Reference) -> Iterator[LLM]:
    """Yield one engine at tp 1; it starts after the reference, which wants all threads."""
    with LLM(device="cpu", dtype="float32") as llm:
        yield llm


@pytest.mark.beside
def test_tp_1_generates_what_transformers_generates(llm: LLM, reference: Reference) -> None:
    outputs = llm.generate(PROMPTS, greedy(NUM_TOKENS))
    assert ids_of(outputs) == reference.short
    assert outputs[0].outputs[0].text.startswith(" Paris.")


@pytest.mark.beside
def test_a_prompt_alone_gets_what_it_gets_in_a_batch(llm: LLM, reference: Reference) -> None:
    for index in (1, 6):
        alone = llm.generate(PROMPTS[index], greedy(NUM_TOKENS))
        assert ids_of(alone) == [reference.short[index]]


@pytest.mark.beside
def test_a_prompt_served_from_the_cache_gets_what_it_got_cold(
    llm: LLM, reference: Reference
) -> None:
    prompt = as_ids([(reference.long_prompts[0] * 3)[:600]])
    cold = llm.generate(prompt, greedy(NUM_LONG_TOKENS))
    before = llm.engine.stats.cached_tokens
    cached = llm.generate(prompt, greedy(NUM_LONG_TOKENS))
    assert llm.engine.stats.cached_tokens - before == 512  # both whole blocks
    assert ids_of(cached) == ids_of(cold)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_tp_generates_what_transformers_generates(tp: int, reference: Reference) -> None:
    with LLM(device="cpu", dtype="float32", tensor_parallel_size=tp) as llm:
        assert ids_of(llm.generate(PROMPTS, greedy(NUM_TOKENS))) == reference.short


@pytest.mark.beside
def test_prompts_in_pieces_get_what_they_get_whole(reference: Reference) -> None:
    # 100 tokens a step: a long prompt takes three, beside the decodes of those that came before.
    with LLM(device="cpu", dtype="float32", max_num_batched_tokens=100, max_num_seqs=8) as llm:
        outputs = llm.generate(as_ids(reference.long_prompts), greedy(NUM_LONG_TOKENS))
        assert llm.engine.stats.mixed_steps > 0
    assert ids_of(outputs) == reference.long


@pytest.mark.beside
def test_preempted_requests_get_what_they_get_undisturbed(reference: Reference) -> None:
    # Five blocks: four requests start on one each, and only one of them can get its second.
    with LLM(device="cpu", dtype="float32", num_blocks=5, max_num_seqs=4, max_model_len=512) as llm:
        outputs = llm.generate(as_ids(reference.long_prompts), greedy(NUM_LONG_TOKENS))
        assert llm.engine.stats.preemptions > 0
    assert ids_of(outputs) == reference.long
