"""Bad words that are text, as the ids that a tokenizer spells them with.

A word inside a sentence is spelt with the space before it, so both spellings are banned. Where the
second ends with the first (a tokenizer of bytes), the first alone bans both.
"""

from __future__ import annotations

from dataclasses import replace

from nanorunner.sampling_params import SamplingParams
from nanorunner.tokenizer import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return params whose bad words are ids alone; ValueError for text without a tokenizer."""
    texts = [word for word in params.bad_words if isinstance(word, str)]
    if not texts:
        return params
    if tokenizer is None:
        raise ValueError(
            f"bad_words {texts[0]!r}: text needs a tokenizer, and there is none; give its ids"
        )
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        words += [word] if isinstance(word, tuple) else _spellings(word, tokenizer)
    return replace(params, bad_words=tuple(dict.fromkeys(words)))


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    bare = word.lstrip()
    if not bare:
        raise ValueError(f"bad_words {word!r}: give more than spaces, or the ids")
    plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]
