"""The real runner, in which rank 1 is made wrong, as the variable PLANT says.

    shard     after loading, two KV heads of layer 1 are swapped
    drift N   from the N-th step on a weight of layer 1's second norm is another one
    final N   the same of the final norm

Without the variable it is the real runner.
"""

from __future__ import annotations

import os
from typing import Any

from nanorunner.workers import runner_factory
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import Runner, RunnerConfig
from nanorunner.workshop.fault_runner import swap_kv_heads

LAYER = 1
VICTIM = 1


def make_runner(config: RunnerConfig, rank: int, group: Group) -> Runner:
    """Return the runner of a rank."""
    runner: Any = runner_factory.make_runner(config, rank, group)
    kind, _, amount = os.environ.get("PLANT", "").partition(" ")
    if rank == VICTIM and kind == "shard":
        load_model = runner.load_model

        def load_wrongly() -> None:
            load_model()
            swap_kv_heads(runner.model, LAYER)

        runner.load_model = load_wrongly
    if rank == VICTIM and kind in ("drift", "final"):
        step, num_steps = runner.step, 0

        def drift(wire: tuple[Any, ...]) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == int(amount):
                model = runner.model
                norm = model.norm if kind == "final" else model.layers[LAYER].post_norm
                norm[0] *= 1.5
            return step(wire)

        runner.step = drift
    planted: Runner = runner
    return planted
