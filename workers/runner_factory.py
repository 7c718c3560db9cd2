"""Which runner a rank builds: the one place where a runner's name becomes a class."""

from __future__ import annotations

from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import Runner, RunnerConfig
from nanorunner.workers.model_runner import ModelRunner
from nanorunner.workers.model_runner_v1 import ModelRunner as ModelRunnerV1


def make_runner(config: RunnerConfig, rank: int, group: Group) -> Runner:
    """Return this rank's runner, with nothing loaded yet."""
    device = Device(config.device, config.gpu_of(rank))
    runner: ModelRunnerV1 | ModelRunner
    if config.runner == "v1":
        runner = ModelRunnerV1(config, rank, group, device)
    elif config.runner == "v2":
        runner = ModelRunner(config, rank, group, device)
    else:
        raise ValueError(f"runner {config.runner!r}: use v1 or v2")
    if runner.check is not None:
        # an attribute in front of the method, so that a step without the check has no branch more
        runner.step = runner.check.watched(runner.step)  # type: ignore[assignment, method-assign]
    return runner
