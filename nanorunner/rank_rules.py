"""--check-ranks and --share-gpu: what each rules out, and why there are no CUDA graphs with it.

Config -> check_rank_rules     what no model and no machine could serve
-> why_eager            resolve.py turns graphs off, and says so in the log
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanorunner.config import Config


def check_rank_rules(config: Config) -> None:
    """Refuse, by ValueError, what cannot go with the two settings."""
    if config.check_ranks:
        _check_check_ranks(config)
    if config.share_gpu:
        _check_share_gpu(config)


def why_eager(config: Config) -> str:
    """Return why there can be no CUDA graphs, "" when there can."""
    if config.check_ranks:
        return "--check-ranks looks between a step's kernels, and a replay has no between"
    if config.share_gpu:
        return "--share-gpu sums in host memory, where no graph gets to"
    return ""


def _check_check_ranks(config: Config) -> None:
    if config.tp == 1:
        raise ValueError(
            "check_ranks: at tp 1 there is no other rank to compare with; use --tp 2 or more, or "
            "leave it out"
        )
    for name in ("step_times", "trace"):
        value = getattr(config, name)
        if value:
            raise ValueError(
                f"check_ranks with {name} {value}: the times would be those of the comparison; "
                f"give one of them"
            )
    if config.speculative == "draft":
        raise ValueError(
            "check_ranks with speculative draft: the draft model's weights would not be compared; "
            "use --speculative ngram or off"
        )


def _check_share_gpu(config: Config) -> None:
    if config.tp == 1:
        raise ValueError(
            "share_gpu: at tp 1 there is no other rank to share with; use --tp 2 or more, or leave "
            "it out"
        )
    if config.device == "cpu":
        raise ValueError(
            "share_gpu: needs an NVIDIA GPU; ranks on a CPU share it anyway, so leave it out"
        )
    if config.all_reduce != "auto":
        raise ValueError(
            f"all_reduce {config.all_reduce}: needs a GPU of its own for each rank; with share_gpu "
            f"use auto, which is gloo there"
        )
