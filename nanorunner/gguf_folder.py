"""Turn a GGUF file of the Llama family into an ordinary Hugging Face folder.

embedded_model.py calls write_folder() once per machine; from then on the model is a folder like any
other. Reading GGUF through transformers instead would cost 20 seconds at every start.

    GGUF metadata  -> config.json, generation_config.json, tokenizer.json, tokenizer_config.json
    GGUF tensors   -> model.safetensors, float16, Hugging Face's names and row order

Weights are stored as float16 and not bfloat16: SmolLM2's quantised values (4 bits times a float16
scale) come out with a relative error of 1.9e-4 against 1.35e-3, its logits within 0.035 against
0.22 of the unrounded ones, and the largest weight is 9.25. config.json still says bfloat16, the
dtype to compute in: the model was trained in it, and activations of 24,000 come near float16's end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

COMPUTE_DTYPE = "bfloat16"

# Every file that write_folder makes; a folder that lacks one is not complete.
FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONTROL_TOKEN = 3  # llama.cpp's token type for <|im_start|> and its like


class GgufError(ValueError):
    """The GGUF file holds something that this converter does not know."""


def write_folder(source: Path, folder: Path) -> None:
    """Write FOLDER_FILES of the GGUF file `source` into the existing, empty `folder`.

    Raises GgufError for another architecture, tokenizer or tensor than SmolLM2's kind; the folder
    may then hold some of the files.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    metadata: dict[str, Any] = {
        name: field.contents() for name, field in reader.fields.items() if field.types
    }
    has_lm_head = any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = make_config(metadata, has_lm_head)
    write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(metadata, folder)
    write_weights(reader.tensors, config, folder / "model.safetensors")


def make_config(metadata: dict[str, Any], has_lm_head: bool) -> dict[str, Any]:
    """Return config.json's content, spelled as in the checkpoints on the hub."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise GgufError(f"GGUF architecture {architecture!r}: this converter reads only 'llama'")
    num_heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest_float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest_float(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not has_lm_head,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": COMPUTE_DTYPE,
    }


def shortest_float(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included.

    llama.cpp's name "smollm" stands for: every digit alone, then GPT-2's byte-level pattern. That
    is also what SmolLM2's own tokenizer.json on the hub says.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise GgufError(f"GGUF tokenizer {kind}: this converter reads only ('gpt2', 'smollm')")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges: list[str] = metadata["tokenizer.ggml.merges"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]

    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{ours}_token": tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in named.items()
    }
    write_json(
        folder / "tokenizer_config.json",
        {
            # The class that takes tokenizer.json as it is; GPT2Tokenizer would bring its own rules.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def write_weights(tensors: list[Any], config: dict[str, Any], path: Path) -> None:
    """Dequantise every tensor, put q and k rows back in order, and write one safetensors file."""
    import gguf
    from safetensors.numpy import save_file

    weights: dict[str, npt.NDArray[np.float16]] = {}
    # disable=None: a bar on a terminal only.
    for tensor in tqdm(tensors, desc="converting the embedded model", disable=None):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = tensor_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = undo_row_permutation(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = undo_row_permutation(values, config["num_key_value_heads"])
        weights[name] = np.ascontiguousarray(values, dtype=np.float16)
        if not np.isfinite(weights[name]).all():
            raise GgufError(f"tensor {tensor.name}: a weight does not fit float16")
    save_file(weights, path, metadata={"format": "pt"})


def tensor_name(gguf_name: str) -> str:
    """Return Hugging Face's name: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    stem, _, suffix = gguf_name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, index, stem = stem.split(".", 2)
        layer = f"model.layers.{index}."
    if suffix != "weight" or stem not in TENSOR_NAMES:
        raise GgufError(f"tensor {gguf_name!r}: unknown name; this converter reads Llama only")
    return f"{layer}{TENSOR_NAMES[stem]}.weight"


def undo_row_permutation(
    weight: npt.NDArray[np.float32], num_heads: int
) -> npt.NDArray[np.float32]:
    """Return q or k rows [num_heads * head_dim, hidden] in Hugging Face's order.

    llama.cpp rotates neighbouring rows (0, 1), Hugging Face rows half a head apart (0, head_dim/2).
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    ordered = weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2)
    restored: npt.NDArray[np.float32] = ordered.reshape(rows, columns)
    return restored


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
