"""The sides of a comparison: who they are and which command measures each.

v1, v2                    nanorunner's runners
v2:async_depth=1,dtype=float32    one of them with settings of its own, after a colon
vllm, hf                  peers, where they are installed (hf is transformers' generate)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from nanorunner.bench.points import Settings, flags_of
from nanorunner.config import CHOICES
from nanorunner.did_you_mean import did_you_mean
from nanorunner.sampling_params import SamplingParams

RUNNERS = CHOICES["runner"]
PEERS = {"vllm": "vllm", "hf": "transformers"}  # name -> the package that it needs
# What a peer is not given: it may mean another thing there, or be no part of its generate.
OURS_ALONE = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of those that are compared."""

    label: str  # as given
    name: str
    own: Settings  # settings that this side alone has

    @property
    def is_peer(self) -> bool:
        """Whether it is another engine."""
        return self.name in PEERS

    def missing(self) -> str:
        """Return the package that this side lacks here, "" when it can run."""
        package = PEERS.get(self.name, "")
        return "" if not package or importlib.util.find_spec(package) else package

    def command(self, flags: Sequence[str], known: Sequence[str], out: Path) -> list[str]:
        """Return the command that measures this side with `throughput`'s flags.

        known: that command's long flags. Raises ValueError for an own setting that is none.
        """
        ending = [*flags, *flags_of(self.own, known), "--keep-ids", "--quiet", "--out", str(out)]
        if self.is_peer:
            return ["python", "-m", "nanorunner.bench.peer", self.name, *ending]
        start = ["python", "-m", "nanorunner", "bench", "throughput"]
        return [*start, "--runner", self.name, *ending]


def parse_sides(texts: Sequence[str]) -> list[Side]:
    """Return the sides that a person named; ValueError for an unknown one or a repeated one."""
    sides = [_parse(text) for text in texts]
    if len(sides) < 2:
        raise ValueError(f"compare {' '.join(texts)}: name two sides or more, such as v1 v2")
    for index, side in enumerate(sides):
        if any(side.label == other.label for other in sides[:index]):
            raise ValueError(f"side {side.label!r}: given twice")
    if sides[0].is_peer:
        raise ValueError(f"side {sides[0].label!r}: the first one is what others are measured by")
    return sides


def check_peer_sampling(name: str, params: SamplingParams) -> None:
    """Raise ValueError, naming the flag, for a way of sampling that a peer would not get."""
    plain = SamplingParams()
    for field in OURS_ALONE:
        if getattr(params, field) != getattr(plain, field):
            raise ValueError(
                f"--{field.replace('_', '-')} {getattr(params, field)}: side {name} is not given "
                f"it; leave out the flag, or the side"
            )


def _parse(text: str) -> Side:
    name, colon, words = text.partition(":")
    if name not in (*RUNNERS, *PEERS):
        raise ValueError(f"side {name!r}; {did_you_mean(name, (*RUNNERS, *PEERS))}")
    if colon and name in PEERS:
        raise ValueError(f"side {text!r}: a peer has no settings of its own here")
    own: Settings = {}
    for word in words.split(",") if colon else []:
        setting, separator, value = word.partition("=")
        if not separator or not setting:
            raise ValueError(f"side {text!r}: write {name}:SETTING=VALUE,SETTING=VALUE")
        own[setting.replace("-", "_")] = yaml.safe_load(value)
    if "runner" in own:
        raise ValueError(f"side {text!r}: the side is the runner; name {own['runner']} itself")
    return Side(label=text, name=name, own=own)
