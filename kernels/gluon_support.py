"""Gluon where it exists: Triton's lower level, in which a kernel places its warps and bytes itself.

It serves where one kind of GPU has instructions that plain Triton does not use well. What is
written in it has a twin in plain Triton for every other GPU, for the interpreter, and for a Triton
without it. Names that moved between Triton 3.6 and 3.9 have one name here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nanorunner.kernels.triton_support import MissingKernel, kernel_type

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # one thread asks the memory engine for a tile; Triton 3.6 has the longer name
    load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    # the decorator of what the compiler itself calls, for a layout
    constexpr_function: Callable[[Any], Any] = gluon.constexpr_function
except (ImportError, AttributeError):  # no Triton, or one whose Gluon is another: has_gluon()
    gl = mbarrier = TensorDescriptor = GluonJITFunction = load_tile = None
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = None
    constexpr_function = functools.cache  # of what nobody will call

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
    if not has_gluon():
        return lambda function: MissingKernel(function.__name__)
    return functools.partial(
        kernel_type(GluonJITFunction),
        do_not_specialize=list(counts),
        do_not_specialize_on_alignment=list(tables),
    )
