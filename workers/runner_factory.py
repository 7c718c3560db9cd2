"""Which runner a rank builds: the one place where a runner's name becomes a class."""

from __future__ import annotations

from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import Runner, RunnerConfig
from nanorunner.workers.model_runner import ModelRunner
from nanorunner.workers.model_runner_v1 import ModelRunner as ModelRunnerV1


def make_runner(config: RunnerConfig, rank: int, group: Group) -> Runner:
    """Return this rank's runner, with nothing loaded yet."""
    device = Device(config.device, rank)
    if config.runner == "v1":
        return ModelRunnerV1(config, rank, group, device)
    if config.runner == "v2":
        return ModelRunner(config, rank, group, device)
    raise ValueError(f"runner {config.runner!r}: use v1 or v2")
