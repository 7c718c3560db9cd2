"""Token ids to text while they arrive: whole characters only, and nothing after a stop string.

llm.py and cli.py feed each request's new ids into its Detokenizer and show what comes back.

    ids     .... 1204  88  17 | 9021  173 |            window = ids since a character border
    text    shown ........... | held ......|
                                 ^ an unfinished character (decodes to U+FFFD), or
                                   text that may turn out to be the start of a stop string

The chunks joined are the one-shot decode of all ids, cut before the first stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to

# Ids after which the window starts anew. Decoding costs by the window's length; restarting costs
# one more decode. 16 keeps both near their least.
WINDOW_TOKENS = 16


class Decoder(Protocol):
    """The part of a Tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""


class Detokenizer:
    """One request's text. It ends with a stop string found, or with an update that says so."""

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        streaming: bool = True,
    ) -> None:
        """Start an empty text.

        stop: strings before the first of which the text ends. One that is complete before
        min_tokens ids have come is ignored and stays in the text.
        streaming: False says that only the last update's text is wanted; without stop strings the
        ids are then decoded once instead of one by one.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._decode_at_end = not streaming and not self._stop

        self._window: list[int] = []  # ids since a character border
        self._window_text = ""  # the text of the window's ids up to the last character border
        self._border = 0  # how many of the window's ids that text covers
        self._text = ""  # all decoded text, held part included
        self._num_shown = 0  # characters of _text already returned

        self.num_tokens = 0  # ids taken; after a stop string, up to the one that completed it
        self.stop_string: str | None = None  # the one that ended the text

    @property
    def text(self) -> str:
        """All text returned so far."""
        return self._text[: self._num_shown]

    def update(self, new_ids: Sequence[int], finish_reason: str | None = None) -> str:
        """Take ids and return the new text that is safe to show.

        finish_reason "stop" means that the last id is an ending token: it counts as a token, but
        its text is left out. Any finish_reason releases what was held. Once stop_string is set,
        later ids are ignored, and num_tokens says how many of the request's ids to keep.
        """
        num_text_ids = max(0, len(new_ids) - (finish_reason == "stop"))
        num_stepped = num_text_ids
        if self._decode_at_end:
            self._window += new_ids[:num_text_ids]
            self.num_tokens += num_text_ids
            num_stepped = 0
        for token_id in new_ids[:num_stepped]:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            self._take(self._decode_one(token_id))
        if self.stop_string is None and finish_reason is not None:
            self._take(self._flush())
            if self.stop_string is None:
                self.num_tokens += len(new_ids) - num_text_ids
        is_over = self.stop_string is not None or finish_reason is not None
        return self._show(len(self._text) - (0 if is_over else self._num_held()))

    def _decode_one(self, token_id: int) -> str:
        """Add one id to the window and return the whole characters that it completes."""
        self._window.append(token_id)
        if self._decode_at_end:
            return ""
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        if text.endswith(REPLACEMENT) or not text.startswith(self._window_text):
            return ""
        new = text[len(self._window_text) :]
        if len(self._window) > WINDOW_TOKENS:
            # Keep the ids since the previous border: a decoder may treat a text's first id in a way
            # of its own (SentencePiece drops its space), so a window never starts with a new one.
            recent = self._window[self._border :]
            recent_text = self._tokenizer.decode(recent, self._skip_special_tokens)
            if recent_text:  # empty for special tokens: the next id would be the first after all
                self._window, text = recent, recent_text
        self._window_text = text
        self._border = len(self._window)
        return new

    def _flush(self) -> str:
        """Return the text of an unfinished character, now that nothing more will come."""
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        new = text[len(self._window_text) :]
        self._window_text = text
        return new

    def _take(self, new: str) -> None:
        """Append decoded text, and cut it where a stop string that this text completes begins."""
        old_len = len(self._text)
        self._text += new
        if not (self._stop and new) or self.num_tokens < self._min_tokens:
            return
        # The first to be complete wins, and of those the longest, so that the same text ends at the
        # same place however it was cut into tokens.
        start_from = max(0, old_len - self._longest_stop + 1)
        found: list[tuple[int, int, str]] = []
        for stop in self._stop:
            begin = self._text.find(stop, max(start_from, old_len - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if found:
            _, begin, self.stop_string = min(found)
            self._text = self._text[:begin]

    def _num_held(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        return max((overlap(self._text, stop) for stop in self._stop), default=0)

    def _show(self, end: int) -> str:
        """Return the text from what was shown up to `end`."""
        chunk = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return chunk


def overlap(text: str, stop: str) -> int:
    """Return the longest proper start of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
