"""Every setting that no model and no machine could serve is refused in words, by its name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nanorunner.config import ALIASES, Config, make_config
from nanorunner.token_count import parse_count

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"tp": 0}, ["tp 0", "1 or more"]),
    ({"tp": -1}, ["tp -1", "1 or more"]),
    ({"tp": True}, ["tp True", "bool", "use int"]),
    ({"tp": "2"}, ["tp '2'", "str", "use int"]),
    ({"tp": 2.0}, ["tp 2.0", "float", "use int"]),
    ({"tpp": 2}, ["unknown setting 'tpp'", "did you mean tp?"]),
    ({"tensor_paralel_size": 2}, ["unknown setting", "did you mean tensor_parallel_size?"]),
    ({"quetzalcoatl": 2}, ["unknown setting", "use one of", "max_num_seqs"]),
    ({"tp": 2, "tensor_parallel_size": 2}, ["one setting"]),
    ({"trust_remote_code": True}, ["trust_remote_code", "no code from a checkpoint"]),
    ({"quantization": "awq"}, ["quantization 'awq'", "not supported"]),
    ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size 2", "tensor parallelism"]),
    ({"model": 7}, ["model 7", "use str"]),
    ({"runner": "v3"}, ["runner 'v3'", "v1"]),
    ({"device": "gpu"}, ["device 'gpu'", "cuda"]),
    ({"device": "cuda:1"}, ["device 'cuda:1'", "auto or cpu or cuda"]),
    ({"dtype": "bf16"}, ["dtype 'bf16'", "bfloat16"]),
    ({"dtype": "int8"}, ["dtype 'int8'", "float32"]),
    ({"load_format": "gguf"}, ["load_format 'gguf'", "safetensors"]),
    ({"attention_backend": "flash"}, ["attention_backend 'flash'", "flash_attn"]),
    ({"attention_backend": "triton", "device": "cpu"}, ["needs an NVIDIA GPU", "torch"]),
    ({"attention_backend": "flash_attn", "device": "cpu"}, ["needs an NVIDIA GPU", "auto"]),
    ({"enforce_eager": "yes"}, ["enforce_eager 'yes'", "use bool"]),
    ({"max_num_seqs": 0}, ["max_num_seqs 0", "1 or more"]),
    ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens 0"]),
    ({"max_num_batched_tokens": 100}, ["at least max_num_seqs (256)"]),
    ({"max_model_len": 1}, ["max_model_len 1", "2 or more"]),
    ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization 0.0", "at most 1"]),
    ({"gpu_memory_utilization": 1.01}, ["gpu_memory_utilization 1.01", "0.9"]),
    ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization nan"]),
    ({"kv_cache_gib": -1.0}, ["kv_cache_gib -1.0", "above 0"]),
    ({"kv_cache_gib": 1.0, "num_blocks": 8}, ["give one of them"]),
    ({"num_blocks": 0}, ["num_blocks 0"]),
    ({"async_depth": 0}, ["async_depth 0"]),
    ({"runner": "v1", "async_depth": 2}, ["async_depth 2", "synchronous"]),
    ({"seed": 2**64}, ["seed", "64-bit"]),
    ({"step_timeout_s": 0.0}, ["step_timeout_s 0.0", "above 0"]),
    ({"start_timeout_s": float("inf")}, ["start_timeout_s inf"]),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        make_config(settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_no_settings_are_the_defaults() -> None:
    assert make_config({}) == Config()


def test_the_names_that_vllm_uses_mean_the_same_here() -> None:
    config = make_config({"tensor_parallel_size": 2, "enable_prefix_caching": False})
    assert (config.tp, config.prefix_cache) == (2, False)
    assert set(ALIASES.values()) <= {field.name for field in fields(Config)}


def test_switching_off_what_is_not_there_is_no_error() -> None:
    off = {"trust_remote_code": False, "quantization": None, "pipeline_parallel_size": 1}
    assert make_config(off) == Config()


def test_a_path_and_a_torch_dtype_are_taken_as_their_names() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    config = make_config({"model": Path("/models/x"), "dtype": Dtype()})
    assert (config.model, config.dtype) == ("/models/x", "bfloat16")


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("1k", 1000), ("1K", 1024), ("2.5k", 2500), ("1M", 2**20), ("-1", -1)],
)
def test_a_count_may_be_written_with_a_unit(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "1kk", "1 k", "0x10", "many", "1e3"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count; write 512"):
        parse_count(text)
