"""The tap: a line for every frame that rank 0 sends, on stderr (`--tap`), as JSON (`--tap-json`).

    channel.write_shm -> Tap.sending()      before a frame is written: its number, call and time
    a rank's ack      -> ack_stamps.py      the rank's own time, in shared memory
    launch.py         -> Tap.look()         says the frames that every rank has acked, in order

What the times mean. A frame is *sent* when rank 0 has pickled the call, has found room in the ring
and begins to copy: the copy is a few us, up to 0.1 ms for the largest frame. It is *acked* when
rank r has copied it out and stored its ack, by r's own reading of the clock that all processes
share, so it does not matter when rank 0 looks. The error of an ack stands in ack_stamps.py. What
was not measured is not shown: `none` is a rank that never acked, `?` an ack without a true time.

A line is printed only when the last rank has acked, at rank 0's next look: when a step's output has
been read, when a call with a reply is over, and at the end. `bytes` is the pickle in the frame,
without its head of 8. At tp 1 nothing is sent.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from nanorunner.config import Config
from nanorunner.tap_file import TapFile
from nanorunner.tap_words import Words, argument_lines, arguments
from nanorunner.workers.ack_stamps import LOST, AckStamps
from nanorunner.workers.channel import Channel

NO_FRAMES = "tap: tp 1 has no wire: rank 0 calls its own runner, and no frame is sent; use --tp 2"
ABOUT = """\
tap: a line for each frame of rank 0. +ms: since the sending of the frame before.
tap: acks, ms: from a frame's sending until rank r had copied it out, by its own clock."""
ARGUMENTS_LEVEL = 2
INDENT = " " * 7
ACK_CHARS = 9  # of "r1 0.071 ", the usual width of an ack

logger = logging.getLogger("nanorunner")


@dataclass(slots=True)
class SentFrame:
    """A frame, from its sending until it has been said."""

    number: int
    method: str
    args: tuple[Any, ...]
    num_bytes: int
    call_bytes: int
    part: int  # of its call, from 0: a large call takes several frames
    num_parts: int
    sent_ns: int = 0
    acked_ns: dict[int, int] = field(default_factory=dict)  # by rank; LOST: who knows when


class Tap:
    """Watches one engine's wire. For rank 0's one thread; the engine closes it."""

    def __init__(self, tp: int, level: int, file: TapFile | None) -> None:
        """level: 0 prints nothing, 1 a line a frame, 2 also the arguments."""
        self._ranks = range(1, tp)
        self._level = level
        self._file = file
        self._stamps: AckStamps | None = None
        self._words = Words()
        self._unsaid: deque[SentFrame] = deque()
        self._part = 0  # of the next frame
        self._last_sent_ns: int | None = None  # of the last frame that was said
        self._is_mute = False  # stderr is gone
        self._other_clocks: set[int] = set()  # ranks that were reported

    def attach(self, memory: memoryview, channel: Channel) -> None:
        """Listen to a wire before its first frame; ValueError for more ranks than it can serve."""
        self._stamps = AckStamps(memory, len(self._ranks) + 1)
        channel.on_frame = self.sending
        self._print(ABOUT)
        acks = "acks, ms".ljust(ACK_CHARS * len(self._ranks))
        self._print(f"frame  {'method':<11} {'bytes':>9} {'+ms':>10}  {acks} what")

    def sending(
        self,
        number: int,
        method: str,
        args: tuple[Any, ...],
        start: int,
        num_bytes: int,
        call_bytes: int,
    ) -> None:
        """Note a frame that is about to be written; the channel's on_frame."""
        stamps = self._stamps
        assert stamps is not None, "attach() comes first"
        if 2 * len(self._unsaid) >= stamps.num_places:  # before any stamp is overwritten
            self._collect(stamps)
        self._part = 0 if start == 0 else self._part + 1
        # every part but the last is as large as the first
        num_parts = -(-call_bytes // num_bytes) if start == 0 else self._unsaid[-1].num_parts
        frame = SentFrame(number, method, args, num_bytes, call_bytes, self._part, num_parts)
        self._unsaid.append(frame)
        frame.sent_ns = time.perf_counter_ns()  # the last thing here

    def look(self) -> None:
        """Say every frame whose acks are all there, up to the first where one is missing."""
        if self._stamps is not None:
            self._collect(self._stamps)
        while self._unsaid and len(self._unsaid[0].acked_ns) == len(self._ranks):
            self._say(self._unsaid.popleft())

    def close(self) -> None:
        """Say what is left, with the acks that are there, and let memory and file go.

        Before the segment's own end. A second call does nothing.
        """
        stamps, self._stamps = self._stamps, None
        try:
            if stamps is not None:
                self._collect(stamps)
            while self._unsaid:
                self._say(self._unsaid.popleft())
        finally:
            self._unsaid.clear()
            if stamps is not None:
                stamps.close()
            if self._file is not None:
                self._file.close()

    def _collect(self, stamps: AckStamps) -> None:
        """Take the times of new acks."""
        for frame in self._unsaid:
            for rank in self._ranks:
                if rank in frame.acked_ns:
                    continue
                acked_ns = stamps.read(rank, frame.number)
                if acked_ns is not None:
                    frame.acked_ns[rank] = self._checked(frame, rank, acked_ns)

    def _checked(self, frame: SentFrame, rank: int, acked_ns: int) -> int:
        """Return a stamp, or LOST when it cannot be of the clock that rank 0 reads."""
        if acked_ns == LOST or frame.sent_ns <= acked_ns <= time.perf_counter_ns():
            return acked_ns
        if rank not in self._other_clocks:
            self._other_clocks.add(rank)
            logger.warning(
                "tap: rank %d acked frame %d at %d ns by its own clock, but it was sent at %d: "
                "their clocks are not one, and such times are not shown",
                rank,
                frame.number,
                acked_ns,
                frame.sent_ns,
            )
        return LOST

    def _say(self, frame: SentFrame) -> None:
        what = self._words.of(frame.method, frame.args) if frame.part == 0 else ""
        if frame.num_parts > 1:
            part = f"part {frame.part + 1} of {frame.num_parts}"
            total = f" of a call of {frame.call_bytes:,} bytes: {what}" if what else ""
            what = part + total
        named = None
        if self._level >= ARGUMENTS_LEVEL and frame.part == 0:
            named = arguments(frame.method, frame.args)
        if self._level > 0:
            self._print(self._line(frame, what))
            if named is not None:
                for line in argument_lines(named):
                    self._print(INDENT + line)
        if self._file is not None:
            self._file.write(_row(frame, what, named))
        self._last_sent_ns = frame.sent_ns

    def _line(self, frame: SentFrame, what: str) -> str:
        since = "-"  # the first frame comes after none
        if self._last_sent_ns is not None:
            since = f"+{(frame.sent_ns - self._last_sent_ns) / 1e6:.2f}"
        acks = " ".join(f"r{rank} {_ack(frame, rank)}" for rank in self._ranks)
        acks = acks.ljust(ACK_CHARS * len(self._ranks))
        return (
            f"{frame.number:5}  {frame.method:<11} {frame.num_bytes:9,} {since:>10}  {acks} {what}"
        )

    def _print(self, line: str) -> None:
        if self._level == 0 or self._is_mute:
            return
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:  # its reader has left, as `| head` does: there is nobody to tell
            self._is_mute = True


def prints_frames(config: Config) -> bool:
    """Whether lines will come between whatever else is printed."""
    return config.tap > 0 and config.tp > 1


def open_tap(config: Config) -> Tap | None:
    """Return the tap that the settings ask for, None without one or without a wire.

    Raises ValueError when tap_json cannot be written. At tp 1 one line says that nothing will come.
    """
    if config.tap == 0 and config.tap_json is None:
        return None
    file = None if config.tap_json is None else TapFile(config.tap_json)
    if config.tp > 1:
        return Tap(config.tp, config.tap, file)
    if file is not None:
        file.close()  # it is there, and empty
    print(NO_FRAMES, file=sys.stderr, flush=True)
    return None


def _ack(frame: SentFrame, rank: int) -> str:
    acked_ns = frame.acked_ns.get(rank)
    if acked_ns is None:
        return "none"
    return "?" if acked_ns == LOST else f"{(acked_ns - frame.sent_ns) / 1e6:.3f}"


def _row(frame: SentFrame, what: str, named: dict[str, Any] | None) -> dict[str, Any]:
    """Return a frame's line of JSON: the times are perf_counter_ns, null for `?`.

    A rank that has not acked is left out of acked_ns.
    """
    acked_ns = {str(rank): None if ns == LOST else ns for rank, ns in frame.acked_ns.items()}
    row: dict[str, Any] = {
        "frame": frame.number,
        "method": frame.method,
        "bytes": frame.num_bytes,
        "sent_ns": frame.sent_ns,
        "acked_ns": dict(sorted(acked_ns.items(), key=lambda pair: int(pair[0]))),
        "what": what,
    }
    if frame.num_parts > 1:
        row |= {"part": frame.part + 1, "parts": frame.num_parts}
    return row if named is None else row | {"arguments": named}
