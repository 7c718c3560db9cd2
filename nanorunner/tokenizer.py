"""Text to token ids and back, from a Hugging Face folder.

llm.py and cli.py call load_tokenizer(); the engine sees ids only. A folder with tokenizer.json is
read by transformers' thin wrapper of the tokenizers library (import 0.6 s; AutoTokenizer takes 2 s
because it imports every model class); any other kind goes through AutoTokenizer. Code from a
checkpoint is never run: chat templates are rendered in transformers' sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Tokenizer:
    """A model's tokenizer together with the ids that end its text."""

    def __init__(self, backend: Any, eos_ids: frozenset[int]) -> None:
        """Wrap a transformers tokenizer; load_tokenizer makes one from a folder."""
        self._backend = backend
        self.eos_ids = eos_ids  # the tokenizer's own and all of generation_config.json
        self.bos_id: int | None = backend.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether chat_ids works."""
        return bool(self._backend.chat_template)

    def __len__(self) -> int:
        """Return how many ids the tokenizer knows, special ones included."""
        return len(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens spelled out in it become their ids.

        With add_special_tokens the model's own BOS is added, but never a second one: a prompt that
        was rendered by a chat template already starts with it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half a character (U+{ord(text[error.start]):04X}): a byte that is "
                "not UTF-8, or a cut emoji; write whole characters"
            ) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids` without any tidying of spaces; bad bytes become U+FFFD."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the assistant's answer begins.

        Raises ValueError when the model has no chat template, when there is no message, or when
        the template refuses the messages (its own words are in the error).
        """
        return self.encode(self.chat_text(messages), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Message]) -> str:
        """Return the conversation as the model's template writes it; errors as in chat_ids."""
        import jinja2

        if not self.has_chat_template:
            raise ValueError(
                "this model has no chat template, so it cannot chat: use generate() or --prompt "
                "with plain text, or name an instruct model"
            )
        check_messages(messages)
        try:
            text: str = self._backend.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return text


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what no chat template can render, before a template renders it as nonsense."""
    if not messages:
        raise ValueError("messages: empty; give at least one {'role': 'user', 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"messages[{index}] is {message!r}: use {{'role': 'user', 'content': 'text'}}"
            )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder; nothing is fetched from the network.

    Raises ValueError, naming the folder, when there is none or when it cannot be read.
    """
    folder = Path(folder)
    # Imported here: a run with skip_tokenizer_init needs no transformers.
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    try:
        backend = Loader.from_pretrained(str(folder), local_files_only=True)
    # transformers and tokenizers raise anything down to bare Exception for a damaged file.
    except Exception as error:
        raise ValueError(
            f"cannot read a tokenizer from {folder}: {error}; put tokenizer.json there, or give "
            "token ids and skip the tokenizer (skip_tokenizer_init)"
        ) from error
    own = [] if backend.eos_token_id is None else [backend.eos_token_id]
    return Tokenizer(backend, frozenset(own) | folder_eos_ids(folder))


def folder_eos_ids(folder: Path) -> frozenset[int]:
    """Return the EOS ids of a folder's generation_config.json, or of config.json if it has none."""
    contents: list[dict[str, Any]] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        contents.append(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})
    return configured_eos_ids(*contents)


def configured_eos_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any]
) -> frozenset[int]:
    """Return the EOS ids that a checkpoint's configs name: an int, a list, or nothing.

    generation_config.json alone decides where it speaks, as in transformers; config.json is often
    left over from the base model.
    """
    for content in (generation_config, config):
        ids = content.get("eos_token_id")
        if ids is not None:
            many: Iterable[int] = ids if isinstance(ids, list) else [ids]
            return frozenset(int(token_id) for token_id in many)
    return frozenset()
