"""SamplingParams takes what users write and refuses the rest in words."""

from __future__ import annotations

from typing import Any

import pytest

from nanorunner.sampling_params import SamplingParams


def test_stops_may_be_given_in_any_usual_form() -> None:
    assert SamplingParams(stop="x").stop == ("x",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=[3]) == SamplingParams(stop_token_ids=(3,))  # type: ignore[arg-type]


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
    ],
)
def test_what_no_sampler_can_do_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**given)
