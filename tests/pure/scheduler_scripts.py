"""What users may do to an engine, as hypothesis draws it; for schedulers of every kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import hypothesis.strategies as st
from fake_runner import VOCAB

from nanorunner.sampling_params import SamplingParams

# Few stems and multiples of the block sizes: prefixes are shared and edges are met.
prompts = st.builds(
    lambda stem, length, tail: [(stem + i) % VOCAB for i in range(length)] + tail,
    st.integers(0, 1),
    st.integers(0, 30),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
)


class Rig(Protocol):
    """An engine that checks itself at every step."""

    @property
    def asked(self) -> Mapping[int, object]:
        """Return all requests so far, by id."""

    def add(self, prompt: list[int], params: SamplingParams, is_quiet: bool) -> int | None:
        """Queue a request."""

    def step(self) -> None:
        """Make a step."""

    def cut(self, request_id: int, by_abort: bool) -> None:
        """End a request from outside."""

    def finish(self) -> None:
        """Step until all have ended, and check what each got."""


def scripts_of(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[object]]:
    """Return a strategy of scripts whose requests have such settings."""
    action = st.one_of(
        st.tuples(st.just("add"), prompts, params, st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 6), st.none()),
        st.tuples(st.sampled_from(["abort", "finish"]), st.integers(0, 50), st.none()),
    )
    return st.lists(action, min_size=8, max_size=60)


def play(rig: Rig, script: list[object]) -> None:
    """Do what the script says, and finish."""
    for action in script:
        match action:
            case ("add", list() as prompt, SamplingParams() as its_params, bool() as is_quiet):
                rig.add(prompt, its_params, is_quiet)
            case ("step", int() as count, None):
                for _ in range(count):
                    rig.step()
            case (("abort" | "finish") as how, int() as which, None) if rig.asked:
                ids = list(rig.asked)
                rig.cut(ids[which % len(ids)], by_abort=how == "abort")
    rig.finish()
