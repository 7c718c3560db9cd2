"""A step's output is its own, as long as the ring keeps it, and is never a later step's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanorunner.workers.request_rows import RequestRows, StaleRow
from nanorunner.workers.step_extras import DeviceExtras
from nanorunner.workers.step_output import OutputRing, PendingStep, StaleSlot

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS = 4
REQUEST_IDS = np.array([7, 8, 9], np.int32)


class Steps:
    """Steps that write step * 10 + place as the ids of three requests."""

    def __init__(self) -> None:
        self.ring = OutputRing(NUM_SLOTS, 5, DEVICE)
        self.table = RequestRows(3)
        self.rows = np.array([self.table.add(int(i)) for i in REQUEST_IDS], np.int64)

    def run(self, extras: DeviceExtras | None = None) -> PendingStep:
        """Enqueue a step as the runner does and return its handle."""
        step = self.ring.num_steps
        self.ring.begin()
        ids = torch.arange(3, device=DEVICE) + step * 10
        self.ring.ids[step % NUM_SLOTS, :3].copy_(ids)
        arrival = self.ring.finish(3, extras)
        owners = self.table, self.rows, self.table.generations(self.rows)
        return PendingStep(step, REQUEST_IDS, self.ring, arrival, owners, 60.0, extras)


def test_every_step_brings_its_own_ids_while_others_are_unread() -> None:
    steps = Steps()
    unread = [steps.run() for _ in range(NUM_SLOTS)]
    for step in range(3 * NUM_SLOTS):
        output = unread.pop(0).result()
        assert output.step_id == step
        assert output.token_ids.tolist() == [step * 10, step * 10 + 1, step * 10 + 2]
        assert output.token_ids.dtype == np.int32
        assert output.extras is None
        unread.append(steps.run())


def test_an_output_is_not_touched_by_the_steps_after_it_was_read() -> None:
    steps = Steps()
    output = steps.run().result()
    for _ in range(2 * NUM_SLOTS):
        steps.run()
    assert output.token_ids.tolist() == [0, 1, 2]


def test_an_output_whose_slot_is_another_steps_is_refused() -> None:
    steps = Steps()
    first, second = steps.run(), steps.run()
    for _ in range(NUM_SLOTS - 1):
        steps.run()
    with pytest.raises(StaleSlot, match=r"output 1 is read after step 5 .* keeps 4"):
        first.result()
    assert second.result().token_ids.tolist() == [10, 11, 12]


def test_an_output_whose_row_is_another_requests_is_refused() -> None:
    steps = Steps()
    handle = steps.run()
    steps.table.remove(8)
    steps.table.add(10)
    with pytest.raises(StaleRow, match="an output of its owner 1 came after owner 2"):
        handle.result()


def test_what_comes_beside_the_ids_comes_with_them() -> None:
    steps = Steps()
    embedding = torch.arange(4, dtype=torch.float32, device=DEVICE)
    handles = [steps.run(), steps.run(DeviceExtras([], [], [(8, embedding)])), steps.run()]
    outputs = [handle.result() for handle in handles]
    assert [output.token_ids.tolist()[0] for output in outputs] == [0, 10, 20]
    assert outputs[0].extras is outputs[2].extras is None
    assert outputs[1].extras is not None
    found = outputs[1].extras[8].embedding
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3]
