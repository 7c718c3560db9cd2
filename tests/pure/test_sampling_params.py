"""SamplingParams takes what users write and refuses the rest in words."""

from __future__ import annotations

from typing import Any

import pytest

from nanorunner.sampling_params import SamplingParams


def test_stops_may_be_given_in_any_usual_form() -> None:
    assert SamplingParams(stop="x").stop == ("x",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=[3]) == SamplingParams(stop_token_ids=(3,))  # type: ignore[arg-type]


def test_biases_ids_and_words_may_be_given_as_json_writes_them() -> None:
    given: Any = {"logit_bias": {"5": -100}, "allowed_token_ids": [1], "bad_words": ["x", [1, 2]]}
    params = SamplingParams(**given)
    assert params.logit_bias == {5: -100}
    assert params.allowed_token_ids == (1,)
    assert params.bad_words == ("x", (1, 2))
    assert SamplingParams(bad_words="x").bad_words == ("x",)  # type: ignore[arg-type]
    none: Any = dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words"))
    assert SamplingParams(**none) == SamplingParams()
    assert hash(params) == hash(SamplingParams(**given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -1.0}, "temperature -1.0: use 0"),
        ({"temperature": "hot"}, "temperature 'hot': is str, use float"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -2}, "top_k -2"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"max_tokens": 0}, "max_tokens 0: use 1 or more"),
        ({"max_tokens": 1.5}, "max_tokens 1.5: is float, use int"),
        ({"max_tokens": True}, "max_tokens True: is bool, use int"),
        ({"min_tokens": 65}, r"min_tokens 65: use 0 to max_tokens \(64\)"),
        ({"stop": ("",)}, "empty string"),
        ({"stop": 5}, "stop 5: is int"),
        ({"stop": ("x",), "detokenize": False}, "detokenize=True"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids"),
        ({"seed": 2**64}, "64-bit"),
        ({"n": 0}, "n 0: use 1 or more"),
        ({"n": 2, "temperature": 0}, "n 2: with temperature 0"),
        ({"min_p": 1.5}, "min_p 1.5: use 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty 3.0: use -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty nan"),
        ({"logit_bias": {1: 101}}, "logit_bias of id 1: 101"),
        ({"logit_bias": {"x": 1}}, "logit_bias .*: is dict, use a dict of id: number"),
        ({"logit_bias": [1]}, "logit_bias .*: is list"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: id -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids: an empty list allows nothing"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids .*: is tuple, use tuple"),
        ({"bad_words": [""]}, "bad_words: an empty word"),
        ({"bad_words": [[]]}, "bad_words: an empty word"),
        ({"bad_words": [5]}, "bad_words .*: is tuple, use a list of strings"),
        ({"bad_words": 5}, "bad_words 5: is int"),
        ({"logprobs": -2}, "logprobs -2: use 0 or more, or -1"),
        ({"logprobs": True}, "logprobs True: is bool"),
    ],
)
def test_what_no_sampler_can_do_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**given)
