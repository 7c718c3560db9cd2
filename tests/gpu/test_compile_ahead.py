"""On a GPU the rehearsal beside the weights compiles all that the later stages launch."""

from __future__ import annotations

import importlib

import pytest
import triton
from kernel_cases import forget_compiled

from nanorunner.config import make_config
from nanorunner.resolve import resolve
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group

pytestmark = pytest.mark.limit(300)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(("runner", "module"), [("v1", "model_runner_v1"), ("v2", "model_runner")])
def test_no_stage_after_the_weights_compiles(
    runner: str, module: str, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "tiny-qwen3", "load_format": "dummy", "max_num_seqs": 24}
    chosen = {"runner": runner, "enforce_eager": enforce_eager, "gpu_memory_utilization": 0.2}
    config = resolve(make_config(settings | chosen)).runner_config
    device = Device("cuda", 0)
    group = Group(None, 0, 1, device.torch_device, 60)
    kind = importlib.import_module(f"nanorunner.workers.{module}").ModelRunner
    one = kind(config, 0, group, device)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda fn, **facts: compiled.append(fn.name)
    )
    try:
        forget_compiled()
        one.load_model()
        assert compiled
        compiled.clear()
        blocks = one.profile().num_blocks
        one.allocate_kv(min(blocks, 8))
        one.capture()
        assert compiled == []
    finally:
        one.close()
