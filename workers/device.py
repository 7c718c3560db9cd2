"""The one place that knows whether the tensors live on a CPU or on a GPU.

Runners ask a Device to bring numbers up, to take results down and to measure memory; on a GPU
these are pinned buffers, copies on the current stream and events, on a CPU plain tensors. Nothing
else in workers/ asks which of the two it runs on, except to choose a process-group backend.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

POLL_S = 20e-6  # between two looks at an event; short against a decode step of a few hundred us


class MemoryUse(NamedTuple):
    """Bytes on this rank's device."""

    total: int
    free: int  # what the driver still gives, to any process
    reserved: int  # held by this process's PyTorch allocator
    peak: int  # most that was allocated at once since reset_peak()


class Download:
    """A tensor on its way to the host. Owns source and target until result() has returned."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source  # kept: the allocator must not hand it out while the copy runs
        self._event: Any = None
        if source.is_cuda:
            self._target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._target = source

    def result(self, timeout_s: float) -> npt.NDArray[np.generic]:
        """Return the values; raise TimeoutError when the device has not got there in timeout_s.

        Polls instead of synchronising: a device that hangs in a collective whose peer has died
        must not take the host with it.
        """
        if self._event is not None:
            deadline = time.monotonic() + timeout_s
            while not self._event.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the device has not finished the step in {timeout_s:g} s")
                time.sleep(POLL_S)
        values: npt.NDArray[np.generic] = self._target.numpy()
        return values


class Device:
    """This rank's device: the CPU, or a GPU by its number (RunnerConfig.gpu_of)."""

    def __init__(self, kind: str, gpu: int) -> None:
        self.kind = kind
        self.torch_device = torch.device("cuda", gpu) if kind == "cuda" else torch.device("cpu")
        self.is_cuda = kind == "cuda"
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return `values` as a new tensor on the device, without waiting for it to arrive.

        The pinned copy is temporary: PyTorch's pinned-memory allocator hands its memory out again
        only after the copy's event has completed.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if not self.is_cuda:
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything enqueued has run; TimeoutError after timeout_s."""
        if self.is_cuda:
            Download(torch.zeros(1, device=self.torch_device)).result(timeout_s)

    def memory(self) -> MemoryUse:
        """Return this GPU's memory state; a CPU has no such limits to read and is not asked."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return MemoryUse(total, free, reserved, torch.cuda.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """Start the next peak measurement from what is allocated now."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release(self) -> None:
        """Give cached memory back to the driver, so that another engine can have it."""
        if self.is_cuda:
            torch.cuda.empty_cache()
