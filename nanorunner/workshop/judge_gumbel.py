"""Examines the Gumbel exercise: draws follow the softmax and depend on seed and place alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from nanorunner.kernels.sample import gumbel_argmax_reference
from nanorunner.workshop.code_exercises import Finding, Functions

ROWS, VOCAB = 32, 300
NUM_DRAWS = 4000
MOST_OFF = 0.03  # of a frequency over NUM_DRAWS draws: four standard deviations
TOLERANCE = 1e-4


class Batch(NamedTuple):
    """The arguments of gumbel_argmax, but for the offset."""

    logits: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def examine(functions: Functions) -> Iterator[Finding]:
    """Yield what holds of the learner's function."""
    draw = functions["gumbel_argmax"]
    batch = _batch()
    greedy = batch._replace(temperature=torch.zeros(ROWS))
    yield Finding("temperature 0 takes the largest logit", _problem(draw, greedy))
    equal = greedy._replace(logits=torch.zeros(ROWS, VOCAB))
    yield Finding("of equal logits the lowest id wins", _problem(draw, equal))
    yield Finding("draws follow the softmax", _frequency_problem(draw))
    yield Finding("temperature widens the choice as in the project", _problem(draw, batch))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    shuffled = Batch(*(tensor[order] for tensor in batch))
    yield Finding("a row's id does not depend on its place", _problem(draw, shuffled))
    yield Finding("the best of two shards is the best of the whole", _shard_problem(draw, batch))


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        logits=3 * torch.randn(ROWS, VOCAB, generator=generator),
        temperature=0.5 + torch.rand(ROWS, generator=generator),
        seed=torch.randint(2**62, (ROWS,), generator=generator),
        position=torch.randint(1000, (ROWS,), generator=generator),
    )


def _problem(draw: Callable[..., Any], batch: Batch) -> str:
    scores, ids = draw(*batch)
    own_scores, own_ids = gumbel_argmax_reference(*batch)
    if ids.tolist() != own_ids.tolist():
        row = int((ids != own_ids).nonzero()[0])
        return f"row {row}: id {int(ids[row])}, not {int(own_ids[row])}"
    off = float((scores - own_scores).abs().max())
    return "" if off < TOLERANCE else f"a score is off by {off:.2g}"


def _frequency_problem(draw: Callable[..., Any]) -> str:
    """Draw often from four tokens and compare with their probabilities."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(NUM_DRAWS, 1)
    seed = torch.full((NUM_DRAWS,), 5, dtype=torch.int64)
    _, ids = draw(logits, torch.ones(NUM_DRAWS), seed, torch.arange(NUM_DRAWS))
    frequency = torch.bincount(ids, minlength=4) / NUM_DRAWS
    wanted = logits[0].softmax(dim=-1)
    if float((frequency - wanted).abs().max()) < MOST_OFF:
        return ""
    got, expected = ([round(value, 2) for value in t.tolist()] for t in (frequency, wanted))
    return f"frequencies {got}, probabilities {expected}"


def _shard_problem(draw: Callable[..., Any], batch: Batch) -> str:
    half = VOCAB // 2
    _, whole = draw(*batch)
    rest = batch[1:]
    low_scores, low_ids = draw(batch.logits[:, :half], *rest, 0)
    high_scores, high_ids = draw(batch.logits[:, half:], *rest, half)
    best = torch.where(high_scores > low_scores, high_ids, low_ids)
    if best.tolist() == whole.tolist():
        return ""
    row = int((best != whole).nonzero()[0])
    return f"row {row}: the shards give id {int(best[row])}, the whole row {int(whole[row])}"
