"""Gluon where it exists: Triton's lower level, in which a kernel places its warps and bytes itself.

It serves where one kind of GPU has instructions that plain Triton does not use well. What is
written in it has a twin in plain Triton for every other GPU, for the interpreter, and for a Triton
without it. Names that moved between Triton 3.6 and 3.9 have one name here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nanorunner.kernels.triton_support import MissingKernel, is_compiling_only

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # one thread asks the memory engine for a tile; before Triton 3.8 it had the longer name
    load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
except (ImportError, AttributeError):  # no Triton, or one whose Gluon is another: has_gluon()
    gluon = gl = mbarrier = TensorDescriptor = load_tile = None
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = None

# The decorator of what the compiler itself calls, for a layout; nothing does so without Gluon.
constexpr_function: Callable[[Any], Any] = (
    functools.cache if gluon is None else gluon.constexpr_function
)

__all__ = [
    "TensorDescriptor",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "gluon_jit",
    "has_gluon",
    "load_tile",
    "mbarrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def has_gluon() -> bool:
    """Return whether this Triton has what the kernels in Gluon are written in."""
    return gl is not None


def gluon_jit(counts: tuple[str, ...] = (), tables: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Return the decorator of a kernel in Gluon; counts and tables as in triton_support.jit()."""
    if gluon is None:
        return lambda function: MissingKernel(function.__name__)
    return functools.partial(
        _kernel_type(), do_not_specialize=list(counts), do_not_specialize_on_alignment=list(tables)
    )


@functools.cache
def _kernel_type() -> Any:
    """Return Gluon's kernel type, whose launches heed compiling_only()."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    class Kernel(GluonJITFunction):  # type: ignore[misc]  # Triton has no types
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return functools.partial(self.run, grid=grid, warmup=is_compiling_only())

    return Kernel
