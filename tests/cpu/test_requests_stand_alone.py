"""A sampled request gets the same ids whatever happens around it.

What may happen: other requests with other settings, chunks, a preemption, the prefix cache, a
second call, other ranks. A random toy model in float32 on the CPU, one process unless tp says more.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from nanorunner import LLM, SamplingParams

Ids = list[list[int]]

NUM_TOKENS = 12
PROMPT_LENS = (250, 252, 249, 3, 256, 17, 1, 90)


def make_llm(**settings: Any) -> LLM:
    """Return the toy, whose pool and length are small and not multiples of anything."""
    settings = {"max_model_len": 611, "num_blocks": 24, "max_num_seqs": 8, **settings}
    return LLM("tiny-llama", load_format="dummy", device="cpu", dtype="float32", **settings)


def make_prompts() -> Ids:
    random = Random(0)
    return [[random.randrange(3, 500) for _ in range(length)] for length in PROMPT_LENS]


def make_params() -> list[SamplingParams]:
    """Return settings of every kind, two of each; some seeds need all 64 bits."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": -1},
        {"temperature": 1.0, "seed": 2**64 - 2, "top_p": 0.8},
        {"temperature": 2.0, "seed": 7, "top_k": 40},
    ]
    return [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind) for kind in kinds + kinds
    ]


def generate(llm: LLM, prompts: Ids, params: list[SamplingParams]) -> Ids:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Ids:
    """Return what each request gets when it is the only one, from a cold cache."""
    ids = []
    with make_llm(prefix_cache=False) as cold:
        for prompt, params in zip(make_prompts(), make_params(), strict=True):
            ids += generate(cold, [prompt], [params])
    # two are greedy, and a random model's favourite may be the same for both
    assert len({tuple(some) for some in ids}) >= len(ids) - 1
    return ids


def test_beside_others_and_again_in_another_order(llm: LLM, expected: Ids) -> None:
    prompts, params = make_prompts(), make_params()
    assert generate(llm, prompts, params) == expected
    assert generate(llm, prompts[::-1], params[::-1]) == expected[::-1]
    assert (
        llm.engine.stats.cached_tokens == 0
    )  # no prompt has a whole block to share and one id more
    assert not llm.engine.has_unfinished()


def test_with_a_prompt_that_is_read_in_pieces_beside_decodes(expected: Ids) -> None:
    with make_llm(max_num_batched_tokens=64) as llm:
        assert generate(llm, make_prompts(), make_params()) == expected
        assert llm.engine.stats.mixed_steps > 0


def test_with_a_pool_so_small_that_requests_are_preempted(expected: Ids) -> None:
    with make_llm(num_blocks=4, max_num_seqs=4) as llm:
        assert generate(llm, make_prompts(), make_params()) == expected
        assert llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("tp", [2, 3])
def test_on_more_ranks(tp: int, expected: Ids) -> None:
    with make_llm(tp=tp) as llm:
        assert generate(llm, make_prompts(), make_params()) == expected


def test_a_seed_of_ones_own_gives_the_same_in_every_engine_and_call() -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=42)]
    results = []
    for engine_seed in (0, 1):
        with make_llm(seed=engine_seed, prefix_cache=False) as llm:
            for others in (0, 3):
                unseeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
                prompts = [[5, 6, 7]] * (others + 1)
                results.append(generate(llm, prompts, [unseeded] * others + params)[-1])
    assert results[1:] == results[:-1]


def test_without_a_seed_equal_prompts_differ_and_the_engine_seed_repeats_them() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = []
    for engine_seed in (5, 5, 6):
        with make_llm(seed=engine_seed) as llm:
            runs.append(generate(llm, [[5, 6, 7]] * 8, [params] * 8))
    assert len({tuple(ids) for ids in runs[0]}) == 8
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("max_model_len", [2, 7, 255, 256, 257])
def test_any_length_limit_starts_and_ends_requests_there(max_model_len: int) -> None:
    """The limit need not be a multiple of a block, or as long as what the engine warms up with."""
    with make_llm(max_model_len=max_model_len, num_blocks=None, kv_cache_gib=0.01) as llm:
        prompt = {"prompt_token_ids": [9] * (max_model_len - 1)}
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        short = {"prompt_token_ids": [9]}
        (output,) = llm.generate([short], params, use_tqdm=False)
        assert len(output.token_ids) == min(50, max_model_len - 1)


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_pool_of_one_or_two_blocks_starts_and_answers(num_blocks: int) -> None:
    with make_llm(num_blocks=num_blocks, max_model_len=256 * num_blocks) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=1)
        ids = generate(llm, [[4, 5], [6, 7, 8], [9]], [params] * 3)
        assert [len(some) for some in ids] == [6, 6, 6]


def test_an_engine_after_a_closed_one_has_the_same_room() -> None:
    rooms = []
    for _ in range(2):
        with make_llm(num_blocks=None, kv_cache_gib=0.05) as llm:
            rooms.append(llm.engine.scheduler.roster.blocks.num_blocks)
    assert rooms[0] == rooms[1] > 1
