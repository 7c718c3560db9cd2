"""The shape of a model: what nanorunner reads out of a Hugging Face config.json.

Pure Python, no torch: rank 0 checks a model before any process starts, and hands this to every
rank. Anything that the three families here do not have is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of one number, by its dtype's name


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3's RoPE scaling: long wavelengths are stretched, short ones left alone."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama, Qwen2 or Qwen3 family, for the whole model (no rank's share)."""

    architecture: str  # LlamaForCausalLM | MistralForCausalLM | Qwen2ForCausalLM | Qwen3ForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool  # Qwen2; Llama with attention_bias
    o_bias: bool  # Llama with attention_bias
    mlp_bias: bool  # Llama with mlp_bias
    qk_norm: bool  # Qwen3: RMSNorm over each query and key head
    dtype: str  # the checkpoint's: float32 | bfloat16 | float16
