"""On GPUs every sampling setting gives what transformers says, and nothing waits or compiles.

Runner v2 with graphs, tiny random models in float32; transformers runs on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import triton
from kernel_cases import RANK_COUNTS, forget_compiled
from transformers_reference import Reference, check_logprobs

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset, preset_for_ranks
from nanorunner.toy_model import make_toy_model

pytestmark = pytest.mark.limit(300)

LENGTHS = (5, 40, 290, 33, 2, 1, 300)
EVERYTHING: dict[str, Any] = {
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logit_bias": {7: 3.0},
    "bad_words": [[9], [10, 11]],
    "min_tokens": 4,
    "logprobs": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-llama") | {"dtype": "float32"}
    return make_toy_model(tmp_path_factory.mktemp("toy"), fields)


def make_llm(folder: Path, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {"runner": "v2", "dtype": "float32", "skip_tokenizer_init": True}
    return LLM(folder, **fixed, max_num_seqs=6, kv_cache_gib=0.25, **settings)


def make_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(3, 1003) for _ in range(length)] for length in lengths]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0, **settings})


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("tp", [1, *RANK_COUNTS])
def test_logprobs_and_embeddings_are_those_of_transformers(
    tp: int, enforce_eager: bool, tmp_path: Path
) -> None:
    fields = preset_for_ranks("tiny-llama", tp) | {"dtype": "float32"}
    folder = make_toy_model(tmp_path, fields)
    reference = Reference(folder)
    asked = [
        params(logprobs=3, prompt_logprobs=2),
        params(),
        params(logprobs=0, prompt_logprobs=0, temperature=1.5, seed=3),
        params(temperature=1.0, seed=4, **EVERYTHING),
        params(logprobs=-1, max_tokens=3),
        params(prompt_logprobs=1, temperature=1.0, seed=5, n=3, logprobs=1),
        params(prompt_logprobs=1, logprobs=70),
    ]
    prompts = make_prompts(LENGTHS)
    with make_llm(folder, tp=tp, enforce_eager=enforce_eager, max_num_batched_tokens=64) as llm:
        for output, its in zip(llm.generate(prompts, asked, use_tqdm=False), asked, strict=True):
            check_logprobs(output, its, reference)
        for pooling in ("last", "mean"):
            for embedded in llm.embed(prompts, pooling=pooling, use_tqdm=False):
                hidden = reference.hidden(embedded.prompt_token_ids)
                wanted = hidden[-1] if pooling == "last" else hidden.mean(0)
                found = torch.from_numpy(embedded.outputs.embedding)
                torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_a_prompt_whose_last_step_has_one_token_is_read_too(folder: Path) -> None:
    """Such a step looks like a decode, and a graph that served it would keep no hidden states."""
    reference = Reference(folder)
    budget = 64
    one, chunked, beside, other = make_prompts((1, budget + 1, 123, 5))
    asked = params(prompt_logprobs=2, logprobs=1)
    with make_llm(folder, max_num_batched_tokens=budget) as llm:
        for prompt in (one, chunked):
            (output,) = llm.generate([prompt], asked, use_tqdm=False)
            check_logprobs(output, asked, reference)
        # beside the other's prompt and then its decode: 59, 63 and 1 tokens
        both = [params(logprobs=0), asked]
        outputs = llm.generate([other, beside], both, use_tqdm=False)
        for output, its in zip(outputs, both, strict=True):
            check_logprobs(output, its, reference)


def test_steps_with_every_setting_wait_for_nothing_and_compile_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(LENGTHS)
    compiled: list[object] = []
    forget_compiled()
    with make_llm(folder) as llm:
        monkeypatch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts)
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(60):
                if number % 6 == 0:
                    prompt = prompts[number // 6 % len(prompts)]
                    settings = EVERYTHING if number % 12 else {"logprobs": 1, "prompt_logprobs": 2}
                    llm.engine.add_request(prompt, params(temperature=1.0, seed=number, **settings))
                    llm.engine.add_request(prompt[:40], params(max_tokens=20))
                    llm.engine.add_embedding(prompt, "mean")
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert compiled == []
