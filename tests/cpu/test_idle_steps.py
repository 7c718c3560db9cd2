"""What runs before the first request has launched every kind of projection that serving will.

The decoders have no memory (device meta); the table is the H200's own.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanorunner.kernels import medium_rows_plans
from nanorunner.presets import load_preset
from nanorunner.workers import idle_steps
from nanorunner.workers.architectures import parse
from nanorunner.workers.cuda_graphs import MAX_VERIFY_PLACES, capture_sizes
from nanorunner.workers.models.decoder import Decoder

pytestmark = pytest.mark.beside


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_rows_plans, "can_tile", lambda weight: True)
    monkeypatch.setattr(medium_rows_plans, "gpu_name", lambda device: "nvidia-h200")


def decoder(tp: int = 1) -> Decoder:
    """Return one layer of Qwen3-0.6B, a rank's share, as it would be on a GPU."""
    model = replace(parse(load_preset("qwen3-0.6b")), num_layers=1)
    one = Decoder(
        model,
        tp=tp,
        rank=0,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        group=None,  # type: ignore[arg-type]  # nothing runs
        attention_backend="triton",
        max_model_len=1024,
    )
    one.has_few_rows = True
    one.max_medium_rows = one._max_medium_rows()
    return one


Pass = tuple[Decoder, tuple[Any, ...]]


class Steps:
    """Stands where steps would run, and notes which kernels their projections are."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_verified = 0
        self.launched: set[Pass] = set()

    def note(self, rows: int, num_leaders: int, *, is_after_plain: bool) -> None:
        """Note the passes of an eager step."""
        self._add(self._runner.model, rows)
        draft = self._runner.proposer.decoder
        if draft is not None and not self._runner.has_graphs:
            self._add(draft, 2 * num_leaders)
            if not is_after_plain:
                self._add(draft, num_leaders)

    def note_graphs(self) -> None:
        """Note what captures launch of the target."""
        for size in capture_sizes(self._runner.config.max_num_seqs):
            self._add(self._runner.model, size)
            if size * self._runner.config.max_query_len <= MAX_VERIFY_PLACES:
                self._add(self._runner.model, size * self._runner.config.max_query_len)

    def idle_step(self, _: Any, num_reqs: int, query_len: int, *, is_decode: bool) -> None:
        if query_len == 1:
            self.note(num_reqs, num_reqs, is_after_plain=True)

    def verify_nothing(
        self, _: Any, num_reqs: int, num_chunks: int = 0, *, is_decode: bool
    ) -> None:
        assert num_reqs + num_chunks <= self._runner.config.max_num_seqs
        rows = num_reqs * self._runner.config.max_query_len + num_chunks
        self.num_verified += 1
        if not is_decode:
            self.note(rows, num_reqs + num_chunks, is_after_plain=False)

    def _add(self, model: Decoder, rows: int) -> None:
        self.launched.add((model, model.compiled_for(rows)))


def rehearsed(
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    query_len: int,
    *,
    has_graphs: bool,
    draft: Decoder | None = None,
    tp: int = 1,
) -> tuple[Any, Steps]:
    """Return a runner without a device after its warm-up, and the steps of that."""
    config = SimpleNamespace(
        max_num_seqs=max_num_seqs,
        max_query_len=query_len,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    runner = SimpleNamespace(
        config=config,
        model=decoder(tp),
        has_graphs=has_graphs,
        proposer=SimpleNamespace(decoder=draft),
        states=SimpleNamespace(touch=lambda: None),
        writer=SimpleNamespace(apply=lambda: None),
    )
    steps = Steps(runner)
    monkeypatch.setattr(idle_steps, "idle_step", steps.idle_step)
    monkeypatch.setattr(idle_steps, "verify_nothing", steps.verify_nothing)
    monkeypatch.setattr(idle_steps, "_exercise", lambda *args, **options: None)
    idle_steps.warm_up(runner)  # type: ignore[arg-type]
    return runner, steps


def served(runner: Any, query_len: int) -> set[Pass]:
    """Return the passes of all eager steps of one token a place."""
    steps = Steps(runner)
    most = runner.config.max_num_seqs
    for num_reqs in range(most + 1):
        for num_chunks in range(most + 1 - num_reqs):
            leaders = num_reqs + num_chunks
            if leaders:
                rows = num_reqs * query_len + num_chunks
                steps.note(rows, leaders, is_after_plain=num_reqs == 0)
    return steps.launched


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("max_num_seqs", "query_len"), [(8, 5), (8, 8), (16, 8), (3, 12), (40, 2), (64, 5)]
)
def test_a_step_that_verifies_launches_what_was_rehearsed(
    max_num_seqs: int, query_len: int, tp: int, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, steps = rehearsed(monkeypatch, max_num_seqs, query_len, has_graphs=has_graphs, tp=tp)
    if has_graphs:
        steps.note_graphs()
    assert len(steps.launched) > 1
    assert served(runner, query_len) <= steps.launched


@pytest.mark.parametrize(("max_num_seqs", "query_len"), [(8, 5), (16, 8), (24, 2)])
def test_so_do_the_passes_of_a_draft_model(
    max_num_seqs: int, query_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = decoder()
    runner, steps = rehearsed(
        monkeypatch, max_num_seqs, query_len, has_graphs=False, draft=draft, tp=2
    )
    assert served(runner, query_len) <= steps.launched


def test_row_counts_of_the_same_kernels_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = rehearsed(monkeypatch, 64, 5, has_graphs=False)
    assert steps.num_verified <= 2 + 9, "two of a single request, and one an entry at the most"
    _, steps = rehearsed(monkeypatch, 64, 1, has_graphs=False)
    assert steps.num_verified == 0
