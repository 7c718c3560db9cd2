"""What cannot run on this machine or with this model is refused before any process starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanorunner.config import make_config
from nanorunner.machine import Gpu, Machine
from nanorunner.resolve import kv_token_bytes, num_parameters, resolve

GIB = 1 << 30
LAPTOP = Machine(
    gpus=(),
    cuda_problem="no NVIDIA GPU was found",
    cores=4,
    free_memory_bytes=8 * GIB,
    has_triton=True,
    has_flash_attn=False,
)
H200 = Gpu("H200", (9, 0), 140 * GIB, 139 * GIB)
T4 = Gpu("T4", (7, 5), 16 * GIB, 15 * GIB)
SERVER = replace(LAPTOP, gpus=(H200, H200), cuda_problem="")
DUMMY = {"load_format": "dummy"}
QWEN = {"model": "qwen3-0.6b", **DUMMY}

REFUSED: list[tuple[Machine, dict[str, Any], list[str]]] = [
    (LAPTOP, {**QWEN, "device": "cuda"}, ["no NVIDIA GPU was found", "--device cpu"]),
    (LAPTOP, {**QWEN, "tp": 99}, ["tp 99", "16 query heads", "use 1 to 16"]),
    (SERVER, {**QWEN, "tp": 4}, ["tp 4", "2 GPU(s)", "--tp 2"]),
    (LAPTOP, {**QWEN, "max_model_len": 10**6}, ["max_model_len 1000000", "40960"]),
    (LAPTOP, {**QWEN, "attention_backend": "triton"}, ["triton", "needs an NVIDIA GPU"]),
    (SERVER, {**QWEN, "attention_backend": "flash_attn"}, ["flash_attn", "not installed"]),
    (
        replace(SERVER, has_flash_attn=True),
        {**QWEN, "attention_backend": "flash_attn", "dtype": "float32"},
        ["flash_attn", "no float32", "triton"],
    ),
    (
        replace(SERVER, has_triton=False),
        {**QWEN, "attention_backend": "triton"},
        ["triton is not installed"],
    ),
    (replace(SERVER, gpus=(T4,)), {**QWEN, "dtype": "bfloat16"}, ["T4", "--dtype float16"]),
    (
        replace(SERVER, gpus=(T4,)),
        {"model": "qwen3-8b", **DUMMY},
        ["GPU 0", "14.4 GiB", "--gpu-memory-utilization"],
    ),
    (
        replace(SERVER, gpus=(replace(H200, free_bytes=GIB),)),
        {"model": "qwen3-8b", **DUMMY},
        ["other programs leave 1.0 GiB", "larger --tp"],
    ),
    (LAPTOP, {"model": "qwen3-8b", **DUMMY}, ["30.5 GiB in float32", "8.0 GiB", "--dtype"]),
    (
        replace(LAPTOP, free_memory_bytes=6 * GIB),
        {**QWEN, "speculative": "draft", "draft_model": "qwen3-8b"},
        ["qwen3-0.6b with draft_model qwen3-8b", "32.7 GiB"],
    ),
    (
        LAPTOP,
        {**QWEN, "speculative": "draft", "draft_model": "tiny-qwen3"},
        ["tiny-qwen3: its vocabulary has 1003 ids", "151936", "same tokenizer"],
    ),
    (LAPTOP, {**QWEN, "kv_cache_gib": 5.0, "tp": 2}, ["takes 10.0 GiB on 2 rank(s)", "8.0 GiB"]),
    (LAPTOP, {**QWEN, "num_blocks": 10**6}, ["KV cache that is asked for", "--num-blocks"]),
    (LAPTOP, {"model": "qwen3-0.6b"}, ["is a preset", "--load-format dummy"]),
    (LAPTOP, {"model": "qwen3-06b"}, ["did you mean qwen3-0.6b?"]),
    (LAPTOP, {"model": "/nowhere/model"}, ["no such folder"]),
]


@pytest.mark.parametrize(
    ("machine", "settings", "words"), REFUSED, ids=lambda value: str(value)[:50]
)
def test_what_cannot_work_is_refused(
    machine: Machine, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        resolve(make_config(settings), machine)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "dtype": "float32",
}
BAD_FOLDERS: list[tuple[dict[str, str], list[str]]] = [
    ({}, ["no config.json"]),
    ({"config.json": "{"}, ["cannot read", "config.json"]),
    ({"config.json": "[]"}, ["holds a list"]),
    ({"config.json": json.dumps(SHAPE)}, ["no .safetensors file"]),
    ({"config.json": json.dumps(SHAPE), "pytorch_model.bin": ""}, ["pickled PyTorch weights"]),
    (
        {
            "config.json": json.dumps(SHAPE),
            "model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors"}}',
        },
        ["lacks 1 of the files", "model-1.safetensors"],
    ),
    (
        {
            "config.json": json.dumps({**SHAPE, "architectures": ["GPT2LMHeadModel"]}),
            "a.safetensors": "",
        },
        ["GPT2LMHeadModel is not supported", "LlamaForCausalLM"],
    ),
    (
        {
            "config.json": json.dumps({**SHAPE, "quantization_config": {"quant_method": "awq"}}),
            "a.safetensors": "",
        },
        ["quantization_config (awq)"],
    ),
]


@pytest.mark.parametrize(("files", "words"), BAD_FOLDERS, ids=lambda value: str(value)[:50])
def test_a_folder_that_is_no_whole_model_is_refused(
    files: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"\w") as caught:
        resolve(make_config({"model": str(tmp_path)}), LAPTOP)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_laptop_gets_what_a_cpu_can_do_and_is_told_why() -> None:
    resolved = resolve(make_config({**QWEN, "tp": 2}), LAPTOP)
    runner = resolved.runner_config
    assert (runner.device, runner.dtype, runner.attention_backend) == ("cpu", "float32", "torch")
    assert (runner.tp, runner.max_model_len, runner.checkpoint) == (2, 4096, "")
    assert runner.kv_cache_bytes == GIB
    notes = "\n".join(resolved.notes)
    for word in ("no NVIDIA GPU was found", "float32", "torch", "gloo", "CUDA graphs off", "4096"):
        assert word in notes


def test_a_server_gets_its_gpus_and_the_checkpoint_s_dtype() -> None:
    resolved = resolve(make_config({**QWEN, "tp": 2}), SERVER)
    runner = resolved.runner_config
    assert (runner.device, runner.dtype, runner.attention_backend) == ("cuda", "bfloat16", "triton")
    assert runner.kv_cache_bytes is None
    assert "nccl" in "\n".join(resolved.notes)
    with_flash = resolve(make_config(QWEN), replace(SERVER, has_flash_attn=True))
    assert with_flash.runner_config.attention_backend == "flash_attn"
    old = resolve(make_config(QWEN), replace(SERVER, gpus=(T4,)))
    assert old.runner_config.dtype == "float16"


def test_the_arithmetic_of_a_model_s_size_is_right() -> None:
    model = resolve(make_config(QWEN), LAPTOP).runner_config.model
    # 596,049,920 parameters with norms; 28 layers, 8 KV heads of 128, K and V, 2 bytes
    assert num_parameters(model) == pytest.approx(596_049_920, rel=0.001)
    assert kv_token_bytes(model, "bfloat16") * 256 == 29_360_128
