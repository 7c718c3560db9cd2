"""Logits of every family equal transformers' in fp32, at any tp, whole, in chunks and decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import Ranks, runner_config
from transformers import AutoModelForCausalLM

from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model
from nanorunner.workers.architectures import parse

pytestmark = pytest.mark.beside

TOLERANCE = 1e-4  # absolute, on logits of a few units: fp32 sums in another order
# More than one block of 256, and more than llama3's original context in the tiny-llama preset.
NUM_PROMPT, NUM_DECODE = 300, 4

MODELS: dict[str, dict[str, Any]] = {
    "llama3-rope-1-kv-head-all-biases-untied": load_preset("tiny-llama"),
    "llama-tied-9-heads-3-kv-heads": {
        **load_preset("smollm2-135m"),
        **{"vocab_size": 257, "hidden_size": 72, "head_dim": 8, "intermediate_size": 50},
        **{"num_hidden_layers": 2, "dtype": "float32"},
    },
    "mistral-untied-head-dim-not-hidden-over-heads": {
        **load_preset("tiny-llama"),
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 24},
        **{"attention_bias": False, "mlp_bias": False, "rope_scaling": None},
        **{"sliding_window": None, "num_key_value_heads": 4, "num_hidden_layers": 2},
    },
    "qwen2-qkv-bias-tied": load_preset("tiny-qwen2"),
    "qwen3-qk-norm-tied": load_preset("tiny-qwen3"),
    "qwen3-biased-untied-1-kv-head": {
        **load_preset("tiny-qwen3"),
        **{"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
        **{"num_hidden_layers": 2, "vocab_size": 101},
    },
}


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], torch.Tensor]:
    """Return a toy folder, token ids and transformers' logits for all of them."""
    folder = make_toy_model(tmp_path_factory.mktemp("toy"), MODELS[request.param], seed=1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab_size = MODELS[request.param]["vocab_size"]
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(vocab_size, (NUM_PROMPT + NUM_DECODE,), generator=generator)
    ids[-1] = vocab_size - 1  # the last rank's last id
    with torch.inference_mode():
        logits = reference(ids[None]).logits[0]
    return folder, ids.tolist(), logits


def ranks(folder: Path, tp: int) -> Ranks:
    """Return tp decoders that have loaded the folder."""
    model = parse(json.loads((folder / "config.json").read_text()))
    return Ranks(runner_config(model, tp, checkpoint=str(folder), load_format="safetensors"))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check the tolerance, and that NaN from an unwritten slot is nowhere."""
    assert theirs.std() > 0.2  # logits near zero would agree whatever the model did
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_prefill_whole_then_decode_equals_transformers(
    case: tuple[Path, list[int], torch.Tensor], tp: int
) -> None:
    folder, ids, expected = case
    model = ranks(folder, tp)
    table = [[5, 2]]  # blocks in no order
    assert_close(model.step([ids[:NUM_PROMPT]], [0], table), expected[:NUM_PROMPT])
    for position in range(NUM_PROMPT, len(ids)):
        logits = model.step([ids[position : position + 1]], [position], table)
        assert_close(logits, expected[position : position + 1])


@pytest.mark.parametrize("tp", [1, 3])
def test_prefill_in_chunks_beside_a_decode_equals_transformers(
    case: tuple[Path, list[int], torch.Tensor], tp: int
) -> None:
    folder, ids, expected = case
    model = ranks(folder, tp)
    tables = [[1], [7, 3]]
    other = ids[:40]
    model.step([other[:39]], [0], tables[:1])
    # A decode row and the first chunk share a step; the second chunk crosses into a new block.
    mixed = model.step([other[39:], ids[:130]], [39, 0], tables)
    assert_close(mixed, torch.cat((expected[39:40], expected[:130])))
    assert_close(model.step([ids[130:]], [130], tables[1:]), expected[130:])


def test_tp_as_large_as_the_query_heads_works(tmp_path: Path) -> None:
    fields = MODELS["llama-tied-9-heads-3-kv-heads"]
    folder = make_toy_model(tmp_path, fields)
    ids = list(range(50))
    expected = ranks(folder, 1).step([ids], [0], [[0]])
    for tp in (7, 9):
        assert_close(ranks(folder, tp).step([ids], [0], [[0]]), expected)


def test_dummy_weights_are_one_model_at_every_tp() -> None:
    config = parse(load_preset("tiny-llama"))
    ids = list(range(20))
    one, three = (Ranks(runner_config(config, tp, seed=3)).step([ids], [0], [[0]]) for tp in (1, 3))
    torch.testing.assert_close(one, three, rtol=0, atol=1e-5)
    other_seed = Ranks(runner_config(config, 1, seed=4)).step([ids], [0], [[0]])
    assert (one - other_seed).abs().max() > 1e-3


def test_a_released_model_holds_no_weights() -> None:
    decoder = Ranks(runner_config(parse(load_preset("tiny-qwen3")), 1)).decoders[0]
    decoder.release()
    decoder.release()
    held = [v for v in vars(decoder).values() if isinstance(v, torch.Tensor)]
    assert sum(tensor.numel() for tensor in held) == 0
    assert not decoder.parameters
    assert not decoder.layers
