"""Text comes in whole characters, its chunks join to the one-shot decode, and it ends in time.

The tokenizers are real ones, small: a byte-level one (every byte an id, so that every character
beyond ASCII is cut apart) and one of SentencePiece's kind (a word's id holds its space).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from nanorunner.detokenizer import REPLACEMENT, WINDOW_TOKENS, Detokenizer, overlap

pytestmark = pytest.mark.beside

END = "<end>"


class SmallTokenizer:
    """The decode of nanorunner's Tokenizer, over a tokenizers object made here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens([AddedToken(END, special=True)])
        self.tokenizer = tokenizer
        self.end_id: int = tokenizer.get_vocab()[END]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def byte_level() -> SmallTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return SmallTokenizer(tokenizer)


def word_level() -> SmallTokenizer:
    text = ["the", "sea", "is", "calm", "and", "so", "are", "we"]
    words = ["\u2581" + word for word in text]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return SmallTokenizer(tokenizer)


BYTES = byte_level()
WORDS = word_level()
MIXED = "caf\u00e9 \u4f60\u597d \U0001f600\U0001f468\u200d\U0001f469 the end"


def chunks_of(detokenizer: Detokenizer, ids: Sequence[int], finish: str = "length") -> list[str]:
    """Feed one id an update, as a stream does."""
    return [*(detokenizer.update([token_id]) for token_id in ids), detokenizer.update([], finish)]


def test_an_unfinished_character_is_held() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.update([i]) for i in BYTES.encode("\U0001f600")] == [
        "",
        "",
        "",
        "\U0001f600",
    ]


@given(st.text(), st.integers(1, 7))
@settings(max_examples=200)
def test_joined_chunks_are_the_one_shot_decode(text: str, size: int) -> None:
    ids = BYTES.encode(text)
    detokenizer = Detokenizer(BYTES)
    chunks = [detokenizer.update(ids[i : i + size]) for i in range(0, len(ids), size)]
    chunks.append(detokenizer.update([], "length"))
    assert "".join(chunks) == BYTES.decode(ids) == text == detokenizer.text
    assert REPLACEMENT in text or not any(REPLACEMENT in chunk for chunk in chunks)


@given(st.lists(st.integers(0, 255)))
@settings(max_examples=200)
def test_bytes_that_are_no_text_also_join_to_the_one_shot_decode(ids: list[int]) -> None:
    assert "".join(chunks_of(Detokenizer(BYTES), ids)) == BYTES.decode(ids)


@given(st.lists(st.integers(0, 8), max_size=5 * WINDOW_TOKENS))
@settings(max_examples=200)
def test_a_decoder_that_drops_the_first_space_keeps_all_others(ids: list[int]) -> None:
    # Id 8 is the special token, whose text is left out.
    assert "".join(chunks_of(Detokenizer(WORDS), ids)) == WORDS.decode(ids)


def test_special_tokens_alone_do_not_cost_the_next_word_its_space() -> None:
    ids = [0, *[WORDS.end_id] * 3 * WINDOW_TOKENS, 1, 2]
    assert "".join(chunks_of(Detokenizer(WORDS), ids)) == "the sea is"


def test_what_is_held_comes_out_at_the_end() -> None:
    ids = BYTES.encode("\u4f60")[:2]
    assert chunks_of(Detokenizer(BYTES), ids) == ["", "", BYTES.decode(ids)]


def test_a_text_not_streamed_is_decoded_once() -> None:
    detokenizer = Detokenizer(BYTES, streaming=False)
    ids = BYTES.encode(MIXED)
    assert {detokenizer.update([token_id]) for token_id in ids[:-1]} == {""}
    assert detokenizer.update(ids[-1:], "length") == MIXED == detokenizer.text
    assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_ending_token_counts_but_is_not_text(streaming: bool) -> None:
    for end_id in (BYTES.end_id, BYTES.encode("!")[0]):  # a special one and an ordinary one
        detokenizer = Detokenizer(BYTES, skip_special_tokens=False, streaming=streaming)
        detokenizer.update([*BYTES.encode("yes"), end_id], "stop")
        assert detokenizer.text == "yes"
        assert detokenizer.num_tokens == 4


def test_a_stop_string_is_found_across_token_borders() -> None:
    detokenizer = Detokenizer(BYTES, stop=["END"])
    assert chunks_of(detokenizer, BYTES.encode("the END of"))[:8] == [*"the ", "", "", "", ""]
    assert detokenizer.text == "the "
    assert detokenizer.stop_string == "END"
    assert detokenizer.num_tokens == 7  # the ids up to the one that completed it


def test_a_stop_string_inside_one_update_cuts_the_rest_off() -> None:
    detokenizer = Detokenizer(BYTES, stop=["\n\n"])
    assert detokenizer.update(BYTES.encode("a\n\nb\n\n"), "length") == "a"
    assert detokenizer.num_tokens == 3
    assert detokenizer.update(BYTES.encode("c")) == ""


def test_text_that_turns_out_not_to_be_a_stop_string_is_released() -> None:
    detokenizer = Detokenizer(BYTES, stop=["abc"])
    assert chunks_of(detokenizer, BYTES.encode("ababd")) == ["", "", "ab", "", "abd", ""]
    detokenizer = Detokenizer(BYTES, stop=["abc"])
    assert chunks_of(detokenizer, BYTES.encode("xab")) == ["x", "", "", "ab"]


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    stop = "\u4f60\u597d!"
    detokenizer = Detokenizer(BYTES, stop=[stop])
    shown = chunks_of(detokenizer, BYTES.encode(f"say {stop} now"))
    assert "".join(shown) == "say "


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300)
def test_the_same_text_ends_at_the_same_place_however_it_is_cut(text: str, stop: list[str]) -> None:
    ids = BYTES.encode(text)
    singly, at_once = Detokenizer(BYTES, stop=stop), Detokenizer(BYTES, stop=stop)
    assert "".join(chunks_of(singly, ids)) == at_once.update(ids, "length")
    assert singly.stop_string == at_once.stop_string
    assert singly.num_tokens == at_once.num_tokens
    ends = [text.find(string) + len(string) for string in stop if string in text]
    if ends:
        assert singly.num_tokens == min(ends)
        assert text[: min(ends)].startswith(singly.text)
    else:
        assert singly.text == text


def test_a_stop_string_is_ignored_until_min_tokens() -> None:
    detokenizer = Detokenizer(BYTES, stop=["\n"], min_tokens=4)
    chunks_of(detokenizer, BYTES.encode("a\nbc\nd"))
    assert detokenizer.text == "a\nbc"
    assert detokenizer.num_tokens == 5


def test_a_stop_string_completed_by_the_last_of_min_tokens_counts() -> None:
    detokenizer = Detokenizer(BYTES, stop=["bc"], min_tokens=3)
    chunks_of(detokenizer, BYTES.encode("abcd"))
    assert detokenizer.text == "a"


def test_a_stop_string_before_the_ending_token_wins() -> None:
    detokenizer = Detokenizer(BYTES, stop=["s"])
    detokenizer.update([*BYTES.encode("yes"), BYTES.end_id], "stop")
    assert (detokenizer.text, detokenizer.num_tokens) == ("ye", 3)


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("ab", "abc", 2), ("abc", "abc", 0), ("xa", "aab", 1), ("aa", "aab", 2), ("", "a", 0)],
)
def test_overlap_is_the_longest_proper_start(text: str, stop: str, length: int) -> None:
    assert overlap(text, stop) == length
