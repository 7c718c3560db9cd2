"""Write a GGUF file of SmolLM2's kind (same quantisation, tokenizer, metadata), 2 layers small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "\u0120 the", "1 2"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(path: Path, **changes: Any) -> Path:
    """Write the file and return its path; changes: architecture=, pre=, extra_tensor=."""
    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in MERGES]
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in tiny_tensors(len(tokens)).items():
        add_tensor(writer, name, values)
    if "extra_tensor" in changes:
        add_tensor(writer, changes["extra_tensor"], np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(vocab_size: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return random tensors by their GGUF names, each [rows, columns] or [hidden]."""
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab_size, HIDDEN),
        "output_norm": (HIDDEN,),
    }
    kv_rows = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv_rows, HIDDEN),
            f"blk.{layer}.attn_v": (kv_rows, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INTERMEDIATE),
        }
    return {
        f"{name}.weight": generator.normal(0.0, 0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def add_tensor(writer: Any, name: str, values: npt.NDArray[np.float32]) -> None:
    """Add a tensor in the type that SmolLM2's file has for it."""
    kind = gguf.GGMLQuantizationType.Q4_1
    if name.startswith("token_embd"):
        kind = gguf.GGMLQuantizationType.Q8_0
    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
