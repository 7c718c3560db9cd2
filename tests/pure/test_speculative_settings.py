"""Speculative settings that no model and no machine could serve are refused with the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nanorunner.config import make_config
from nanorunner.speculative import ngram_lengths, num_tokens

NGRAM = {"speculative": "ngram"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative": "eagle3"}, ["an EAGLE-3 head cannot be loaded", "use ngram or draft"]),
        ({"speculative": "mtp"}, ["multi-token-prediction"]),
        ({"speculative": "n-gram"}, ["'n-gram'", "off or ngram or draft"]),
        ({"speculative": "draft"}, ["--draft-model"]),
        ({**NGRAM, "draft_model": "x"}, ["only with --speculative draft"]),
        ({"num_speculative_tokens": 3}, ["nothing is speculated", "--speculative ngram"]),
        ({"ngram_max": 3}, ["only with --speculative ngram"]),
        ({**NGRAM, "num_speculative_tokens": 0}, ["use 1 to 15"]),
        ({**NGRAM, "num_speculative_tokens": 16}, ["use 1 to 15"]),
        ({**NGRAM, "ngram_min": 5, "ngram_max": 4}, ["ngram_min <= ngram_max"]),
        ({**NGRAM, "ngram_max": 17}, ["<= 16"]),
        ({**NGRAM, "runner": "v1"}, ["--runner v2"]),
        ({**NGRAM, "max_num_batched_tokens": 2047}, ["2048", "max_num_seqs"]),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as refused:
        make_config(settings)
    for word in words:
        assert word in str(refused.value)


def test_one_length_alone_moves_the_other() -> None:
    assert ngram_lengths(make_config({**NGRAM, "ngram_max": 1})) == (1, 1)
    assert ngram_lengths(make_config({**NGRAM, "ngram_min": 6})) == (6, 6)
    assert ngram_lengths(make_config(NGRAM)) == (2, 4)


def test_without_speculation_there_are_no_drafts() -> None:
    assert num_tokens(make_config({})) == 0
    assert num_tokens(make_config({**NGRAM, "num_speculative_tokens": 5})) == 5
