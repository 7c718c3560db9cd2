"""The engine's settings: one frozen dataclass, resolved once, printed once, kept in every result.

Every field is a command-line flag of the same name with dashes. check() holds every rule that
needs no model and no GPU; resolve_runner_config() adds those that need the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a user may set before an engine starts."""

    model: str = ""  # folder, hub id or preset; "" is the embedded SmolLM2-135M-Instruct
    tp: int = 1
    runner: str = "v1"
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    load_format: str = "auto"  # auto | safetensors | dummy
    attention_backend: str = "auto"  # auto | torch | triton | flash_attn
    enforce_eager: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None  # None: the model's own, at most 4096 (said in the log)
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    num_blocks: int | None = None
    prefix_cache: bool = True
    async_depth: int = 1  # steps in flight; v1 is synchronous
    seed: int = 0
    step_timeout_s: float = 300.0
    start_timeout_s: float = 600.0
