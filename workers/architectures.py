"""From config.json to ModelConfig: one registry of what runs, and a refusal by name of the rest.

Rank 0 calls parse() before any process starts. Fields that a config leaves out take the value that
transformers gives them for that architecture; both spellings of transformers 4 and 5 are read
(rope_theta and rope_scaling, or rope_parameters; torch_dtype, or dtype).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanorunner.workers.model_config import Llama3Rope, ModelConfig

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "llama3")
ACTIVATIONS = ("silu",)
MAX_HEAD_DIM = 256  # the attention kernels' limit
_REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one family differs from the common decoder, and transformers' defaults for it."""

    has_attention_bias_flag: bool = False  # attention_bias puts a bias on q, k, v and o
    has_mlp_bias_flag: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    num_kv_heads: int | None = None  # None: num_attention_heads
    sliding_window: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(has_attention_bias_flag=True, has_mlp_bias_flag=True),
    "MistralForCausalLM": Architecture(num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True, num_kv_heads=32),
    "Qwen3ForCausalLM": Architecture(
        has_attention_bias_flag=True, has_qk_norm=True, head_dim=128, num_kv_heads=32
    ),
}


def parse(config_json: dict[str, Any]) -> ModelConfig:
    """Return the model that a Hugging Face config.json describes.

    Raises ValueError that names the field, its value and what works, for anything that the four
    architectures here do not have. Nothing is ignored that would change the model's output.
    """
    name = _architecture_name(config_json)
    architecture = ARCHITECTURES[name]
    _refuse_what_is_missing_here(config_json, name, architecture)

    hidden_size = _int(config_json, "hidden_size")
    num_heads = _int(config_json, "num_attention_heads")
    max_positions = _int(config_json, "max_position_embeddings")
    # Left out means the family's default; an explicit null means one KV head a query head.
    default_kv_heads = num_heads if "num_key_value_heads" in config_json else None
    num_kv_heads = _int(
        config_json,
        "num_key_value_heads",
        default_kv_heads or architecture.num_kv_heads or num_heads,
    )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: {num_heads} attention heads cannot share {num_kv_heads} KV heads "
            "evenly; num_attention_heads must be a multiple of num_key_value_heads"
        )
    head_dim = _int(config_json, "head_dim", architecture.head_dim or hidden_size // num_heads)
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"config.json: head_dim {head_dim}; even sizes up to {MAX_HEAD_DIM} work")

    theta, scaling = _rope(config_json, max_positions)
    attention_bias = architecture.has_attention_bias_flag and _bool(config_json, "attention_bias")
    return ModelConfig(
        architecture=name,
        vocab_size=_int(config_json, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(config_json, "intermediate_size"),
        num_layers=_int(config_json, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_float(config_json, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=_bool(config_json, "tie_word_embeddings"),
        qkv_bias=attention_bias or architecture.has_qkv_bias,
        o_bias=attention_bias,
        mlp_bias=architecture.has_mlp_bias_flag and _bool(config_json, "mlp_bias"),
        qk_norm=architecture.has_qk_norm,
        dtype=_dtype(config_json),
    )


def _architecture_name(config_json: dict[str, Any]) -> str:
    """Return the registered name in `architectures`, or raise with the list of those that work."""
    names = config_json.get("architectures")
    works = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise ValueError(f"config.json: no `architectures`; these work: {works}")
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"config.json: architecture {names[0]} is not supported; use {works}")
    return str(names[0])


def _refuse_what_is_missing_here(
    config_json: dict[str, Any], name: str, architecture: Architecture
) -> None:
    """Raise ValueError for quantisation, an activation or an attention that we do not have."""
    for field in ("quantization_config", "compression_config"):
        if config_json.get(field):
            method = (
                config_json[field].get("quant_method", "unnamed")
                if isinstance(config_json[field], dict)
                else config_json[field]
            )
            raise ValueError(
                f"config.json: {field} ({method}) is not supported; use the checkpoint in "
                f"{', '.join(DTYPES)}"
            )
    activation = config_json.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act {activation} is not supported; use {', '.join(ACTIVATIONS)}"
        )
    if config_json.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor {config_json['partial_rotary_factor']} is not "
            "supported; only 1.0 (the whole head is rotated)"
        )
    others = sorted({str(t) for t in config_json.get("layer_types") or []} - {"full_attention"})
    if others:
        raise ValueError(
            f"config.json: layer_types {', '.join(others)}: only full_attention is supported"
        )
    if name.startswith("Qwen"):
        if _bool(config_json, "use_sliding_window"):
            raise ValueError("config.json: use_sliding_window true is not supported; only false")
        return
    window = config_json.get("sliding_window", architecture.sliding_window)
    limit = _int(config_json, "max_position_embeddings")
    # A window that no sequence can outgrow is full attention.
    if window is not None and window < limit:
        raise ValueError(
            f"config.json: sliding_window {window} (shorter than {limit} positions) is not "
            "supported; only null, or a window of max_position_embeddings and more"
        )


def _rope(config_json: dict[str, Any], max_positions: int) -> tuple[float, Llama3Rope | None]:
    """Return RoPE's base and its llama3 scaling, from either spelling."""
    new, old = config_json.get("rope_parameters"), config_json.get("rope_scaling")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: RoPE settings {rope!r} are not an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("config.json: rope_parameters differ between layers; not supported")
    theta = _float({**config_json, **rope}, "rope_theta", 10000.0)

    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"config.json: rope type {rope_type} is not supported; use {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor other than 1.0 is not supported")
    if rope_type == "default":
        return theta, None
    return theta, Llama3Rope(
        factor=_float(rope, "factor"),
        low_freq_factor=_float(rope, "low_freq_factor"),
        high_freq_factor=_float(rope, "high_freq_factor"),
        # Beside the RoPE settings it wins over the one inside them, as in transformers.
        original_max_position_embeddings=_int(
            {**rope, **_present(config_json, "original_max_position_embeddings")},
            "original_max_position_embeddings",
            max_positions,
        ),
    )


def _present(config_json: dict[str, Any], field: str) -> dict[str, Any]:
    """Return {field: value}, or nothing when the config leaves it out."""
    return {field: config_json[field]} if config_json.get(field) is not None else {}


def _dtype(config_json: dict[str, Any]) -> str:
    """Return the checkpoint's dtype; transformers 5 writes `dtype`, older ones `torch_dtype`."""
    dtype = config_json.get("dtype") or config_json.get("torch_dtype") or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"config.json: dtype {dtype} is not supported; use {', '.join(DTYPES)}")
    return dtype


def _int(config_json: dict[str, Any], field: str, default: Any = _REQUIRED) -> int:
    """Return a whole number of at least 1; null counts as left out."""
    value = config_json.get(field)
    value = default if value is None else value
    if value is _REQUIRED:
        raise ValueError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {field} {value!r}: must be a whole number of at least 1")
    return value


def _float(config_json: dict[str, Any], field: str, default: Any = _REQUIRED) -> float:
    """Return a positive number; null counts as left out."""
    value = config_json.get(field)
    value = default if value is None else value
    if value is _REQUIRED:
        raise ValueError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {field} {value!r}: must be a number above 0")
    return float(value)


def _bool(config_json: dict[str, Any], field: str) -> bool:
    """Return a flag; left out or null is false, as transformers has it for these families."""
    value = config_json.get(field)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json: {field} {value!r}: must be true or false")
    return bool(value)
