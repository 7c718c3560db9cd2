"""The wire on a plain bytearray: no call is lost, torn, reordered, or overwritten unread."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorunner.workers.channel import (
    FRAGMENT_BYTES,
    HEADER_BYTES,
    MAX_RANKS,
    SEGMENT_BYTES,
    Channel,
    ChannelError,
)

METHODS = frozenset({"step", "echo"})
PATIENCE_S = 100.0  # of a wait for another thread, which a busy machine may stop for seconds
RING_START = HEADER_BYTES


class Wire:
    """All ends of one wire in one process."""

    def __init__(self, tp: int = 2, num_bytes: int = SEGMENT_BYTES) -> None:
        self.memory = bytearray(num_bytes)
        view = memoryview(self.memory)
        self.writer = Channel(view, 0, tp, METHODS, spin_s=0.0)
        self.readers = [Channel(view, rank, tp, METHODS, spin_s=0.0) for rank in range(1, tp)]

    def close(self) -> None:
        for end in (self.writer, *self.readers):
            end.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_a_frame_is_a_length_of_four_bytes_and_a_pickled_list(wire: Wire) -> None:
    wire.writer.write_shm("step", 7, b"abc")
    frame = wire.memory[RING_START:]
    assert int.from_bytes(frame[0:4], "little") == 1, "the number of the frame"
    length = int.from_bytes(frame[4:8], "little")
    assert pickle.loads(frame[8 : 8 + length]) == ["step", 7, b"abc"]


def test_calls_arrive_in_order_with_their_arguments(wire: Wire) -> None:
    for number in range(100):
        wire.writer.write_shm("echo", number, "x" * number)
    for number in range(100):
        assert wire.readers[0].read_shm() == (number + 1, "echo", (number, "x" * number))


def test_an_ack_means_copied_out_and_comes_before_unpickling(wire: Wire) -> None:
    wire.writer.write_shm("echo", _Unpicklable())
    assert wire.writer.acked(1) == 0
    with pytest.raises(ZeroDivisionError):
        wire.readers[0].read_shm()
    assert wire.writer.acked(1) == 1


def test_an_unread_frame_is_never_overwritten(wire: Wire) -> None:
    sent = fill(wire, 50000)
    assert sent == 20, "the whole ring is used before the writer waits"
    for number in range(sent):
        args = wire.readers[0].read_shm().args
        assert args == (number, bytes([number % 256]) * 50000)


def test_a_refusal_for_lack_of_room_leaves_the_wire_as_it_was(wire: Wire) -> None:
    fill(wire)
    wire.readers[0].read_shm()
    wire.writer.write_shm("step", "after")
    calls = []
    while wire.readers[0].wait(0.0):
        calls.append(wire.readers[0].read_shm())
    assert calls[-1].args == ("after",)


def test_a_full_ring_names_who_has_not_read_which_frame_and_for_how_long() -> None:
    wire = Wire(tp=4)
    for _ in range(3):
        wire.writer.write_shm("step")
    for reader, count in zip(wire.readers, (3, 1, 2), strict=True):
        for _ in range(count):
            reader.read_shm()
    fill(wire, 200000)
    with pytest.raises(ChannelError, match=r"rank\(s\) \[2\]: no ack of frame 2 in 0\.05 s"):
        wire.writer.write_shm("step", bytes(200000), timeout_s=0.05)


def test_waiting_for_room_ends_when_the_check_raises(wire: Wire) -> None:
    fill(wire)
    deadline = time.monotonic() + 0.1

    def check() -> None:
        if time.monotonic() > deadline:
            raise InterruptedError("rank 1 died")

    with pytest.raises(InterruptedError):
        wire.writer.write_shm("step", bytes(200000), timeout_s=PATIENCE_S, check=check)


@pytest.mark.parametrize("method", ["exit", "", "__class__"])
def test_a_method_that_is_not_allowed_is_refused_before_anything_is_written(
    wire: Wire, method: str
) -> None:
    before = bytes(wire.memory)
    with pytest.raises(ChannelError, match="is no method of the wire"):
        wire.writer.write_shm(method)
    assert wire.memory == before


def test_arguments_that_cannot_be_pickled_leave_the_wire_as_it_was(wire: Wire) -> None:
    before = bytes(wire.memory)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        wire.writer.write_shm("step", lambda: None)
    assert wire.memory == before
    wire.writer.write_shm("step", 1)
    assert wire.readers[0].read_shm().args == (1,)


@pytest.mark.parametrize("num_bytes", [FRAGMENT_BYTES - 100, FRAGMENT_BYTES, 1 << 20, 8 << 20])
def test_a_call_larger_than_the_ring_arrives_whole(wire: Wire, num_bytes: int) -> None:
    data = random.Random(1).randbytes(num_bytes)
    received: list[object] = []

    def read() -> None:
        received.append(wire.readers[0].read_shm(PATIENCE_S).args[0])

    thread = threading.Thread(target=read)
    thread.start()
    wire.writer.write_shm("step", data, timeout_s=PATIENCE_S)
    thread.join(PATIENCE_S)
    assert received == [data]


def test_a_call_that_stopped_half_way_closes_the_wire_by_name(wire: Wire) -> None:
    with pytest.raises(ChannelError, match="no ack of frame 1"):
        wire.writer.write_shm("step", bytes(2 << 20), timeout_s=0.05)
    with pytest.raises(ChannelError, match="the wire is closed: step stopped after"):
        wire.writer.write_shm("echo", 1)


def test_a_reader_waits_for_the_next_frame_no_longer_than_told(wire: Wire) -> None:
    start = time.monotonic()
    assert not wire.readers[0].wait(0.05)
    with pytest.raises(ChannelError, match=r"rank 1: no frame after 0 in 0\.05 s"):
        wire.readers[0].read_shm(timeout_s=0.05)
    assert time.monotonic() - start < 10.0, "it has not heeded the time that it was told"


def test_a_frame_with_a_wrong_number_is_refused(wire: Wire) -> None:
    wire.writer.write_shm("step")
    wire.memory[RING_START] = 9
    with pytest.raises(ChannelError, match="frame 9 at byte 0 instead of 1"):
        wire.readers[0].read_shm()


def test_more_ranks_than_the_header_has_room_for_are_refused() -> None:
    Wire(tp=MAX_RANKS + 1).close()
    with pytest.raises(ValueError, match=f"room for {MAX_RANKS + 1} ranks"):
        Wire(tp=MAX_RANKS + 2)


def test_a_closed_wire_lets_its_memory_go() -> None:
    wire = Wire()
    wire.close()
    wire.close()
    wire.memory.clear()


# what a random run does next: rank 0 writes a call of this many bytes, or rank r reads one
ACTIONS = st.one_of(
    st.tuples(st.just(0), st.integers(0, 1000)), st.tuples(st.integers(1, 3), st.just(0))
)


@settings(max_examples=300)
@given(ring_bytes=st.integers(4096, 6000), actions=st.lists(ACTIONS, max_size=200))
def test_any_sizes_and_any_lag_of_any_reader_lose_nothing(
    ring_bytes: int, actions: list[tuple[int, int]]
) -> None:
    wire = Wire(tp=4, num_bytes=HEADER_BYTES + ring_bytes)
    expected: list[deque[tuple[int, bytes]]] = [deque() for _ in wire.readers]
    num_written = 0
    for rank, size in actions:
        if rank == 0:
            data = bytes([num_written % 256]) * size
            try:
                wire.writer.write_shm("step", num_written, data, timeout_s=-1.0)
            except ChannelError:
                assert any(expected), "refused though every frame has been read"
                continue
            for queue in expected:
                queue.append((num_written, data))
            num_written += 1
        elif expected[rank - 1]:
            assert wire.readers[rank - 1].read_shm().args == expected[rank - 1].popleft()
        else:
            assert not wire.readers[rank - 1].wait(0.0)
    for reader, queue in zip(wire.readers, expected, strict=True):
        while queue:
            assert reader.read_shm().args == queue.popleft()
        assert not reader.wait(0.0)


class _Unpicklable:
    """Pickles well, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_divide, (1, 0))


def _divide(a: int, b: int) -> float:
    return a / b


def fill(wire: Wire, size: int = 200000) -> int:
    """Write calls of this size until there is no room; return how many went in."""
    for number in range(1000):
        try:
            wire.writer.write_shm("step", number, bytes([number % 256]) * size, timeout_s=0.0)
        except ChannelError:
            return number
    raise AssertionError("the ring never filled")
