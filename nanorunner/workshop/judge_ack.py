"""Examines the ack exercise: a write_shm and a read_shm on a wire of one frame, between threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from nanorunner.workers.channel import ChannelError
from nanorunner.workshop.code_exercises import Finding, Functions
from nanorunner.workshop.sandbox_channel import (
    ACKS,
    FRAME_BYTES,
    SENT,
    SandboxChannel,
    ends,
    race,
)

NUM_CALLS = 200
SHORT_S = 0.3  # of a wait that must end in an error
LATE_S = 8.0  # it has not heeded SHORT_S: less than the 10 s of the signature's own timeout_s


def examine(functions: Functions) -> Iterator[Finding]:
    """Yield what holds of the learner's functions."""
    kind = type("LearnersChannel", (SandboxChannel,), dict(functions))
    yield Finding("a call arrives as it was sent", _one_call(kind))
    yield Finding(
        f"{NUM_CALLS} calls reach a quick and a slow rank whole and in order", _all_calls(kind)
    )
    yield Finding("read_shm has acked the frame when it returns", _ack(kind))
    yield Finding("a rank that never reads is named by ChannelError, soon", _dead_reader(kind))
    yield Finding("a rank that waits in vain gets ChannelError, soon", _no_frame(kind))
    yield Finding("a call too large for the frame is refused, with nothing sent", _too_big(kind))


def _one_call(kind: type[SandboxChannel]) -> str:
    writer, reader = ends(kind, 2)
    frame = writer.write_shm("step", 7, b"data")
    call = reader.read_shm()
    if (call.method, call.args) != ("step", (7, b"data")):
        return f"step(7, b'data') was sent; {call.method}{call.args} was read"
    if (frame, call.frame) != (1, 1):
        return f"it is frame 1; write_shm returned {frame}, read_shm {call.frame}"
    return ""


def _all_calls(kind: type[SandboxChannel]) -> str:
    for rank, result in enumerate(race(kind, num_calls=NUM_CALLS), start=1):
        if not result.is_perfect(NUM_CALLS):
            said = f"; {result.errors[0]}" if result.errors else ""
            return (
                f"rank {rank} lost {result.num_lost(NUM_CALLS)} calls, {result.num_torn} frames "
                f"were torn{said}"
            )
    return ""


def _ack(kind: type[SandboxChannel]) -> str:
    writer, reader = ends(kind, 2)
    for frame in (1, 2):
        writer.write_shm("step", frame)
        reader.read_shm()
        if (acked := writer.words[ACKS + 1]) != frame:
            return f"after frame {frame} the ack is {acked}"
    return ""


def _dead_reader(kind: type[SandboxChannel]) -> str:
    writer, reader, _ = ends(kind, 3)
    writer.write_shm("step", 1)
    reader.read_shm()
    problem = _raises(lambda: writer.write_shm("step", 2, timeout_s=SHORT_S))
    if problem.startswith("!"):
        return problem[1:]
    return "" if "2" in problem else f"rank 2 never reads, but the error says {problem!r}"


def _no_frame(kind: type[SandboxChannel]) -> str:
    _, reader = ends(kind, 2)
    problem = _raises(lambda: reader.read_shm(timeout_s=SHORT_S))
    return problem[1:] if problem.startswith("!") else ""


def _too_big(kind: type[SandboxChannel]) -> str:
    writer, _ = ends(kind, 2)
    problem = _raises(lambda: writer.write_shm("step", bytes(FRAME_BYTES)))
    if problem.startswith("!"):
        return problem[1:]
    return "" if writer.words[SENT] == 0 else "the frame number has moved on"


def _raises(call: Any) -> str:
    """Return the words of the ChannelError that a call raises; "!" and the problem otherwise."""
    start = time.monotonic()
    try:
        call()
    except ChannelError as error:
        seconds = time.monotonic() - start
        return str(error) if seconds < LATE_S else f"!it came after {seconds:.1f} s"
    return "!no ChannelError came"
