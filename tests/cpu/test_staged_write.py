"""Staged writes: every staged cell and no other, checked before they are sent, never sent early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE
from sparse_memory import sparse_int32

from nanorunner.kernels.staged_write import staged_write_reference, staged_write_triton
from nanorunner.workers import staged_tensor
from nanorunner.workers.pinned_ring import SPARE_FACTOR, PinnedRing
from nanorunner.workers.staged_tensor import StagedWriteConflict, StagedWriter

DTYPES = [torch.int32, torch.int64, torch.float32]
Launch = Callable[..., None]


@pytest.fixture(params=[staged_write_reference, staged_write_triton], autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run each test with the PyTorch and with the Triton form; the number of writes a launch."""
    sizes: list[int] = []

    def launch(*arguments: Any) -> None:
        sizes.append(arguments[3])
        request.param(*arguments)

    monkeypatch.setattr(staged_tensor, "staged_write", launch)
    return sizes


def test_the_staged_cells_change_and_no_others(launches: list[int]) -> None:
    writer = StagedWriter(DEVICE, 2)
    table = writer.table("table", (4, 8), torch.int32)
    table.stage(2, 3, [3, 1, 2])
    table.stage(0, 1, [-1, -2, -5])
    assert writer.staged().lengths.cumsum().tolist() == [3, 6]
    assert not table.tensor.any()
    assert writer.apply() == 1
    expected = torch.zeros(4, 8, dtype=torch.int32)
    expected[2, 3:6] = torch.tensor([3, 1, 2])
    expected[0, 1:4] = torch.tensor([-1, -2, -5])
    assert torch.equal(table.tensor.cpu(), expected)
    assert (writer.apply(), launches, writer.num_launches) == (0, [2], 1)


def test_ragged_writes_are_packed_in_the_order_of_staging() -> None:
    writer = StagedWriter(DEVICE, 2)
    table = writer.table("table", (4, 8), torch.int32)
    table.stage(0, 0, [1, 2])
    table.stage(1, 3, [3, 4])
    table.stage_elem(2, 5)
    table.stage(3, 0, [])
    writes = writer.staged()
    assert writes.values.tolist() == [1, 2, 3, 4, 5]
    assert writes.lengths.cumsum().tolist() == [2, 4, 5]
    assert (writes.rows.tolist(), writes.starts.tolist()) == ([0, 1, 2], [0, 3, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_only_empty_write_launches_nothing(dtype: torch.dtype, launches: list[int]) -> None:
    writer = StagedWriter(DEVICE, 2)
    writer.table("table", (4, 8), dtype).stage(1, 8, [])
    assert (writer.apply(), launches) == (0, [])


def test_tables_of_all_types_share_one_launch(launches: list[int]) -> None:
    writer = StagedWriter(DEVICE, 2)
    ids = writer.table("ids", (3, 5), torch.int32)
    seeds = writer.table("seeds", (3,), torch.int64)
    heat = writer.table("heat", (3,), torch.float32)
    wide = writer.table("wide", (2, 4), torch.int64)
    ids.stage(1, 2, np.array([7, 8, 9], np.int32))
    seeds.stage_elem(2, -(2**63))
    heat.stage_elem(0, 0.6)
    wide.stage(1, 1, [2**40 + 1, -3])
    assert writer.apply() == 1
    assert ids.tensor.tolist() == [[0] * 5, [0, 0, 7, 8, 9], [0] * 5]
    assert seeds.tensor.tolist() == [0, 0, -(2**63)]
    assert heat.tensor.tolist() == [pytest.approx(0.6), 0.0, 0.0]
    assert wide.tensor.tolist() == [[0] * 4, [0, 2**40 + 1, -3, 0]]
    assert launches == [4]


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_writes_leave_what_doing_them_one_by_one_leaves(data: st.DataObject) -> None:
    """Overlaps among them: the later write stays."""
    writer = StagedWriter(DEVICE, 1)
    tables = [writer.table(f"table {i}", (3, 6), dtype) for i, dtype in enumerate(DTYPES)]
    expected = [[[0] * 6 for _ in range(3)] for _ in tables]
    for _ in range(3):
        for _ in range(data.draw(st.integers(0, 8))):
            at, row = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
            start = data.draw(st.integers(0, 6))
            values = data.draw(st.lists(st.integers(-1000, 1000), max_size=6 - start))
            tables[at].stage(row, start, values)
            expected[at][row][start : start + len(values)] = values
        writer.apply()
        assert [table.tensor.tolist() for table in tables] == expected


def test_bytes_are_packed_values() -> None:
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("table", (2, 4), torch.int32)
    table.stage(1, 1, np.array([7, -8], np.int32).tobytes())
    writer.apply()
    assert table.tensor.tolist() == [[0] * 4, [0, 7, -8, 0]]


def test_a_long_write_is_whole() -> None:
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("table", (2, 10_000), torch.int32)
    values = np.arange(9_000, dtype=np.int32)
    table.stage(1, 500, values)
    values[:] = -1  # staged values are the caller's no more
    writer.apply()
    row = table.tensor[1].cpu()
    assert torch.equal(row[500:9500], torch.arange(9_000, dtype=torch.int32))
    assert not row[:500].any()
    assert not row[9500:].any()
    assert not table.tensor[0].any()


def test_a_row_beyond_two_to_the_31_elements_is_written_where_it_lies() -> None:
    """Rows of a million: row 2559 begins at 2,559,000,000, which int32 would make negative."""
    if DEVICE.type == "cuda":
        base = torch.zeros(2560, 1_000_000, dtype=torch.int32, device=DEVICE)
    else:
        base = sparse_int32(2560, 1_000_000)
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("table", (2560, 1_000_000), torch.int32, base)
    table.stage(2559, 2, [5, 6])
    writer.apply()
    assert base.view(-1)[2_559_000_000:2_559_000_006].tolist() == [0, 0, 5, 6, 0, 0]
    assert not base[0, :8].any()


def test_a_write_past_its_row_is_refused_with_the_numbers() -> None:
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("block_tables", (2, 4), torch.int32)
    table.stage(1, 0, [1, 2, 3])
    with pytest.raises(ValueError, match=r"block_tables: row 1 .*\(5 > 4\)"):
        table.stage(1, 3, [4, 5])
    assert len(writer.staged().rows) == 1
    writer.apply()
    assert table.tensor.tolist() == [[0] * 4, [1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("row", "start", "words"),
    [
        (-1, 0, "row -1, column 0: the table has rows 0 to 1"),
        (2, 0, "row 2, column 0"),
        (0, -1, "row 0, column -1"),
    ],
)
def test_a_place_outside_the_table_is_refused(row: int, start: int, words: str) -> None:
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("table", (2, 4), torch.int32)
    with pytest.raises(ValueError, match=words):
        table.stage(row, start, [1])
    assert writer.apply() == 0


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int32, [2**31]),
        (torch.int32, [0, -(2**31) - 1]),
        (torch.int32, [1.5]),
        (torch.int32, np.array([2**33])),
        (torch.int64, np.array([2**63], np.uint64)),
        (torch.int64, np.array([True])),
        (torch.float32, ["1"]),
        (torch.int32, [[1, 2]]),
    ],
)
def test_values_that_the_table_would_change_are_refused(dtype: torch.dtype, values: Any) -> None:
    writer = StagedWriter(DEVICE, 1)
    table = writer.table("table", (2, 4), dtype)
    with pytest.raises(ValueError, match=r"table(:| holds) "):
        table.stage(0, 0, values)
    with pytest.raises(ValueError, match="table holds "):
        table.stage_elem(0, 2**31 if dtype == torch.int32 else "x")  # type: ignore[arg-type]
    assert writer.apply() == 0


@pytest.mark.parametrize("shape", [(), (2, 3, 4)])
def test_a_table_of_another_shape_or_base_is_refused(shape: tuple[int, ...]) -> None:
    writer = StagedWriter(DEVICE, 1)
    with pytest.raises(ValueError, match="staged tables are"):
        writer.table("table", shape, torch.int32)
    with pytest.raises(ValueError, match="staged tables are"):
        writer.table("table", (2,), torch.bfloat16)
    base = torch.zeros(4, 2, dtype=torch.int32).T
    with pytest.raises(ValueError, match="contiguous"):
        writer.table("table", (2, 4), torch.int32, base)


def test_debug_mode_refuses_two_writes_to_one_cell() -> None:
    writer = StagedWriter(DEVICE, 1, debug=True)
    table = writer.table("table", (2, 8), torch.int64)
    table.stage(1, 0, [1, 2, 3])
    table.stage(0, 0, [1, 2, 3])
    table.stage(1, 2, [4, 5])
    with pytest.raises(StagedWriteConflict, match=r"row 1 .*columns 0 to 2, columns 2 to 3"):
        writer.apply()
    assert writer.apply() == 0
    assert not table.tensor.any()


def test_neighbouring_writes_are_no_conflict() -> None:
    writer = StagedWriter(DEVICE, 1, debug=True)
    table = writer.table("table", (2, 4), torch.int32)
    table.stage(0, 2, [3, 4])
    table.stage(1, 0, [5])
    table.stage(0, 0, [1, 2])
    writer.apply()
    assert table.tensor.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]


def test_a_base_given_by_the_caller_is_written_in_place() -> None:
    writer = StagedWriter(DEVICE, 1)
    base = torch.full((2, 3), 9, dtype=torch.int32, device=DEVICE)
    table = writer.table("table", (2, 3), torch.int32, base)
    table.stage(0, 1, [4])
    writer.apply()
    assert table.tensor is base
    assert base.tolist() == [[9, 4, 9], [9, 9, 9]]


class Stuck:
    """An event whose copy has not run."""

    def query(self) -> bool:
        return False


def test_a_buffer_whose_copy_has_not_run_is_not_handed_out_again() -> None:
    ring = PinnedRing(DEVICE, 3, slot_words=8, timeout_s=0.05)
    taken = []
    for _ in range(3 * SPARE_FACTOR):
        slot = ring.take(8)
        ring.send(slot, 8)
        slot.event = Stuck()
        taken.append(slot)
    assert len({id(slot) for slot in taken}) == len(ring) == 3 * SPARE_FACTOR
    with pytest.raises(TimeoutError, match=f"oldest of {len(ring)} staging buffers in 0.05 s"):
        ring.take(8)
    taken[0].event = None
    assert ring.take(8) is taken[0]


def test_a_ring_reuses_its_buffers_in_turn_and_grows_by_doubling() -> None:
    ring = PinnedRing(DEVICE, 3, slot_words=8)
    slots = [ring.take(8) for _ in range(6)]
    assert [id(slot) for slot in slots[:3]] == [id(slot) for slot in slots[3:]]
    assert len(ring.take(33).words) == 64
    assert [len(ring.take(1).words) for _ in range(3)] == [8, 8, 64]
    assert len(ring) == 3
