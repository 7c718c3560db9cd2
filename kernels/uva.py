"""Pinned host memory as a CUDA tensor: kernels read and write it over the bus, at one address.

A table of all prompts (rows x model length) can be gigabytes, of which a step reads a few KB: it
need not lie in GPU memory. The CPU must not touch it while kernels may: a kernel's write is seen
after the stream has passed it, and there is no event for a read that a kernel does.

Some systems cannot do this (no pinned memory on some WSL2 set-ups), and in confidential-computing
mode such reads return garbage without an error. So ask uva_problem() at start, once; what to do
then, such as keeping the table in GPU memory, is the caller's choice and the caller's log line.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

TYPE_NAMES = {torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}
PROBE_ELEMENTS = 4096
PROBE_TIMEOUT_S = 30.0  # the first launch of a process may load its kernels


class UvaUnavailable(RuntimeError):
    """This system does not let kernels address pinned host memory."""


class _HostMemory:
    """Hands torch an address through the CUDA array interface and keeps the memory alive."""

    def __init__(self, host: torch.Tensor, address: int) -> None:
        self.host = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(host.shape),
            "typestr": TYPE_NAMES[host.dtype],
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def uva_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zero-filled pinned host memory as a tensor of `device`; int32, int64 or float32.

    The tensor owns the memory; let go of it only when no kernel that uses it is under way, for the
    allocator of pinned memory knows of copies, not of kernels. Raises UvaUnavailable when the
    memory cannot be pinned or the driver gives no device address for it. Whether its contents
    arrive is uva_problem()'s question.
    """
    try:
        host = torch.zeros(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise UvaUnavailable(f"no pinned host memory: {error}") from error
    return uva_view(host, device)


def uva_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of `device` over the same bytes as `host`, a contiguous pinned tensor.

    The view keeps `host` alive. Raises ValueError for another kind of tensor, else as uva_zeros.
    """
    if host.dtype not in TYPE_NAMES or not host.is_contiguous() or not host.is_pinned():
        raise ValueError(
            f"{host.dtype} tensor: a view needs contiguous pinned memory of int32, int64 or float32"
        )
    if host.numel() == 0:
        return torch.empty(host.shape, dtype=host.dtype, device=device)
    address = _device_address(host, device)
    view = torch.as_tensor(_HostMemory(host, address), device=device)
    if view.data_ptr() != address:
        # torch takes pinned memory to belong to the first device that this process used.
        raise UvaUnavailable(f"the pinned memory belongs to another device than {device}")
    return view


def uva_problem(device: torch.device) -> str:
    """Return "" when kernels of `device` read and write host memory rightly, else the reason.

    Sends a pattern both ways and waits for the device, so it is for the start alone. Raises
    TimeoutError when the device does not answer.
    """
    try:
        host = torch.arange(PROBE_ELEMENTS, dtype=torch.int32).pin_memory()
        view = uva_view(host, device)
    except RuntimeError as error:
        return str(error)
    seen = view.clone()
    view.mul_(-3)
    _wait_for_device(device)
    expected = torch.arange(PROBE_ELEMENTS, dtype=torch.int32)
    if not torch.equal(seen.cpu(), expected):
        return "kernels read something else from pinned host memory than the CPU wrote"
    if not torch.equal(host, expected * -3):
        return "what kernels write to pinned host memory does not reach the CPU"
    return ""


def _wait_for_device(device: torch.device) -> None:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{device} did not answer within {PROBE_TIMEOUT_S:g} s")
        time.sleep(1e-4)


def _device_address(host: torch.Tensor, device: torch.device) -> int:
    """Return the address under which the device sees pinned memory; asks the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UvaUnavailable(f"the CUDA driver library did not load: {error}") from error
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the driver call needs torch's context
        code = driver.cuMemHostGetDevicePointer_v2(
            ctypes.byref(address), ctypes.c_void_p(host.data_ptr()), ctypes.c_uint(0)
        )
    if code != 0:
        raise UvaUnavailable(f"the driver has no device address for pinned memory (error {code})")
    return int(address.value)
