"""What the ranks are told of speculation: the method, and a draft model that fits the target.

Config, the target's ModelConfig -> Speculation, and a line of the start log
"""

from __future__ import annotations

from nanorunner.config import Config
from nanorunner.model_source import ModelSource, resolve_model
from nanorunner.speculative import DRAFT, NGRAM, OFF, ngram_lengths, num_tokens
from nanorunner.workers.architectures import parse
from nanorunner.workers.checkpoint import check_checkpoint
from nanorunner.workers.messages import Speculation
from nanorunner.workers.model_config import ModelConfig


def resolve_speculation(config: Config, model: ModelConfig, notes: list[str]) -> Speculation | None:
    """Return what the ranks are told, None without speculation; ValueError when it cannot work."""
    if config.speculative == OFF:
        return None
    count = num_tokens(config)
    adapt = "turned down by itself where it loses" if config.speculative_adaptive else "always"
    if config.speculative == NGRAM:
        shortest, longest = ngram_lengths(config)
        notes.append(
            f"speculation: {count} drafts a step from the request's own tokens (suffixes of "
            f"{longest} down to {shortest}); {adapt}"
        )
        return Speculation(NGRAM, count, shortest, longest)
    assert config.draft_model is not None, "checked before"
    source = resolve_model(config.draft_model, config.load_format)
    draft = parse(source.config_json)
    _check_draft(config, model, draft, source)
    notes.append(f"speculation: {count} drafts a step from {source.name} on every rank; {adapt}")
    return Speculation(
        DRAFT,
        count,
        draft=draft,
        checkpoint="" if source.load_format == "dummy" else source.folder,
        load_format=source.load_format,
    )


def _check_draft(
    config: Config, model: ModelConfig, draft: ModelConfig, source: ModelSource
) -> None:
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"draft_model {config.draft_model}: its vocabulary has {draft.vocab_size} ids, the "
            f"model's has {model.vocab_size}; use a small model of the same tokenizer"
        )
    assert config.max_model_len is not None, "the length is resolved before the draft model"
    if draft.max_position_embeddings < config.max_model_len:
        raise ValueError(
            f"draft_model {config.draft_model}: its positions end at "
            f"{draft.max_position_embeddings}; use --max-model-len "
            f"{draft.max_position_embeddings} or less"
        )
    if source.load_format == "safetensors":
        check_checkpoint(source.folder, draft)
