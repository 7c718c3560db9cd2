"""Compile every Triton kernel to GPU machine code on a machine without a GPU; a JSON line each.

Triton's compiler and assembler need no GPU, only a target. Each public launcher is called on CPU
tensors, and what it would launch is compiled instead. The interpreter forgives much that the
compiler refuses, and tells nothing of registers that spill.

    PYTHONPATH=.:tests/cpu python tests/cpu/compile_kernels.py 90
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from fused_decode_cases import fused_case
from kernel_cases import attention_case, normal, rope_arguments
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.decode_attention import MAX_SEQ_LENS, decode_attention, plan_decode
from nanorunner.kernels.fused_decode import fused_decode_triton, plan_fused
from nanorunner.kernels.hopper_prefill import hopper_prefill_attention
from nanorunner.kernels.lm_head_sample import lm_head_sample_triton
from nanorunner.kernels.peer_all_reduce import (
    all_reduce_add_rms_norm,
    all_reduce_max,
    all_reduce_one_shot,
    all_reduce_two_shot,
)
from nanorunner.kernels.peer_ring import DEFAULT_CAPACITY, PeerRing, make_table
from nanorunner.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write_triton
from nanorunner.kernels.sample import gumbel_argmax_triton
from nanorunner.kernels.sample_keys import sample_keys_triton
from nanorunner.kernels.silu_mul import silu_mul_triton

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
H200_PROCESSORS = 132
LABEL = re.compile(r"\s*(\.L_\w+):")  # in nvdisasm's text
BRANCH = re.compile(r"BRA.*`\((\.L_\w+)\)")
OTHER_S = 200.0  # of the other process, when this one has done its half


def compile_instead(
    capability: int,
    *,
    use_pdl: bool = False,
    describe: Callable[[str], dict[str, Any]] = lambda ptx: {},
) -> None:
    """Make every Triton launch compile for a capability (90: Hopper), print a line and not run.

    use_pdl: as a GPU that can would launch them. describe: what else to print of a kernel's PTX.
    """

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = list(self.arg_names)
        if use_pdl and "USE_PDL" in names:
            kwargs["USE_PDL"] = True
        options = {name: value for name, value in kwargs.items() if name not in names}
        values = dict(zip(names, args, strict=False)) | {n: kwargs[n] for n in names if n in kwargs}
        signature, constants, attributes = {}, {}, {}
        kind = GluonASTSource if self.is_gluon() else ASTSource
        for i, param in enumerate(self.params):
            value = values[param.name]
            aligned = False
            if param.is_constexpr:
                signature[param.name] = "constexpr"
                constants[(i,)] = value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = POINTERS[value.dtype]
                aligned = not param.do_not_specialize_on_alignment
            elif isinstance(value, TensorDescriptor):
                tile = f"{POINTERS[value.base.dtype][1:]}{value.block_shape}"
                signature[param.name] = f"tensordesc<{tile},{value.layout!r}>"
            elif isinstance(value, float):
                signature[param.name] = "fp32"
            else:
                signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
                aligned = value % 16 == 0 and not param.do_not_specialize
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = kind(self, signature, constants, attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        line = {"name": self.fn.__name__, "shared": kernel.metadata.shared}
        registers, spilled = resources(kernel.asm["cubin"])
        line |= {"registers": registers, "spilled": spilled} | describe(kernel.asm["ptx"])
        if self.is_gluon():  # two groups, keys with a mask and without
            line["spilled_in_loops"] = spills_in_loops(kernel.asm["cubin"], 4)
        if self.fn.__name__ == "_best_of_tile":
            line |= {"instructions": num_instructions(kernel.asm["cubin"]), "tile": kwargs["TILE"]}
        # One write a line, also where Python does not buffer: two processes print.
        print(json.dumps(line) + "\n", end="", flush=True)

    JITFunction.run = run


def resources(cubin: bytes) -> tuple[int, int]:
    """Return a thread's registers and its bytes of stack, which hold the registers that spill."""
    text = _read_with("cuobjdump", "-res-usage", cubin)
    registers, stack = re.findall(r"REG:(\d+)", text), re.findall(r"STACK:(\d+)", text)
    return max(map(int, registers)), max(map(int, stack))


def num_instructions(cubin: bytes) -> int:
    """Return how many instructions a kernel has, each branch counted once."""
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", _read_with("nvdisasm", "-c", cubin), re.M))


def spills_in_loops(cubin: bytes, num_loops: int) -> list[int]:
    """Return how often each of the shortest loops with matrix instructions touches the stack.

    Longer ones are loops around them, or waits that nvdisasm shows far behind what they lead to.
    """
    lines = _read_with("nvdisasm", "-c", cubin).splitlines()
    places = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    loops = [
        lines[places[match[1]] : i]
        for i, line in enumerate(lines)
        if (match := BRANCH.search(line)) and places.get(match[1], i) < i
    ]
    with_matrix = sorted((x for x in loops if any("HGMMA" in line for line in x)), key=len)
    return [sum("STL" in x or "LDL" in x for x in loop) for loop in with_matrix[:num_loops]]


def _read_with(tool: str, flag: str, cubin: bytes) -> str:
    """Return what one of the programs beside Triton says of a compiled kernel."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), flag, file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout


def describe(ptx: str) -> dict[str, object]:
    """Return how often a kernel waits for the one in front, and what it does before."""
    before, *parts = ptx.split("griddepcontrol.wait")
    return {
        "waits": len(parts),
        "loads_before": len(re.findall(r"\bld\.global", before)),
        "fresh_loads_before": before.count("ld.global.cg"),
        "stores_before": len(re.findall(r"\bst\.global|\batom\.|\bred\.", before)),
        "is_late": "griddepcontrol.launch_dependents" not in before,
    }


def launch_all(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Call every launcher once for each of its plans."""
    hidden, weight = normal(2, 1024, dtype=dtype), normal(1024, dtype=dtype)
    rms_norm_triton(hidden, weight, 1e-6)
    add_rms_norm_triton(hidden, hidden.clone(), weight, 1e-6)
    silu_mul_triton(normal(2, 6144, dtype=dtype))
    for num_tokens in (2, 300):
        qk_norm_rope_kv_write_triton(**rope_arguments(heads, num_tokens, dtype, has_norm=True))
    case = attention_case([(1, 9), (1, 9)], heads, dtype)
    sizes = (*heads, dtype.itemsize, H200_PROCESSORS)
    batches = list(product((1, 16, 64, 128, 256), MAX_SEQ_LENS))
    for plan in sorted({plan_decode(num_reqs, *sizes, longest) for num_reqs, longest in batches}):
        for waits_last in (False, True):
            decode_attention(
                case.q, case.k_cache, case.v_cache, case.batch, case.scale, plan,
                reads_early=True, waits_last=waits_last,
            )  # fmt: skip
    fused = fused_case([9, 9], heads, dtype)
    cases = product((1, 8, 32, 48, 64), (False, True))
    for plan in sorted({plan_fused(n, *sizes, is_even=is_even) for n, is_even in cases}):
        fused_decode_triton(**fused.arguments, plan=plan)
    for requests in ([(1, 9)], [(500, 500)]):
        case = attention_case(requests, heads, dtype, padded_requests=1)
        paged_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale, "triton")
    for others in ((32, 8, 128), (28, 4, 128)) if dtype.itemsize == 2 else ():
        case = attention_case([(500, 500)], others, dtype, padded_requests=1)
        hopper_prefill_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    logits = normal(2, 5000, dtype=dtype)
    gumbel_argmax_triton(logits, torch.ones(2), torch.arange(2), torch.arange(2))
    table = (torch.arange(2), torch.arange(2), torch.ones(2), torch.arange(2))
    sample_keys_triton(logits, *table)
    # one row of float32 spills, and nobody serves it
    for rows in (1, 2, 16) if dtype.itemsize == 2 else (2,):
        head = normal(5000, 1024, dtype=dtype)
        table = (torch.zeros(rows).int(), torch.arange(rows), torch.ones(1), torch.zeros(1).long())
        lm_head_sample_triton(normal(rows, 1024, dtype=dtype), head, *table, 0, 5000)


def launch_peers(ranks: int, dtype: torch.dtype) -> None:
    """Call every all-reduce over peer memory once, as one of so many ranks."""
    ring = PeerRing(
        rank=1,
        ranks=ranks,
        capacity=DEFAULT_CAPACITY,
        max_programs=H200_PROCESSORS,
        table=make_table([0] * ranks, 0, 0, torch.device("cpu")),
    )
    x = normal(2, 4096, dtype=dtype)
    all_reduce_one_shot(x, ring)
    all_reduce_two_shot(x, ring)
    all_reduce_add_rms_norm(x, x, x[0], 1e-6, ring)
    all_reduce_max(torch.zeros(8, dtype=torch.int64), ring)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    capability = int(sys.argv[1])
    compile_instead(capability, use_pdl=capability >= 90, describe=describe)
    # two processes, of which the other ends with this one: compiling keeps a core busy
    context = multiprocessing.get_context("fork")
    other = context.Process(target=launch_all, args=((16, 8, 128), torch.bfloat16), daemon=True)
    other.start()
    launch_all((9, 3, 64), torch.float32)
    launch_peers(8, torch.bfloat16)
    other.join(OTHER_S)
    sys.exit(1 if other.exitcode is None else other.exitcode)
