"""config.json becomes a ModelConfig, or is refused by name; presets are config.json fields."""

from __future__ import annotations

from typing import Any

import pytest

from nanorunner.presets import load_preset, preset_names
from nanorunner.workers.architectures import ARCHITECTURES, parse
from nanorunner.workers.model_config import Llama3Rope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def qwen(version: int, **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [f"Qwen{version}ForCausalLM"], **fields}


def test_fields_left_out_take_transformers_defaults() -> None:
    model = parse(LLAMA)
    assert (model.num_kv_heads, model.head_dim) == (4, 16)
    assert (model.rope_theta, model.rms_norm_eps) == (10000.0, 1e-6)
    assert (model.dtype, model.tie_word_embeddings) == ("float32", False)
    assert not any((model.qkv_bias, model.o_bias, model.mlp_bias, model.qk_norm))
    assert parse(qwen(3, num_key_value_heads=2)).head_dim == 128
    assert parse({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


def test_each_family_has_its_own_biases_and_norms() -> None:
    biased = parse({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert biased.qkv_bias
    assert biased.o_bias
    assert biased.mlp_bias
    qwen2 = parse(qwen(2, num_key_value_heads=2))
    assert qwen2.qkv_bias
    assert not any((qwen2.o_bias, qwen2.qk_norm))
    qwen3 = parse(qwen(3, num_key_value_heads=2))
    assert qwen3.qk_norm
    assert not qwen3.qkv_bias


def test_both_spellings_of_rope_and_dtype_mean_the_same() -> None:
    old = parse({**LLAMA, "rope_theta": 5e5, "rope_scaling": {**LLAMA3}, "torch_dtype": "bfloat16"})
    new = parse({**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "dtype": "bfloat16"})
    assert old == new
    assert old.rope_scaling == Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    assert old.rope_theta == 5e5
    legacy = {"type": "default"}
    assert parse({**LLAMA, "rope_scaling": legacy}).rope_scaling is None


def test_a_sliding_window_that_no_sequence_outgrows_is_full_attention() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    for window in (None, 512, 4096):
        assert parse({**mistral, "sliding_window": window}).num_kv_heads == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported; use Ll"),
        ({"architectures": []}, "no `architectures`; these work: LlamaForCausalLM, Mistral"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn is not supported; use default, "),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear is not supported; use default, ll"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between laye"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported; use silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported; use float32, bf"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding_window 128"),
        (qwen(2, use_sliding_window=True), "use_sliding_window true is not supported"),
        (qwen(3, layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": 0}, "hidden_size 0: must be a whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers '2': must be a whole number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0: must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes': must be true or false"),
        ({"head_dim": 15}, "head_dim 15; even sizes up to 256 work"),
        ({"head_dim": 512}, "head_dim 512; even sizes up to 256 work"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse({**LLAMA, **change})


def test_a_mistral_without_the_field_has_transformers_window() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    with pytest.raises(ValueError, match="sliding_window 4096"):
        parse({**mistral, "max_position_embeddings": 32768})


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_config_that_works(name: str) -> None:
    assert parse(load_preset(name)).architecture in ARCHITECTURES


def test_presets_keep_the_shapes_that_surprise() -> None:
    qwen3 = parse(load_preset("qwen3-0.6b"))
    assert qwen3.num_heads * qwen3.head_dim == 2 * qwen3.hidden_size
    smollm2 = parse(load_preset("smollm2-135m"))
    assert (smollm2.num_heads, smollm2.num_kv_heads, smollm2.rms_norm_eps) == (9, 3, 1e-5)
    assert parse(load_preset("llama-3.2-1b")).rope_scaling is not None


def test_an_unknown_preset_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ValueError, match=r"did you mean qwen3-0.6b\? there are llama-3-8b"):
        load_preset("Qwen3-0.6")
