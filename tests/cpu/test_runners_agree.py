"""Every way to run a request gives the same ids: runners, depths, ranks, chunks, cache, company.

Random toy models in float32 whose greedy choice is clear, and the embedded SmolLM2. What each
request gets alone, from runner v1 and a cold cache, is what all others must give.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model

Ids = list[list[int]]
NUM_TOKENS = 12
PROMPT_LENS = (250, 3, 256, 249, 17, 1, 90, 300)
FAMILIES = ["tiny-llama", "tiny-qwen2", "tiny-qwen3"]
VARIANTS: dict[str, dict[str, Any]] = {
    "v1 together": {"runner": "v1"},
    "v2 alone": {"runner": "v2"},
    "v2 together, depth 1": {"runner": "v2", "async_depth": 1},
    "v2 together, depth 2": {"runner": "v2"},
    "v2 together, depth 3": {"runner": "v2", "async_depth": 3, "max_num_reqs": 24},
    "v2 in chunks": {"runner": "v2", "max_num_batched_tokens": 48},
    "v2 preempted": {"runner": "v2", "num_blocks": 4, "max_num_seqs": 4},
    "v2 in chunks and preempted": {
        "runner": "v2",
        "num_blocks": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
    },
    "v2 cached": {"runner": "v2", "prefix_cache": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset(request.param) | {"max_position_embeddings": 700}
    return make_toy_model(tmp_path_factory.mktemp(request.param), fields)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Ids:
    with make_llm(folder, runner="v1") as llm:
        return alone(llm)


def make_llm(folder: Path, **settings: Any) -> LLM:
    """Return the toy with a small pool and no cache, unless settings say otherwise."""
    small = {"max_num_seqs": 8, "num_blocks": 24, "prefix_cache": False}
    fixed = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    return LLM(folder, max_model_len=611, **{**fixed, **small, **settings})


def make_requests() -> tuple[Ids, list[SamplingParams]]:
    """Return prompts, and settings of every kind that both runners have."""
    random = Random(0)
    prompts = [[random.randrange(3, 500) for _ in range(length)] for length in PROMPT_LENS]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": -1},
        {"temperature": 1.0, "seed": 2**64 - 2, "top_p": 0.8},
        {"temperature": 1.3, "seed": 7, "top_k": 40},
    ]
    return prompts, [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind) for kind in kinds + kinds
    ]


def generate(llm: LLM, prompts: Ids, params: list[SamplingParams]) -> Ids:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.token_ids for output in llm.generate(requests, params, use_tqdm=False)]


def alone(llm: LLM) -> Ids:
    pairs = zip(*make_requests(), strict=True)
    return [generate(llm, [prompt], [params])[0] for prompt, params in pairs]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ids_are_those_of_runner_v1_alone(folder: Path, expected: Ids, name: str) -> None:
    with make_llm(folder, **VARIANTS[name]) as llm:
        if name == "v2 alone":
            assert alone(llm) == expected
            return
        assert generate(llm, *make_requests()) == expected
        stats = llm.engine.stats
        if "preempted" in name:
            assert stats.preemptions > 0
        if "chunks" in name:
            assert stats.mixed_steps > 0
        if name == "v2 cached":
            assert generate(llm, *make_requests()) == expected
            assert stats.cached_tokens > 0


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_ids_are_those_of_one_rank(folder: Path, expected: Ids, runner: str) -> None:
    tp = 3 if "qwen3" in folder.name else 2  # three do not divide its heads
    with make_llm(folder, tp=tp, runner=runner, max_num_batched_tokens=128) as llm:
        assert generate(llm, *make_requests()) == expected


@pytest.mark.slow
@pytest.mark.beside
def test_smollm2_says_the_same_with_either_runner_at_either_depth() -> None:
    conversation = [[{"role": "user", "content": text}] for text in ("Hi!", "Count to five.")]
    params = [
        SamplingParams(temperature=0, max_tokens=10),
        SamplingParams(temperature=0.6, top_p=0.9, seed=3, max_tokens=10),
    ]
    answers = []
    for settings in ({"runner": "v1"}, {"runner": "v2", "async_depth": 1}, {"runner": "v2"}):
        with LLM(device="cpu", dtype="float32", num_blocks=4, max_num_seqs=2, **settings) as llm:
            answers.append([o.token_ids for o in llm.chat(conversation, params, use_tqdm=False)])
    assert answers[0] == answers[1] == answers[2]
    assert all(answers[0])
