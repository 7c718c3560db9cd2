"""With batch_invariant, what a token gets depends on its own past alone: not one bit on its batch.

The kernels run in Triton's interpreter and as their CPU forms; the engine runs in bfloat16, where
another order of a sum would show in the ids. All comparisons are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from batch_invariant_cases import attend, part
from decoder_harness import Ranks, runner_config
from kernel_cases import attention_case, check_attention, normal

from nanorunner import LLM, SamplingParams
from nanorunner.config import make_config
from nanorunner.kernels.attention_batch_invariant import (
    batch_invariant_attention_reference,
    batch_invariant_attention_triton,
)
from nanorunner.kernels.linear_batch_invariant import (
    linear_batch_invariant_reference,
    linear_batch_invariant_triton,
    tile_of,
)
from nanorunner.kernels.peer_all_reduce import sum_in_rank_order
from nanorunner.machine import Gpu, probe
from nanorunner.presets import load_preset
from nanorunner.resolve import resolve
from nanorunner.workers.architectures import parse

Ids = list[list[int]]
LINEARS = [linear_batch_invariant_reference, linear_batch_invariant_triton]
ATTENTIONS = [batch_invariant_attention_reference, batch_invariant_attention_triton]


@pytest.mark.parametrize("function", LINEARS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_of_a_product_is_the_same_in_every_batch(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    x, weight, bias = normal(70, 72, dtype=dtype), normal(50, 72, dtype=dtype), normal(50)
    bias = bias.to(dtype)
    whole = function(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-3, atol=1e-2)
    for start, end in [(0, 1), (33, 34), (69, 70), (1, 70), (20, 53)]:
        assert torch.equal(function(x[start:end], weight, bias), whole[start:end])
    assert torch.equal(function(x[5:], weight), function(x, weight)[5:])
    assert function(x[:0], weight).shape == (0, 50)


def test_a_tile_follows_from_the_weight_alone_and_wide_weights_get_wide_tiles() -> None:
    assert tile_of(1024, 2).block_out == 16
    assert tile_of(4096, 2).block_out == 32
    assert tile_of(151_936, 2).block_out == 128
    assert tile_of(151_936, 4).block_out == 32


@pytest.mark.beside
@pytest.mark.parametrize("function", ATTENTIONS)
@pytest.mark.parametrize("heads", [(6, 3, 64), (4, 1, 80)])
def test_a_token_attends_alike_in_a_prompt_in_a_chunk_and_as_a_decode(
    function: Callable[..., torch.Tensor], heads: tuple[int, int, int]
) -> None:
    mixed = [(40, 40), (1, 300), (3, 258), (30, 130), (1, 1)]
    case = attention_case(mixed, heads, padded_requests=1, padded_tokens=3)
    out = attend(function, case)
    check_attention(case, out)
    starts = case.batch.query_start_loc.tolist()
    for i, (query_len, seq_len) in enumerate(mixed):
        rows = out[starts[i] : starts[i + 1]]
        whole = part(case, i, 0, query_len, seq_len)
        assert torch.equal(attend(function, whole), rows)
        for first, last in ((0, 1), (query_len // 2, query_len), (query_len - 1, query_len)):
            chunk = part(case, i, first, last, seq_len - query_len + last)
            assert torch.equal(attend(function, chunk), rows[first:last])


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_logits_are_the_same_bits_whole_in_chunks_as_decodes_and_in_company(preset: str) -> None:
    """A model wide enough that plain bfloat16 kernels fail this."""
    fields: dict[str, Any] = load_preset(preset) | {"hidden_size": 256, "intermediate_size": 704}
    config = runner_config(parse(fields), 1, dtype="bfloat16", batch_invariant=True)
    ids = [int(i) for i in torch.randint(3, 500, (300,), generator=torch.Generator())]
    whole = Ranks(config).step([ids], [0], [[2, 5]])

    chunked = Ranks(config)
    chunks = [(0, 7), (7, 150), (150, 257), *((n, n + 1) for n in range(257, 290)), (290, 300)]
    for start, end in chunks:
        others: Any = ([[9]], [0], [[7]]) if start % 2 else ([[8, 9], [4]], [0, 0], [[6], [7]])
        company = zip(([ids[start:end]], [start], [[2, 5]]), others, strict=True)
        logits = chunked.step(*(mine + theirs for mine, theirs in company))
        assert torch.equal(logits[: end - start], whole[start:end]), (start, end)


PROMPT_LENS = (250, 3, 256, 90)
NUM_TOKENS = 10


def make_llm(**settings: Any) -> LLM:
    settings = {"max_model_len": 611, "num_blocks": 24, "max_num_seqs": 4, **settings}
    return LLM(
        "tiny-qwen3",
        load_format="dummy",
        device="cpu",
        dtype="bfloat16",
        batch_invariant=True,
        **settings,
    )


def generate(llm: LLM, prompts: Ids) -> Ids:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.token_ids for output in llm.generate(requests, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def prompts() -> Ids:
    random = Random(0)
    return [[random.randrange(3, 500) for _ in range(length)] for length in PROMPT_LENS]


@pytest.fixture(scope="module")
def expected(prompts: Ids) -> Iterator[Ids]:
    """Return what each request gets alone, from a cold cache."""
    with make_llm(prefix_cache=False) as llm:
        yield [generate(llm, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_bfloat16_ids_are_the_same_alone_beside_others_and_from_the_cache(
    prompts: Ids, expected: Ids, runner: str
) -> None:
    with make_llm(runner=runner) as llm:
        assert generate(llm, prompts) == expected
        longer = [prompt + ids for prompt, ids in zip(prompts, expected, strict=True)]
        first = generate(llm, longer)
        assert llm.engine.stats.cached_tokens > 0
        assert generate(llm, longer[::-1]) == first[::-1]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_bfloat16_ids_are_the_same_in_chunks_and_after_a_preemption(
    prompts: Ids, expected: Ids, runner: str
) -> None:
    small = {"max_num_batched_tokens": 48, "num_blocks": 4, "prefix_cache": False}
    with make_llm(runner=runner, **small) as llm:
        assert generate(llm, prompts) == expected
        assert llm.engine.stats.mixed_steps > 0
        assert llm.engine.stats.preemptions > 0


def test_ranks_are_added_up_in_rank_order() -> None:
    parts = list(torch.tensor([[1e8], [-1e8], [1.0]]))
    assert float(sum_in_rank_order(parts)) == 1.0
    assert float(sum_in_rank_order(parts[::-1])) == 0.0


def test_three_ranks_give_the_same_ids_in_every_batch(prompts: Ids) -> None:
    with make_llm(tp=3, runner="v2", prefix_cache=False) as llm:
        alone = [generate(llm, [prompt])[0] for prompt in prompts]
        assert generate(llm, prompts) == alone


def test_a_backend_that_is_not_batch_invariant_is_refused_by_name() -> None:
    settings = {"model": "tiny-llama", "load_format": "dummy", "batch_invariant": True}
    gpu = Gpu("test", (9, 0), 1 << 36, 1 << 36)
    machine = replace(probe(), gpus=(gpu,), has_triton=True, has_flash_attn=True)
    resolved = resolve(make_config({**settings, "device": "cuda"}), machine)
    assert resolved.config.attention_backend == "triton"
    with pytest.raises(ValueError, match=r"torch.*only triton is batch-invariant.*triton or auto"):
        resolve(make_config({**settings, "device": "cuda", "attention_backend": "torch"}), machine)
