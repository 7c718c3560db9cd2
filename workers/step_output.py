"""What a step brings back, and how the host knows that it is there.

    ids       advance_state -> ring[step % slots]      pinned host memory: kernels write, the host
                                                       reads; an event behind the step's kernels
    the rest  log-probabilities, embeddings (step_extras.py) -> copy stream -> pinned memory, an
              event behind the copies
    StepHandle.result() waits for the later of the two

So a steady decode copies nothing down and allocates nothing: it records one event. Where kernels
cannot write host memory (kernels/uva.py), the ring lies on the device and the ids are copied too.

A slot of the ring is written again `slots` steps later; the engine has read the output by then,
for it never has more than `depth` steps unread and there are depth + 2 slots.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from nanorunner.kernels.uva import uva_problem, uva_view
from nanorunner.workers.device import POLL_S
from nanorunner.workers.messages import Int32, StepOutput
from nanorunner.workers.request_rows import Int64, RequestRows
from nanorunner.workers.spans import DOWNLOAD, SpanRecorder
from nanorunner.workers.step_extras import DeviceExtras

SPIN_S = 0.002  # before the first sleep: a decode step is rarely longer, a sleep costs 60 us

logger = logging.getLogger("nanorunner")


class StaleSlot(RuntimeError):
    """An output was read after its slot of the ring had been given to a later step."""


class Arrival(NamedTuple):
    """A step's results on the host, all there once the event has completed."""

    step: int  # the ring's number of it
    ids: Int64  # [num_sampled] in the ring: good until the slot's next step
    others: list[torch.Tensor]  # those of extras.tensors(); the handle's own
    event: torch.Event | None  # None: a CPU, which has finished the step already


class OutputRing:
    """The ids of the last steps.

    ids [slots, max_num_ids] int64. Owner: the runner. Place: pinned host memory as kernels see it,
    or the device. Lifetime: a slot is valid for `slots` steps. Last writer: advance_state, on the
    main stream.
    """

    def __init__(
        self,
        num_slots: int,
        max_num_ids: int,
        device: torch.device,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._recorder = recorder
        self.step_counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_steps = 0  # the CPU's count of the same steps
        is_cuda = device.type == "cuda"
        shape = (num_slots, max_num_ids)
        # The ring itself where kernels can write it, else where it is copied to, slot by slot.
        self._pinned = torch.full(shape, -1, dtype=torch.int64, pin_memory=is_cuda)
        self._pinned_ids: Int64 = self._pinned.numpy()  # sync: the host's own memory, at the start
        self.ids = self._pinned
        self._is_on_device = False
        self._copy_stream: Any = None
        if is_cuda:
            self._is_on_device = not _can_share(device)
            ring = torch.full_like(self._pinned, -1, device=device)
            self.ids = ring if self._is_on_device else uva_view(self._pinned, device)
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # One a slot, recorded anew by each of its steps.
            self._written = [torch.Event(device, enable_timing=False) for _ in range(num_slots)]
            self._copied = [torch.Event(device, enable_timing=False) for _ in range(num_slots)]

    def restart(self) -> None:
        """Forget the steps of warm-up and capture."""
        self.step_counter.zero_()
        self.num_steps = 0

    def begin(self) -> None:
        """Count a step that is about to be enqueued; the next slot is its own."""
        self.num_steps += 1

    def finish(self, num_sampled: int, extras: DeviceExtras | None = None) -> Arrival:
        """Return where the results of the step just enqueued will be, and when.

        The caller keeps `extras` until then: the copy stream reads their tensors behind the back of
        PyTorch's allocator, which would hand their memory out again.
        """
        slot = self._slot()
        ids = self._pinned_ids[slot, :num_sampled]
        sources = [] if extras is None else extras.tensors()
        if self._copy_stream is None:
            return Arrival(self.num_steps, ids, sources, None)
        event = self._written[slot]
        event.record()  # on the current stream, which the step's kernels are on
        if not sources and not self._is_on_device:
            return Arrival(self.num_steps, ids, [], event)
        targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=True) for s in sources]
        pairs = list(zip(targets, sources, strict=True))
        if self._is_on_device:
            pairs.append((self._pinned[slot, :num_sampled], self.ids[slot, :num_sampled]))
        self._copy_stream.wait_event(event)
        recorder = self._recorder
        with torch.cuda.stream(self._copy_stream):
            begun = None if recorder is None else recorder.begin_inner(DOWNLOAD)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._copied[slot].record()
            if recorder is not None and begun is not None:
                recorder.end_inner(DOWNLOAD, begun)
        return Arrival(self.num_steps, ids, targets, self._copied[slot])

    def check(self, step: int) -> None:
        """Raise StaleSlot unless the slot of that step is still its own."""
        if self.num_steps - step >= self.num_slots:
            raise StaleSlot(
                f"output {step} is read after step {self.num_steps} has been enqueued; the ring"
                f" keeps {self.num_slots}"
            )

    def _slot(self) -> int:
        return (self.num_steps - 1) % self.num_slots


class PendingStep:
    """The handle of an enqueued step. Owns what its copies read and write until result().

    arrival: None when nobody samples and nothing else comes back.
    """

    def __init__(
        self,
        step_id: int,
        request_ids: Int32,
        outputs: OutputRing,
        arrival: Arrival | None,
        rows: tuple[RequestRows, Int64, Int64],
        timeout_s: float,
        extras: DeviceExtras | None = None,
    ) -> None:
        self._step_id = step_id
        self._request_ids = request_ids
        self._outputs = outputs
        self._arrival = arrival
        self._rows = rows  # the table, the batch's rows and their generations when it was made
        self._timeout_s = timeout_s
        self._extras = extras

    def result(self) -> StepOutput:
        """Wait for the ids, at most the step timeout, and return them.

        Raises TimeoutError when the device is late, StaleRow when a row of the batch has been
        given away before its output was read, StaleSlot when its place in the ring has.
        """
        table, rows, generations = self._rows
        table.check_all(rows, generations)
        arrival = self._arrival
        if arrival is None:
            return StepOutput(self._step_id, self._request_ids, np.zeros(0, np.int32))
        self._outputs.check(arrival.step)
        if arrival.event is not None:
            _wait(arrival.event, self._timeout_s)
        ids = arrival.ids.astype(np.int32)
        if self._extras is None:
            return StepOutput(self._step_id, self._request_ids, ids)
        # copies: who keeps an output must not keep pinned memory with it
        arrays = [target.numpy().copy() for target in arrival.others]
        extras = self._extras.read(arrays, self._request_ids, ids)
        return StepOutput(self._step_id, self._request_ids, ids, extras)


def _can_share(device: torch.device) -> bool:
    """Return whether kernels can write host memory; say in the log when they cannot."""
    problem = uva_problem(device)
    if problem:
        logger.warning("output ids: copied down in every step, because %s", problem)
    return not problem


def _wait(event: torch.Event, timeout_s: float) -> None:
    """Poll an event; TimeoutError after timeout_s. Never a synchronise: a device can hang."""
    start = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise TimeoutError(f"the device has not finished the step in {timeout_s:g} s")
        if waited_s > SPIN_S:
            time.sleep(POLL_S)
