"""--share-gpu: how ranks on one GPU meet, namely in host memory, where gloo adds their tensors up.

    x on the GPU -> pinned buffer -> gloo over the loopback -> the same buffer -> x

NCCL takes one rank a GPU and peer memory needs a GPU for each kernel that waits, so on one GPU it
is this or nothing. Each call waits for the GPU, which no CUDA graph can hold, and costs two copies:
it is there to show tp 2 on a machine with one card, not to be quick.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from nanorunner.workers.device import POLL_S


class Finished:
    """The work of a collective that is over."""

    def wait(self) -> None:
        """Return at once."""


class HostRelay:
    """A process group for tensors of one device, made of one for host memory; as far as Group asks.

    buffer: pinned, as large as the largest tensor so far. Owner: this object. Lifetime: contents
    from the copy down to the copy up, which the same stream's next copy down waits for. Last
    writer: that stream, then gloo, while the stream is known to be past the copy down.
    """

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        """group: a ProcessGroupGloo. timeout_s: how long the device may take to a copy."""
        self._group = group
        self._timeout_s = timeout_s
        self._is_pinned = device.type == "cuda"
        self._event = torch.Event(device, enable_timing=False) if self._is_pinned else None
        self._buffer = self._empty(1, torch.uint8)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Finished:
        """Reduce the one tensor of the list in place."""
        (x,) = tensors
        host = self._down(x)
        self._group.allreduce([host], options).wait()
        x.copy_(host, non_blocking=True)
        return Finished()

    def allgather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> Finished:
        """Fill the parts with every rank's tensor, in rank order."""
        (x,) = tensors
        host = self._down(x)
        theirs = [self._empty(x.shape, x.dtype) for _ in parts[0]]
        self._group.allgather([theirs], [host]).wait()
        self._up(theirs, parts[0])
        return Finished()

    def gather(
        self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any
    ) -> Finished:
        """Fill rank 0's parts with every rank's tensor; the other ranks give an empty list."""
        (x,) = tensors
        host = self._down(x)
        theirs = [[self._empty(x.shape, x.dtype) for _ in its] for its in parts]
        self._group.gather(theirs, [host], options).wait()
        for its, mine in zip(theirs, parts, strict=True):
            self._up(its, mine)
        return Finished()

    def abort(self) -> None:
        """Nothing to do: gloo notices by itself when a peer's socket closes."""

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in host memory; TimeoutError when the device does not get there."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes > len(self._buffer):
            self._buffer = self._empty(num_bytes, torch.uint8)
        host = self._buffer[:num_bytes].view(x.dtype).view(x.shape)
        host.copy_(x, non_blocking=True)
        if self._event is None:
            return host
        self._event.record()  # on the current stream, which the copy is on
        deadline = time.monotonic() + self._timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the GPU has not brought a tensor to host memory in {self._timeout_s:g} s"
                )
            time.sleep(POLL_S)
        return host

    def _up(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)

    def _empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)
