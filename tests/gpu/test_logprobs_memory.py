"""Log-probabilities cost little GPU memory, however many tokens and however large the vocabulary.

The peak of a run that asks for them is within 128 MiB of the peak of the same run that does not. A
tiny model with Qwen's vocabulary: next to its logits everything else is small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanorunner import LLM, SamplingParams
from nanorunner.outputs import RequestOutput
from nanorunner.presets import load_preset

pytestmark = pytest.mark.limit(300)

VOCAB = 151_936
MIB = 1 << 20
LIMIT_BYTES = 128 * MIB
NUM_TOP = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the model's shape and no weights."""
    fields = load_preset("tiny-qwen3") | {"vocab_size": VOCAB, "max_position_embeddings": 4096}
    path = tmp_path_factory.mktemp("wide")
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def make_llm(folder: Path, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {"runner": "v2", "load_format": "dummy", "dtype": "bfloat16"}
    fixed |= {"skip_tokenizer_init": True, "prefix_cache": False, "max_model_len": 4096}
    return LLM(folder, **fixed, kv_cache_gib=0.5, **settings)


def make_prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(3, VOCAB, (count, length), generator=generator).tolist()
    return ids


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=1, ignore_eos=True, max_tokens=8, **settings)


def run(
    llm: LLM, prompts: list[list[int]], asked: SamplingParams
) -> tuple[list[RequestOutput], int]:
    """Return the outputs, and the most bytes that were allocated at once meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    torch.cuda.synchronize()
    return outputs, torch.cuda.max_memory_allocated()


def check_peak(name: str, plain: int, asked: int, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\n{name}: peak {plain / MIB:.1f} MiB without, {asked / MIB:.1f} MiB with them:"
            f" {(asked - plain) / MIB:+.1f} MiB (limit {LIMIT_BYTES / MIB:g})"
        )
    assert asked - plain <= LIMIT_BYTES


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_top_5_of_256_requests(
    enforce_eager: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = make_prompts(256, 16)
    with make_llm(folder, max_num_seqs=256, enforce_eager=enforce_eager) as llm:
        run(llm, prompts, params())  # pays for what is kept from then on
        _, plain = run(llm, prompts, params())
        outputs, asked = run(llm, prompts, params(logprobs=NUM_TOP))
    for output in outputs:
        found = output.outputs[0].logprobs
        assert found is not None
        assert [len(place) >= NUM_TOP for place in found] == [True] * 8
    check_peak(f"top {NUM_TOP} of 256 requests, eager {enforce_eager}", plain, asked, capsys)


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 1024])
def test_every_token_of_a_prompt_of_4000(
    max_num_batched_tokens: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = make_prompts(1, 4000)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": max_num_batched_tokens}
    with make_llm(folder, **settings) as llm:
        run(llm, prompts, params())
        _, plain = run(llm, prompts, params())
        (output,), asked = run(llm, prompts, params(prompt_logprobs=NUM_TOP))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 4000
    assert all(place is not None for place in output.prompt_logprobs[1:])
    name = f"a prompt of 4000, {max_num_batched_tokens} tokens a step"
    check_peak(name, plain, asked, capsys)
