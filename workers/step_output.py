"""What a step brings back: ids in a ring on the device, copied down behind the step's kernels.

    advance_state -> ring[step % slots] -> copy stream -> pinned memory -> StepHandle.result()
    log-probabilities, embeddings (step_extras.py) ---^   one event behind them all

The copy runs on a stream of its own, so that the next step's kernels need not wait for it, nor it
for them. A slot of the ring is written again `slots` steps later; the engine has read the output by
then, for it never has more than `depth` steps unread and there are depth + 2 slots.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from nanorunner.workers.device import POLL_S
from nanorunner.workers.messages import Int32, StepOutput
from nanorunner.workers.request_rows import Int64, RequestRows
from nanorunner.workers.step_extras import DeviceExtras

SPIN_S = 0.002  # before the first sleep: a decode step is rarely longer, a sleep costs 60 us


class OutputRing:
    """The ids of the last steps.

    ids [slots, max_num_seqs] int64. Owner: the runner. Place: the device. Lifetime: a slot is valid
    for `slots` steps. Last writer: advance_state, on the main stream.
    """

    def __init__(self, num_slots: int, max_num_seqs: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.ids = torch.full((num_slots, max_num_seqs), -1, dtype=torch.int64, device=device)
        self.step_counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_steps = 0  # the CPU's count of the same steps
        is_cuda = device.type == "cuda"
        self._copy_stream: Any = None
        if is_cuda:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Forget the steps of warm-up and capture."""
        self.step_counter.zero_()
        self.num_steps = 0

    def next_slot(self) -> int:
        """Return the slot of the step that is being enqueued, and count it."""
        slot = self.num_steps % self.num_slots
        self.num_steps += 1
        return slot

    def download(
        self, slot: int, num_sampled: int, extras: DeviceExtras | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        """Enqueue the copies of a slot and of the extras' tensors.

        Return the host tensors, the ids first, and the event that completes them. The caller keeps
        `extras` until then.
        """
        ids = self.ids[slot, :num_sampled]
        others = [] if extras is None else extras.tensors()
        if self._copy_stream is None:
            return [ids.clone(), *others], None
        main = torch.cuda.current_stream()
        sources = [ids, *others]
        targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=True) for s in sources]
        self._copy_stream.wait_stream(main)
        with torch.cuda.stream(self._copy_stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._copy_stream)
        return targets, event


class PendingStep:
    """The handle of an enqueued step. Owns its host tensors until result() has returned.

    And the device tensors that they are copied from: the copy stream reads those behind the back of
    PyTorch's allocator, which would hand their memory out again.
    """

    def __init__(
        self,
        step_id: int,
        request_ids: Int32,
        download: tuple[list[torch.Tensor], Any] | None,
        rows: tuple[RequestRows, Int64, Int64],
        timeout_s: float,
        extras: DeviceExtras | None = None,
    ) -> None:
        self._step_id = step_id
        self._request_ids = request_ids
        self._download = download
        self._rows = rows  # the table, the batch's rows and their generations when it was made
        self._timeout_s = timeout_s
        self._extras = extras

    def result(self) -> StepOutput:
        """Wait for the ids, at most the step timeout, and return them.

        Raises TimeoutError when the device is late, StaleRow when a row of the batch has been
        given away before its output was read.
        """
        table, rows, generations = self._rows
        table.check_all(rows, generations)
        if self._download is None:
            return StepOutput(self._step_id, self._request_ids, np.zeros(0, np.int32))
        targets, event = self._download
        if event is not None:
            _wait(event, self._timeout_s)
        ids = targets[0].numpy().astype(np.int32)
        if self._extras is None:
            return StepOutput(self._step_id, self._request_ids, ids)
        # copies: who keeps an output must not keep pinned memory with it
        arrays = [target.numpy().copy() for target in targets[1:]]
        extras = self._extras.read(arrays, self._request_ids)
        return StepOutput(self._step_id, self._request_ids, ids, extras)


def _wait(event: Any, timeout_s: float) -> None:
    """Poll an event; TimeoutError after timeout_s. Never a synchronise: a device can hang."""
    start = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise TimeoutError(f"the device has not finished the step in {timeout_s:g} s")
        if waited_s > SPIN_S:
            time.sleep(POLL_S)
