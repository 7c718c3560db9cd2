"""What the sampler refuses, and in which words; needs no torch."""

from __future__ import annotations

from typing import Any

import pytest

from nanorunner.workers.full_sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    FullSampling,
    Need,
    check_full_sampling,
)

VOCAB = 5000
TOO_MANY = tuple(range(2000))

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.5}, "min_p 1.5: use 0"),
    ({"min_p": float("nan")}, "min_p nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty 0.0: use a positive number"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty inf"),
    ({"presence_penalty": 3.0}, "presence_penalty 3.0: use -2 to 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty nan"),
    ({"min_tokens": -1}, "min_tokens -1"),
    ({"logit_bias": tuple((i, 1.0) for i in TOO_MANY)}, f"2000 ids; the limit is {MAX_BIASES}"),
    ({"logit_bias": ((1, 2.0), (1, 3.0))}, "stands there twice"),
    ({"logit_bias": ((VOCAB, 1.0),)}, "id 5000: the vocabulary has 0 to 4999"),
    ({"logit_bias": ((1, float("inf")),)}, "logit_bias of id 1: inf: use -100 to 100"),
    ({"allowed_token_ids": TOO_MANY}, "allowed_token_ids: 2000 ids; the limit is 1024"),
    ({"allowed_token_ids": (-1,)}, "allowed_token_ids: id -1"),
    ({"stop_ids": TOO_MANY}, "2000 ids; the limit is 128"),
    ({"bad_words": ((1,),) * 129}, f"129 words; the limit is {MAX_BAD_WORDS}"),
    ({"bad_words": (TOO_MANY,)}, f"the limit is {MAX_BAD_WORD_TOKENS}"),
    ({"bad_words": ((1,), ())}, "an empty word bans nothing"),
    ({"bad_words": ((VOCAB,),)}, "bad_words: id 5000"),
    ({"logprobs": VOCAB + 1}, "logprobs 5001: use 0 to 5000"),
    ({"prompt_logprobs": -2}, "prompt_logprobs -2"),
    (
        {"allowed_token_ids": (4, 9), "bad_words": ((4,),), "min_tokens": 1, "stop_ids": (9,)},
        "ban all 2 of them; allow one more id",
    ),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_a_setting_beyond_its_limit_is_refused_by_name(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_full_sampling(FullSampling()._replace(**settings), VOCAB)


def test_bans_that_leave_no_id_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="they ban all 3 ids; leave one"):
        check_full_sampling(FullSampling(bad_words=((0,), (1,), (2,))), 3)


def test_settings_at_their_limits_are_taken() -> None:
    check_full_sampling(FullSampling(), VOCAB)
    check_full_sampling(
        FullSampling(
            min_p=1.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=tuple((i, 100.0) for i in range(MAX_BIASES)),
            allowed_token_ids=(4, 9),
            bad_words=((4, 4),),
            min_tokens=5,
            stop_ids=(9,),
            logprobs=VOCAB,
            prompt_logprobs=0,
        ),
        VOCAB,
    )


@pytest.mark.parametrize(
    ("sampling", "needs"),
    [
        (FullSampling(), Need(0)),
        (FullSampling(top_k=-1), Need(0)),
        (FullSampling(top_k=1), Need.TOP_K_TOP_P),
        (FullSampling(temperature=0, top_k=5, top_p=0.5, min_p=0.5), Need(0)),
        (FullSampling(min_tokens=5), Need(0)),  # with no stop id there is nothing to hold back
        (FullSampling(stop_ids=(1,)), Need(0)),
        (FullSampling(frequency_penalty=-0.5), Need.PENALTIES),
        (FullSampling(logprobs=0, prompt_logprobs=0), Need.LOGPROBS | Need.PROMPT_LOGPROBS),
    ],
)
def test_a_row_needs_only_the_stages_that_change_something(
    sampling: FullSampling, needs: Need
) -> None:
    assert sampling.needs(1e-10) == needs
