"""Pinned host buffers that go round, for numbers which the CPU sends up anew each step.

    take() -> slot    the CPU fills slot.words
    send(slot)        one asynchronous copy to the device, and an event behind it
    take() ...        hands the same slot out again only when that event has completed

A copy from pinned memory returns before it has run, and several steps are in flight: a buffer that
is written again too early changes what an earlier step reads. A ring with a slot for each step in
flight and two to spare never waits. Should it be short all the same, it gets one more slot.

On a CPU the slot itself is what the step reads, at once, so nothing is pinned and no event is made.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

POLL_S = 20e-6  # between two looks at an event; short against a decode step of a few hundred us
SPARE_FACTOR = 4  # so many times its first slots may a ring have before it waits for one


class Completion(Protocol):
    """What a slot asks of an event (torch.Event)."""

    def query(self) -> bool:
        """Return whether everything in front of the event has run."""


class PinnedSlot:
    """One buffer of int32 words.

    Owner: the ring. Place: pinned host memory, and a device buffer of the same size. Lifetime: as
    the ring, contents until the next take() of this slot. Last writer: the CPU of the host part,
    the copy on the main stream of the device part.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.zeros(num_words, dtype=torch.int32, pin_memory=is_cuda)
        self.words: npt.NDArray[np.int32] = self.host.numpy()  # the same memory
        # One a slot: what a step reads is never the target of a later step's copy.
        self.device = torch.zeros(num_words, dtype=torch.int32, device=device) if is_cuda else None
        self.event: Completion | None = None  # None: never sent since it was made or taken
        self._copied = torch.Event(device, enable_timing=False) if is_cuda else None

    def is_free(self) -> bool:
        """Return whether the CPU may write: no copy out of this slot is under way."""
        return self.event is None or self.event.query()

    def mark_sent(self) -> None:
        """Note that a copy out of this slot has just been enqueued on the current stream."""
        if self._copied is not None:
            self._copied.record()
            self.event = self._copied


class PinnedRing:
    """Slots in the order of their last use, the oldest in front.

    num_slots: steps in flight + 2. slot_words: int32 words a slot holds at first.
    """

    def __init__(
        self,
        device: torch.device,
        num_slots: int,
        slot_words: int = 4096,
        timeout_s: float = 60.0,
    ) -> None:
        if num_slots < 1 or slot_words < 1:
            raise ValueError(f"{num_slots} slots of {slot_words} words: each must be at least 1")
        self._device = device
        self._slot_words = slot_words
        self._most_slots = SPARE_FACTOR * num_slots
        self._timeout_s = timeout_s
        self._slots = deque(PinnedSlot(slot_words, device) for _ in range(num_slots))

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, num_words: int) -> PinnedSlot:
        """Return a slot of at least num_words words that nothing reads any more.

        Raises TimeoutError when the device has not finished the oldest copy within timeout_s
        although the ring has grown as far as it may; no slot is changed then.
        """
        # One stream finishes copies in order: if the oldest is under way, they all are.
        if not self._slots[0].is_free():
            if len(self._slots) < self._most_slots:
                self._slots.appendleft(PinnedSlot(self._slot_words, self._device))
            else:
                self._wait_for_oldest()
        slot = self._slots.popleft()
        if len(slot.words) < num_words:
            # Doubling: a few large prompts settle the size. The old buffer is free, see above; its
            # device part goes back to an allocator that reuses it in stream order.
            while self._slot_words < num_words:
                self._slot_words *= 2
            slot = PinnedSlot(self._slot_words, self._device)
        slot.event = None
        self._slots.append(slot)
        return slot

    def send(
        self, slot: PinnedSlot, num_words: int, target: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Enqueue the copy of the slot's first num_words words; return where they will be.

        target [num_words] int32 on the device, else the slot's own device buffer. The copy and the
        event go to the current stream, which must be the one that all readers run on.
        """
        source = slot.host[:num_words]
        if target is None:
            if slot.device is None:
                return source
            target = slot.device[:num_words]
        target.copy_(source, non_blocking=True)
        slot.mark_sent()
        return target

    def _wait_for_oldest(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._slots[0].is_free():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the device has not read the oldest of {len(self._slots)} staging buffers in"
                    f" {self._timeout_s:g} s"
                )
            time.sleep(POLL_S)
