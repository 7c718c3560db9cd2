"""Rehearse launches for a Hopper GPU on a machine without one, and print what was compiled when.

A driver of nothing stands for the GPU: it names the target and takes the machine code.

    PYTHONPATH=.:tests/cpu python tests/cpu/compile_on_threads.py
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from kernel_cases import attention_case
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nanorunner.kernels.compile_ahead import compile_ahead
from nanorunner.kernels.hopper_prefill import hopper_prefill_attention
from nanorunner.kernels.rms_norm import rms_norm_triton
from nanorunner.kernels.silu_mul import silu_mul_triton


class NoDevice:
    """What Triton asks of a driver."""

    def __init__(self) -> None:
        self.utils = self
        self.launched: list[str] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, *others: object) -> tuple[int, ...]:
        return (1, 1, 0, 0, 1024)

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append(source.name)


def main() -> None:
    compiled: list[str] = []
    device = NoDevice()
    driver.set_active(device)
    triton.knobs.runtime.jit_post_compile_hook = lambda fn, **facts: compiled.append(fn.name)
    case = attention_case([(300, 300)], (16, 8, 128), torch.bfloat16)
    x, gain = torch.empty(2, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)

    def launch() -> None:
        rms_norm_triton(x, gain, 1e-6)
        silu_mul_triton(x)
        hopper_prefill_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)

    with compile_ahead(torch.device("cpu"), num_threads=2, timeout_s=60.0) as compilers:
        with compilers.rehearsal():
            launch()
            launch()
        asked = len(compilers.futures)
    rehearsed, launched = sorted(compiled), list(device.launched)
    launch()
    result = {
        "asked": asked,
        "rehearsed": [name.split(".")[-1] for name in rehearsed],
        "launched_meanwhile": launched,
        "compiled_later": len(compiled) - len(rehearsed),
        "launched_later": len(device.launched),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
