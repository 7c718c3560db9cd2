"""Make a tiny random model: an ordinary Hugging Face folder in a second, for tests and lessons.

Its weights are drawn so that every part matters: biases and norms are random too, and the logits
are spread widely enough that the greedy choice is clear. scripts/make_toy_model.py is the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")  # ids 0, 1, 2, as the tiny presets have them
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_toy_model(
    folder: str | Path,
    fields: dict[str, Any],
    *,
    seed: int = 0,
    has_tokenizer: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Write config, random weights and perhaps a byte tokenizer to `folder`, and return it.

    fields: those of a config.json, as load_preset() gives them; max_shard_size as in
    save_pretrained ("50KB" makes several shards and an index). Raises ValueError when the
    vocabulary is too small for the tokenizer.
    """
    # Imported here: transformers takes seconds, and only these two lines need it.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab_size = fields["vocab_size"]
    if has_tokenizer and vocab_size < len(SPECIAL_TOKENS) + BYTE_TOKENS:
        raise ValueError(
            f"vocab_size {vocab_size}: a byte tokenizer needs {len(SPECIAL_TOKENS) + BYTE_TOKENS}"
        )
    folder = Path(folder)
    settings = {k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
    config = AutoConfig.for_model(fields["model_type"], **settings)
    dtype = getattr(torch, fields.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.2 * noise
            elif noise.dim() == 1:
                value = 0.2 * noise
            else:
                value = noise * noise.shape[1] ** -0.5
            parameter.copy_(value)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if has_tokenizer:
        _save_byte_tokenizer(folder)
    return folder


def _save_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token a byte, so that any text survives encode and decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
