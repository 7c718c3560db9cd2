"""How long the GPU really works on each step of runner v1: CUDA events, and no gaps between them.

    with BusyClock(runner) as clock:
        ...                    steps
    clock.seconds()            of each step: from its forward's first kernel to its sampler's last

v1 launches a step piece by piece, so events around it would also count the time in which the GPU
waits for the next launch. A spin kernel in front, longer than the launching takes, lets everything
queue up behind it. The step is late for that; what the GPU has to do in it stays the same. The
copies of the step's inputs, a few microseconds, are not counted.
"""

from __future__ import annotations

from typing import Any

import torch

from nanorunner.workers.model_runner_v1 import Inputs, ModelRunner

# At 2 GHz 2 ms and 30 ms: launching takes v1 well under 1 ms for a replay, and for an eager step
# some 400 launches.
DECODE_SPIN_CYCLES, EAGER_SPIN_CYCLES = 4_000_000, 60_000_000


class BusyClock:
    """Times every step of a runner that samples, while the block is open."""

    def __init__(self, runner: ModelRunner) -> None:
        self.num_uncovered = 0  # steps that were still being launched when their spin ended
        self._runner = runner
        self._run_model, self._sampler = runner.run_model, runner.sampler
        self._begin: Any = None  # of the step that is being launched
        self._steps: list[tuple[Any, Any]] = []

    def __enter__(self) -> BusyClock:
        self._runner.run_model = self._spin_and_run_model  # type: ignore[method-assign]
        self._runner.sampler = self._sample_and_stop  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run_model = self._run_model  # type: ignore[method-assign]
        self._runner.sampler = self._sampler

    def seconds(self) -> list[float]:
        """Return each step's GPU seconds, in the order of the steps; waits for the device."""
        self._runner.device.finish(self._runner.config.step_timeout_s)
        return [begin.elapsed_time(end) / 1000 for begin, end in self._steps]

    def _spin_and_run_model(self, inputs: Inputs, is_prefill: bool) -> torch.Tensor | None:
        cycles = EAGER_SPIN_CYCLES if is_prefill else DECODE_SPIN_CYCLES
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        self._begin = torch.Event("cuda", enable_timing=True)
        self._begin.record()
        return self._run_model(inputs, is_prefill)

    def _sample_and_stop(self, logits: torch.Tensor, **settings: torch.Tensor) -> torch.Tensor:
        ids = self._sampler(logits, **settings)
        end = torch.Event("cuda", enable_timing=True)
        end.record()
        self.num_uncovered += self._begin.query()
        self._steps.append((self._begin, end))
        return ids
