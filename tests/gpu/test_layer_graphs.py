"""Captured layers on a GPU give a step that a prompt joins what eager launches give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from body_graphs import Steps, request

from nanorunner.workers.full_sampling import FullSampling

pytestmark = pytest.mark.limit(300)

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def listen(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return, growing, the hidden states that each eager head multiplies."""
    heard: list[torch.Tensor] = []
    logits = steps.runner.model.compute_logits

    def compute_logits(x: torch.Tensor) -> torch.Tensor:
        heard.append(x.float())
        return logits(x)

    monkeypatch.setattr(steps.runner.model, "compute_logits", compute_logits)
    return heard


@pytest.mark.parametrize("dtype", TOLERANCE)
@torch.inference_mode()
def test_steps_that_prompts_join_equal_eager_ones_behind_other_rows(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt's last hidden state; buffers are poisoned between the steps."""
    settings: dict[str, Any] = {"dtype": dtype, "on": "cuda"}
    eager = Steps(has_graphs=False, enforce_eager=True, **settings)
    captured = Steps(has_graphs=False, **settings)
    layers = captured.runner.graphs.layers
    assert layers is not None
    lists = [listen(steps, monkeypatch) for steps in (eager, captured)]
    lengths = (3, 70, 126, 200, 130, 30)
    for index, length in enumerate(lengths):
        for buffer in (layers.residual, layers.attended, layers.qkv, layers.hidden):
            buffer.fill_(float("nan"))
        layers.input_ids.fill_(index)
        prompt = [(5 * index + 3 * i) % 50 for i in range(length)]
        new = request(index, prompt, FullSampling(temperature=0.0))
        batch = [(other, 1) for other in range(index)]
        for steps in (eager, captured):
            steps.run(*batch, (index, length), new=(new,))
    torch.cuda.synchronize()
    assert len(lists[0]) == len(lists[1]) == len(lengths)
    for theirs, ours in zip(*lists, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    names = captured.runner.graphs.dispatched
    assert sum(n for name, n in names.items() if name.startswith("layers")) == len(lengths), names
    assert not any(name.startswith("layers") for name in eager.runner.graphs.dispatched)


def test_a_step_gives_the_same_again_whatever_ran_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of other sizes share its graphs' memory; decodes run between."""
    steps = Steps(has_graphs=False, on="cuda", dtype="bfloat16")
    heard = listen(steps, monkeypatch)
    lengths, turns = (100, 40, 250), 6
    gone: tuple[int, ...] = ()
    for _ in range(turns):
        for index, length in enumerate(lengths):
            new = request(index, [i % 40 for i in range(length)], FullSampling(seed=3))
            steps.run((index, length), new=(new,), removed=gone)
            steps.run((index, 1))  # a decode, by its graph
            gone = (index,)
    assert len(heard) == turns * len(lengths)
    for index in range(len(lengths)):
        first, *again = heard[index :: len(lengths)]
        assert all(torch.equal(hidden, first) for hidden in again)
    names = steps.runner.graphs.dispatched
    assert sum(n for name, n in names.items() if name.startswith("layers")) == len(heard), names
