"""The engine's settings: one frozen dataclass, resolved once, printed once, kept in every result.

    LLM(**settings) / command line -> make_config -> Config -> check -> resolve.py -> RunnerConfig

Every field is a command-line flag of the same name with dashes. check() holds every rule that
needs no model and no GPU; resolve.py adds those that need the model's shape or the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanorunner.did_you_mean import did_you_mean
from nanorunner.field_types import check_types
from nanorunner.rank_rules import check_rank_rules
from nanorunner.speculative import check_speculation

CHOICES = {
    "runner": ("v1", "v2"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "safetensors", "dummy"),
    "attention_backend": ("auto", "torch", "triton", "flash_attn"),
    "all_reduce": ("auto", "nccl", "peer"),
}

TAP_LEVELS = (0, 1, 2)

# Names that users bring along from vLLM, and the field that each one means here.
ALIASES = {
    "tensor_parallel_size": "tp",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "num_blocks",
}

# Settings of other engines that must not be taken for a slip of the pen.
REFUSED = {
    "trust_remote_code": "no code from a checkpoint is ever run; leave it out",
    "quantization": "quantised checkpoints are not supported; use float32, bfloat16 or float16",
    "pipeline_parallel_size": "only tensor parallelism is there; use tp",
    "data_parallel_size": "only tensor parallelism is there; use tp",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a user may set before an engine starts."""

    model: str = ""  # folder, hub id or preset; "" is the embedded SmolLM2-135M-Instruct
    tp: int = 1
    runner: str = "v2"
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    load_format: str = "auto"  # auto | safetensors | dummy
    attention_backend: str = "auto"  # auto | torch | triton | flash_attn
    all_reduce: str = "auto"  # of small tensors on GPUs: auto | nccl | peer
    enforce_eager: bool = False
    batch_invariant: bool = False  # slower; a request's ids never depend on its neighbours
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    max_num_seqs: int = 256
    max_num_reqs: int | None = None  # rows of v2's state table; None: 1024 or 2 x max_num_seqs
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None  # None: the model's own, at most 4096 (said in the log)
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None  # of every rank; None: what is left on a GPU, 1 GiB on a CPU
    num_blocks: int | None = None
    prefix_cache: bool = True
    async_depth: int | None = None  # steps in flight; None: 1 with runner v1, 2 with v2
    seed: int = 0
    step_timeout_s: float = 300.0
    start_timeout_s: float = 600.0
    step_times: bool = False  # record where each step's time goes; Engine.spans() has it
    trace: str | None = None  # folder to which each rank writes that when the engine closes
    tap: int = 0  # 1: print a line for each frame that rank 0 sends; 2: with its arguments
    tap_json: str | None = None  # file to which the same goes as JSON lines
    check_ranks: bool = False  # slow: prove that ranks agree, in every step and about the weights
    share_gpu: bool = False  # slow: every rank on GPU 0, for a machine with fewer GPUs than ranks
    speculative: str = "off"  # off | ngram | draft: who proposes tokens to be verified
    draft_model: str | None = None  # folder, hub id or preset; for draft
    num_speculative_tokens: int | None = None  # drafts a step; None: 7 for ngram, 4 for draft
    ngram_min: int | None = None  # shortest suffix that is looked up; None: 2
    ngram_max: int | None = None  # and the longest; None: 4
    speculative_adaptive: bool = True  # turn it down where it loses


def make_config(settings: Mapping[str, Any]) -> Config:
    """Return the checked Config of settings by name, vLLM's names allowed.

    Raises ValueError for an unknown name (with the closest known one), for one setting given
    twice under two names, and for whatever check() refuses.
    """
    known = {field.name for field in fields(Config)}
    values: dict[str, Any] = {}
    for given, value in settings.items():
        name = ALIASES.get(given, given)
        if name in REFUSED:
            # an explicit "off" asks for what we do anyway; True == 1, but is no off
            if not value or (value == 1 and value is not True):
                continue
            raise ValueError(f"{given} {value!r}: {REFUSED[name]}")
        if name not in known:
            hint = did_you_mean(given, known | set(ALIASES))
            raise ValueError(f"unknown setting {given!r}; {hint}")
        if name in values:
            raise ValueError(f"{given} and {name} are one setting; give one of them")
        values[name] = value
    if "dtype" in values:  # torch.float32 as well as "float32"
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    for name in ("model", "trace", "tap_json"):
        if hasattr(values.get(name), "__fspath__"):
            values[name] = str(values[name])
    config = Config(**values)
    check(config)
    return config


def check(config: Config) -> None:
    """Refuse, by ValueError, every setting that no model and no machine could serve."""
    check_types(config)
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name} {value!r}: use {' or '.join(allowed)}")
    _check_counts(config)
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization {config.gpu_memory_utilization}: use a share of the GPU's "
            f"memory above 0 and at most 1, such as 0.9"
        )
    for name in ("step_timeout_s", "start_timeout_s", "kv_cache_gib"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} {value}: use a number above 0")
    if not -(2**63) <= config.seed < 2**64:
        raise ValueError(f"seed {config.seed}: use a 64-bit integer")
    if config.trace == "":
        raise ValueError("trace '': name a folder, or leave it out")
    if config.tap not in TAP_LEVELS:
        raise ValueError(f"tap {config.tap}: use 1 (a line a frame), 2 (with arguments) or 0 (off)")
    if config.tap_json == "":
        raise ValueError("tap_json '': name a file, or leave it out")
    _check_pairs(config)
    check_speculation(config)
    check_rank_rules(config)


def _check_counts(config: Config) -> None:
    least = {
        "tp": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_model_len": 2,  # one prompt token and one generated
        "num_blocks": 1,
        "async_depth": 1,
        "max_num_reqs": 2,
    }
    for name, limit in least.items():
        value = getattr(config, name)
        if value is not None and value < limit:
            raise ValueError(f"{name} {value}: use {limit} or more")


def _check_pairs(config: Config) -> None:
    """Refuse settings that are right alone and wrong together."""
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {config.max_num_batched_tokens}: every running request needs "
            f"a token a step; use at least max_num_seqs ({config.max_num_seqs}), or lower that"
        )
    if config.kv_cache_gib is not None and config.num_blocks is not None:
        raise ValueError(
            f"kv_cache_gib {config.kv_cache_gib} and num_blocks {config.num_blocks}: both size "
            f"the KV cache; give one of them"
        )
    if config.runner == "v1" and config.async_depth not in (None, 1):
        raise ValueError(
            f"async_depth {config.async_depth}: runner v1 is synchronous; use 1, or --runner v2"
        )
    if config.max_num_reqs is not None and config.max_num_reqs < 2 * config.max_num_seqs:
        raise ValueError(
            f"max_num_reqs {config.max_num_reqs}: a step in flight may hold max_num_seqs "
            f"({config.max_num_seqs}) rows beside the next one's; use {2 * config.max_num_seqs} "
            f"or more"
        )
    if config.device == "cpu" and config.attention_backend in ("triton", "flash_attn"):
        raise ValueError(
            f"attention_backend {config.attention_backend}: needs an NVIDIA GPU; with device cpu "
            f"use torch or auto"
        )
    if config.device == "cpu" and config.all_reduce != "auto":
        raise ValueError(
            f"all_reduce {config.all_reduce}: needs NVIDIA GPUs; with device cpu use auto"
        )
