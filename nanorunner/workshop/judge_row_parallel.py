"""Examines the row-parallel exercise: a layer and an embedding split over ranks, here threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.shards import even_shard
from nanorunner.workers.weights import dummy_reader, fill
from nanorunner.workshop.code_exercises import Finding, Functions
from nanorunner.workshop.sandbox_ranks import SandboxGroup, make_groups, run_ranks

TOY = "tiny-llama"  # its MLP has biases, and 176 columns, which 3 does not divide
TOLERANCE = 1e-5  # of sums of float32 in another order
ROWS = 5


def examine(functions: Functions) -> Iterator[Finding]:
    """Yield what holds of the learner's functions."""
    yield Finding("even_shard deals out what divides and what does not", _shard_problem(functions))
    torch.manual_seed(0)
    fields = load_preset(TOY)
    x = torch.randn(ROWS, fields["hidden_size"])
    ids = torch.tensor([0, fields["vocab_size"] - 1, 7, 500, 501])
    whole = _run(Decoder.mlp, 1, x)[0][0]
    rows = _run(Decoder.embed_tokens, 1, ids)[0][0]
    for tp in (1, 2, 3):
        shares, groups = _run(functions["mlp"], tp, x)
        problem = _problem(shares, [whole.shape] * tp) or _off(sum(shares), whole)
        if not problem and any(group.num_all_reduces for group in groups):
            problem = "mlp made an all-reduce; forward() makes it, together with the next norm"
        yield Finding(f"tp {tp}: the ranks' shares add up to the whole MLP's output", problem)
    for tp in (1, 2, 3):
        outputs, groups = _run(functions["embed_tokens"], tp, ids)
        problem = _problem(outputs, [rows.shape] * tp)
        problem = problem or next(filter(None, (_off(output, rows) for output in outputs)), "")
        most = max(group.num_all_reduces for group in groups)
        if not problem and most > 1:
            problem = f"a rank made {most} all-reduces; one is enough"
        yield Finding(f"tp {tp}: every rank gets every token's embedding", problem)


def _shard_problem(functions: Functions) -> str:
    for size in (1, 5, 64, 176, 1003):
        for tp in range(1, 8):
            for rank in range(tp):
                mine, own = functions["even_shard"](size, tp, rank), even_shard(size, tp, rank)
                if mine != own:
                    return f"even_shard({size}, {tp}, {rank}) should be {own}, not {mine}"
    return ""


def _run(
    function: Callable[..., Any], tp: int, x: torch.Tensor
) -> tuple[list[Any], list[SandboxGroup]]:
    """Return what each rank's function returns, and the groups in which they met.

    mlp takes layer 0 and x, embed_tokens takes ids.
    """
    model = parse(load_preset(TOY))
    groups = make_groups(tp)
    read = dummy_reader(model, 0, torch.float32, torch.device("cpu"))

    def run(rank: int) -> Any:
        decoder = Decoder(
            model,
            tp=tp,
            rank=rank,
            dtype=torch.float32,
            device=torch.device("cpu"),
            group=groups[rank],
        )
        fill(decoder, read)
        inputs = [decoder.layers[0]] if x.is_floating_point() else []
        return function(decoder, *inputs, x.clone())

    return run_ranks(tp, run), groups


def _problem(outputs: list[Any], shapes: list[torch.Size]) -> str:
    for rank, (mine, shape) in enumerate(zip(outputs, shapes, strict=True)):
        if not isinstance(mine, torch.Tensor):
            return f"rank {rank} returned a {type(mine).__name__} instead of a tensor"
        if mine.shape != shape:
            return f"rank {rank} returned {list(mine.shape)} instead of {list(shape)}"
    return ""


def _off(mine: Any, whole: torch.Tensor) -> str:
    if torch.allclose(mine, whole, atol=TOLERANCE, rtol=0):
        return ""
    return f"off by up to {float((mine - whole).abs().max()):.2g}"
