"""From a rank's arrays of log-probabilities to the dicts that vLLM's users know.

    TokenLogprobs (arrays, m tokens) -> m x {id: Logprob}, the token itself first

Made once, when a request has finished: a step only keeps the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nanorunner.workers.messages import TokenLogprobs


class Decoder(Protocol):
    """The part of a Tokenizer that is needed here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""


@dataclass(frozen=True)
class Logprob:
    """One id in one place."""

    logprob: float  # of the model's raw logits, before every sampling setting
    rank: int  # 1 is the likeliest
    decoded_token: str | None = None  # its text alone; None without a tokenizer


class LogprobReader:
    """Reads the arrays of one request."""

    def __init__(self, tokenizer: Decoder | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def read(self, parts: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
        """Return a dict for every token of `parts`, in order."""
        dicts = []
        for part in parts:
            rows = zip(
                part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist(), strict=True
            )
            dicts += [self._dict(ids, values, rank) for ids, values, rank in rows]
        return dicts

    def _dict(self, ids: list[int], values: list[float], rank: int) -> dict[int, Logprob]:
        """Return one place's dict; a token that is among the likeliest keeps its place there."""
        found = {ids[0]: Logprob(values[0], rank, self._text(ids[0]))}
        for place, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1):
            found[token_id] = Logprob(value, place, self._text(token_id))
        return found

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._texts[token_id]
