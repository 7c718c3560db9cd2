"""Triton where it exists, and a clear refusal where it does not.

Triton has wheels for Linux alone, yet every kernel file here must import on a laptop: its PyTorch
reference runs there. So the kernel files take `tl` and `jit` from this one place. Without Triton,
`jit` returns an object that raises ImportError when it is launched, never when it is defined.

Under TRITON_INTERPRET=1 (set before Triton is first imported) the kernels run on CPU tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = [
    "IS_INTERPRETED",
    "MissingKernel",
    "compiling_only",
    "constant",
    "is_compiling_only",
    "jit",
    "kernel_type",
    "next_power_of_two",
    "num_processors",
    "shared_bytes",
    "tl",
    "triton",
]


def constant(value: Any) -> Any:
    """Return a number of a module in the form in which its kernels may read it."""
    return value if tl is None else tl.constexpr(value)


# For the few lines that the interpreter cannot run: instructions written in PTX.
IS_INTERPRETED = constant(triton is not None and triton.knobs.runtime.interpret)

_compiles_only: ContextVar[bool] = ContextVar("_compiles_only", default=False)  # in this thread


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, this thread's launches of kernels made by jit() compile them and run nothing."""
    token = _compiles_only.set(True)
    try:
        yield
    finally:
        _compiles_only.reset(token)


def is_compiling_only() -> bool:
    """Return whether this thread is inside compiling_only()."""
    return _compiles_only.get()


class MissingKernel:
    """Stands where a Triton kernel would, on a machine without Triton."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        """Raise ImportError: the launch syntax kernel[grid](...) starts here."""
        raise ImportError(f"{self.name} needs Triton (Linux only); use the attention backend torch")


def jit(counts: tuple[str, ...] = (), tables: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Return the decorator of a Triton kernel that a changing batch never recompiles.

    Triton compiles anew when an integer becomes 1 or a multiple of 16 and when a pointer stops
    being 16-byte aligned: a stall of seconds in the middle of serving. `counts` names the integer
    arguments that change from step to step, `tables` the small tensors that may be views into one
    packed input buffer.
    """
    if triton is None:
        return lambda function: MissingKernel(function.__name__)
    make = triton.jit if triton.knobs.runtime.interpret else kernel_type(triton.JITFunction)
    return functools.partial(
        make, do_not_specialize=list(counts), do_not_specialize_on_alignment=list(tables)
    )


@functools.cache
def kernel_type(base: Any) -> Any:
    """Return a subclass of Triton's or Gluon's kernel type; its launches heed compiling_only()."""

    class Kernel(base):  # type: ignore[misc]  # Triton has no types
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return functools.partial(self.run, grid=grid, warmup=_compiles_only.get())

    return Kernel


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n (n >= 1): Triton's ranges need one."""
    return 1 << (n - 1).bit_length()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return how many programs a device truly runs at once; the interpreter counts as 4."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that one program may have; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack the field
    return int(properties.shared_memory_per_block_optin)
