"""A wire to play with: one frame at a time, and a rule for when rank 0 may overwrite it.

    byte 0      8           16 + 8 * r                 1024
         | sent | num_bytes | ack[r] ................. | payload ................... |

The real wire (workers/channel.py) is a ring; this is the one-frame buffer that it grew from,
between threads. Rank 0 alone writes sent, num_bytes and payload; rank r alone writes its ack.
race() lets a hasty rank 0 meet slow readers and counts what they miss: that is why acks exist.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanorunner.workers.channel import Call, ChannelError

SENT, NUM_BYTES, ACKS = 0, 1, 2  # places in the header, in 8-byte words; rank r's ack: ACKS + r
HEADER_BYTES = 1024
FRAME_BYTES = 1 << 16
NUM_PIECES = 4  # a copy of many bytes is no single moment: others run meanwhile
POLL_S = 0.0002
READER_PATIENCE_S = 10.0  # any thread may stand still for seconds on a busy machine
MAX_TORN = 500  # then a reader gives up
# When rank 0 may write the next frame over the last one.
AT_ONCE, ONE_ACK, ALL_ACKS = "after set()", "after one ack", "after every ack"
POLICIES = (AT_ONCE, ONE_ACK, ALL_ACKS)


class SandboxChannel:
    """One end of the sandbox's wire: what a write_shm and a read_shm need, and neither of them.

    words and payload are views of one memory that all ends share. Owner: whoever made it. Place:
    this process. Lifetime: the race. Last writers: as the drawing above says.
    """

    def __init__(
        self, memory: memoryview, rank: int, tp: int, events: Sequence[threading.Event]
    ) -> None:
        self.rank = rank
        self.frame = 0  # the last frame that this end wrote or read; the first is 1
        self.ranks = range(1, tp)  # those that read
        self.words = memory[:HEADER_BYTES].cast("Q")
        self.payload = memory[HEADER_BYTES:]
        self.events = events  # events[r - 1] wakes rank r

    def copy_in(self, data: bytes) -> None:
        """Write the payload, piece by piece."""
        for start, stop in _pieces(len(data)):
            self.payload[start:stop] = data[start:stop]
            time.sleep(0)

    def copy_out(self, num_bytes: int) -> bytes:
        """Return the payload's first bytes, copied piece by piece."""
        data = bytearray()
        for start, stop in _pieces(num_bytes):
            data += self.payload[start:stop]
            time.sleep(0)
        return bytes(data)


class PolicyChannel(SandboxChannel):
    """The sandbox's wire with one of POLICIES."""

    policy = ALL_ACKS

    def write_shm(
        self,
        method: str,
        *args: Any,
        timeout_s: float = 10.0,
        check: Callable[[], None] | None = None,
    ) -> int:
        """Put one call on the wire and return its frame number.

        Raises ChannelError, with nothing written, for a call that is too large and when the ranks
        do not ack the last frame within timeout_s. check() is called while waiting.
        """
        data = pickle.dumps([method, *args], protocol=5)
        if len(data) > len(self.payload):
            raise ChannelError(f"{method}: {len(data)} bytes, a frame holds {len(self.payload)}")
        self._wait_for_acks(timeout_s, check)
        self.copy_in(data)
        self.words[NUM_BYTES] = len(data)
        self.frame += 1
        self.words[SENT] = self.frame  # last: whoever sees the number sees the whole frame
        for event in self.events:
            event.set()
        return self.frame

    def read_shm(self, timeout_s: float = 10.0) -> Call:
        """Wait for the next frame, copy it out, ack it and return the call.

        Raises ChannelError when none comes within timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while self.words[SENT] == self.frame:
            if not self.events[self.rank - 1].wait(max(0.0, deadline - time.monotonic())):
                raise ChannelError(f"rank {self.rank}: no frame after {self.frame}")
            self.events[self.rank - 1].clear()
        number = self.words[SENT]
        data = self.copy_out(self.words[NUM_BYTES])
        self.frame = number
        self.words[ACKS + self.rank] = number  # after the copy: now rank 0 may overwrite it
        method, *args = pickle.loads(data)
        return Call(number, method, tuple(args))

    def _wait_for_acks(self, timeout_s: float, check: Callable[[], None] | None) -> None:
        deadline = time.monotonic() + timeout_s
        while late := self._late():
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise ChannelError(f"rank(s) {late}: no ack of frame {self.frame}")
            time.sleep(POLL_S)

    def _late(self) -> list[int]:
        """Return the ranks that rank 0 must still wait for."""
        late = [rank for rank in self.ranks if self.words[ACKS + rank] != self.frame]
        if self.policy == AT_ONCE or (self.policy == ONE_ACK and len(late) < len(self.ranks)):
            return []
        return late


@dataclass
class Race:
    """What one reader got of the numbered calls that rank 0 sent."""

    numbers: list[int] = field(default_factory=list)  # of whole calls, as they came
    num_torn: int = 0  # frames that were partly another's
    errors: list[str] = field(default_factory=list)

    def num_lost(self, num_calls: int) -> int:
        """Return how many calls never came whole."""
        return num_calls - len(set(self.numbers))

    def is_perfect(self, num_calls: int) -> bool:
        """Whether every call came once, whole and in order."""
        return self.numbers == list(range(num_calls)) and not self.num_torn and not self.errors


def policy_channel(policy: str) -> type[PolicyChannel]:
    """Return a PolicyChannel of one policy."""
    return type("PolicyChannel", (PolicyChannel,), {"policy": policy})


def ends(kind: Callable[..., Any], tp: int) -> list[Any]:
    """Return the ends of a new wire, rank 0's first."""
    memory = memoryview(bytearray(HEADER_BYTES + FRAME_BYTES))
    events = [threading.Event() for _ in range(1, tp)]
    return [kind(memory, rank, tp, events) for rank in range(tp)]


def race(
    kind: Callable[..., Any],
    *,
    tp: int = 3,
    num_calls: int = 200,
    num_bytes: int = 5000,
    slowest_s: float = 0.001,
    timeout_s: float = READER_PATIENCE_S,
) -> list[Race]:
    """Let rank 0 send numbered calls as fast as it may to slow readers; return what each got."""
    writer, *readers = ends(kind, tp)
    results = [Race() for _ in readers]
    threads = [
        threading.Thread(target=_read, args=(reader, result, slowest_s, timeout_s), daemon=True)
        for reader, result in zip(readers, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(num_calls):
            data = bytes([number % 251]) * num_bytes
            writer.write_shm("step", number, data, timeout_s=timeout_s)
        writer.write_shm("close", timeout_s=timeout_s)
    except ChannelError as error:
        for result in results:
            result.errors.append(f"rank 0: {error}")
    for thread in threads:
        thread.join(2 * timeout_s)
        if thread.is_alive():
            raise TimeoutError(f"a reader did not end within {2 * timeout_s:g} s")
    return results


def _read(reader: Any, result: Race, slowest_s: float, timeout_s: float) -> None:
    pauses = random.Random(reader.rank)
    while True:
        try:
            call = reader.read_shm(timeout_s=timeout_s)
        except ChannelError as error:
            result.errors.append(str(error))
            return
        except SystemExit as error:  # it would end this thread without a word
            result.errors.append(f"rank {reader.rank}: read_shm raised {error!r}")
            return
        except Exception as error:  # a torn pickle may raise anything
            result.num_torn += 1
            if result.num_torn > MAX_TORN:
                result.errors.append(f"rank {reader.rank}: read_shm raised {error!r}")
                return
            continue
        if call.method == "close":
            return
        number, data = call.args
        if set(data) <= {number % 251}:
            result.numbers.append(number)
        else:
            result.num_torn += 1
        # rank 1 keeps up, the others do not: one ack is not every ack
        time.sleep(pauses.random() * slowest_s * (reader.rank - 1))


def _pieces(num_bytes: int) -> list[tuple[int, int]]:
    size = max(1, -(-num_bytes // NUM_PIECES))
    return [(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]
