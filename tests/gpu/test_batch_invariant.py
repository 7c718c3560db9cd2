"""--batch-invariant on a GPU: the same bits alone, in company, in chunks, as a decode, in a graph.

In bfloat16, where the default kernels (cuBLAS, split attention) do give other bits; how many of
the ids differ with those is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from batch_invariant_cases import attend, part
from kernel_cases import RANK_COUNTS, attention_case, check_attention, normal

from nanorunner import LLM, SamplingParams
from nanorunner.kernels.attention_batch_invariant import batch_invariant_attention
from nanorunner.kernels.linear_batch_invariant import linear_batch_invariant
from nanorunner.presets import load_preset

pytestmark = pytest.mark.limit(400)

SHAPES = [(1024, 1024), (4096, 1024), (1024, 3072), (6144, 1024), (151_936, 1024), (171, 576)]
PROMPT_LENS = (220, 219, 221, 218, 3, 256, 520)  # four outgrow their first block together
NUM_TOKENS = 40

Ids = list[list[int]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_is_the_same_for_every_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    num_out, num_in = shape
    x, weight = normal(300, num_in, dtype=dtype), normal(num_out, num_in, dtype=dtype) / 32
    whole = linear_batch_invariant(x, weight)
    exact = x.double() @ weight.double().T
    error = (whole.double() - exact).abs().max() / exact.abs().max()
    assert float(error) < (4e-3 if dtype == torch.bfloat16 else 1e-5)
    for start, end in [(0, 1), (299, 300), (7, 15), (63, 65), (0, 64), (100, 228), (1, 300)]:
        assert torch.equal(linear_batch_invariant(x[start:end], weight), whole[start:end])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (17, 1, 16)])
def test_a_token_attends_alike_in_a_prompt_in_a_chunk_and_as_a_decode(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    mixed = [(300, 300), (1, 1500), (70, 700), (1, 1), (130, 257)]
    case = attention_case(mixed, heads, dtype, padded_requests=2, padded_tokens=9)
    out = attend(batch_invariant_attention, case)
    check_attention(case, out)
    starts = case.batch.query_start_loc.tolist()
    for i, (query_len, seq_len) in enumerate(mixed):
        rows = out[starts[i] : starts[i + 1]]
        chunks = [(0, query_len), (query_len // 3, query_len)]
        chunks += [(token, token + 1) for token in range(0, query_len, 29)]
        for first, last in chunks:
            chunk = part(case, i, first, last, seq_len - query_len + last)
            assert torch.equal(attend(batch_invariant_attention, chunk), rows[first:last])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config of Qwen3-0.6B's width and few layers; random weights make close logits."""
    wide = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    path = tmp_path_factory.mktemp("wide")
    # Not tied: a tied head of random weights repeats the last id, by far.
    head = {"vocab_size": 32_000, "tie_word_embeddings": False}
    fields = load_preset("tiny-qwen3") | wide | heads | head
    (path / "config.json").write_text(json.dumps(fields))
    return path


def make_llm(folder: Path, **settings: Any) -> LLM:
    given = {"batch_invariant": True, "runner": "v2", "max_num_seqs": 8, "prefix_cache": False}
    if "num_blocks" not in settings:
        given["kv_cache_gib"] = 2.0
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        max_model_len=1024,
        **(given | settings),
    )


def make_prompts() -> Ids:
    random = Random(0)
    return [[random.randrange(3, 10_000) for _ in range(length)] for length in PROMPT_LENS]


def generate(llm: LLM, prompts: Ids) -> Ids:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.token_ids for output in llm.generate(requests, params, use_tqdm=False)]


def alone(llm: LLM) -> Ids:
    return [generate(llm, [prompt])[0] for prompt in make_prompts()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Ids:
    with make_llm(folder) as llm:
        return alone(llm)


VARIANTS: dict[str, dict[str, Any]] = {
    "in company, by graph": {},
    "eagerly": {"enforce_eager": True},
    "depth 1": {"async_depth": 1},
    "runner v1": {"runner": "v1"},
    "in chunks": {"max_num_batched_tokens": 48},
    "preempted": {"num_blocks": 5, "max_num_seqs": 4},
    "cached": {"prefix_cache": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_ids_are_the_same_whatever_happens_around_a_request(
    folder: Path, expected: Ids, name: str
) -> None:
    with make_llm(folder, **VARIANTS[name]) as llm:
        assert generate(llm, make_prompts()) == expected
        if name == "preempted":
            assert llm.engine.stats.preemptions > 0
        if name == "cached":
            assert generate(llm, make_prompts()) == expected
            assert llm.engine.stats.cached_tokens > 0


@pytest.mark.parametrize("tp", RANK_COUNTS)
def test_several_ranks_give_the_same_ids_in_every_batch(folder: Path, tp: int) -> None:
    with make_llm(folder, tp=tp) as llm:
        assert generate(llm, make_prompts()) == alone(llm)


def test_the_share_of_ids_that_another_batch_changes_by_default_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not an error: cuBLAS sums in another order for another batch. It is why the mode exists."""
    with make_llm(folder, batch_invariant=False) as llm:
        apart, together = alone(llm), generate(llm, make_prompts())
    pairs = [
        (a, b) for x, y in zip(apart, together, strict=True) for a, b in zip(x, y, strict=True)
    ]
    num_different = sum(a != b for a, b in pairs)
    with capsys.disabled():
        print(f"\ndefault kernels: {num_different} of {len(pairs)} ids differ in another batch")
