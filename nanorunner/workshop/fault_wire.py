"""Faults of the wire: a call larger than the ring, a frame skipped, and a wire without acks."""

from __future__ import annotations

import os
import time

from nanorunner.errors import RankDied
from nanorunner.workers.channel import FRAGMENT_BYTES, SEGMENT_BYTES
from nanorunner.workshop.fault_lab import Lab
from nanorunner.workshop.fault_processes import DETECTION_S, VICTIM, WORK_S
from nanorunner.workshop.sandbox_channel import AT_ONCE, POLICIES, policy_channel, race

BIG_BYTES = 8 << 20
NUM_CALLS = 200
MAX_NOTES = 200  # calls after which a skipped frame must have been noticed


def too_big(lab: Lab) -> None:
    """A call eight times as large as all of the shared memory."""
    ranks = lab.start(2)
    (_, (_, _, frame_before)) = ranks.call_all("echo", b"")
    data = os.urandom(BIG_BYTES)
    start = time.monotonic()
    (_, (_, num_bytes, frame)) = ranks.call_all("echo", data)
    seconds = time.monotonic() - start
    lab.report.did(f"sent a call of {BIG_BYTES:,} bytes over {SEGMENT_BYTES:,} of shared memory")
    num_frames = frame - frame_before
    lab.report.saw(
        f"rank 1 read it in {num_frames} frames ({frame_before + 1} to {frame}) of at most "
        f"{FRAGMENT_BYTES:,} bytes and put {num_bytes:,} bytes together"
    )
    lab.report.took(seconds, WORK_S, "there and back")
    lab.report.must(num_bytes == BIG_BYTES, "bytes are missing")
    lab.report.must(num_frames > BIG_BYTES // FRAGMENT_BYTES, "it fits in so few frames?")


def skip(lab: Lab) -> None:
    """Rank 1's counter of frames is one ahead, as if it had read a frame that never came."""
    ranks = lab.start(2)
    ranks.call_all("sabotage", VICTIM, "skip", 0.0)
    lab.report.did("moved rank 1's frame counter one ahead, then went on making calls")
    start = time.monotonic()
    try:
        for number in range(MAX_NOTES):
            ranks.call("note", number)
            time.sleep(DETECTION_S / MAX_NOTES)
    except RankDied as died:
        seconds = time.monotonic() - start
        lab.report.saw(f"RankDied: {str(died).partition(chr(10))[0]}")
        last_line = died.traceback.strip().splitlines()[-1]
        lab.report.saw(f"rank 1 said: {last_line}")
        lab.report.took(seconds, DETECTION_S, "from the first call to the report")
        lab.report.must(died.rank == VICTIM, "another rank is blamed")
        lab.report.must("ChannelError" in last_line, "the wire did not notice")
    else:
        lab.report.must(False, "nobody noticed")


def no_ack(lab: Lab) -> None:
    """A wire of one frame, between threads: when may rank 0 overwrite it?"""
    lab.report.did(
        f"sent {NUM_CALLS} numbered calls through a one-frame buffer to a quick and a slow reader"
    )
    start = time.monotonic()
    for policy in POLICIES:
        results = race(policy_channel(policy), num_calls=NUM_CALLS)
        told = ", ".join(
            f"rank {rank} lost {result.num_lost(NUM_CALLS)} ({result.num_torn} torn)"
            for rank, result in enumerate(results, start=1)
        )
        lab.report.saw(f"overwrite {policy}: {told}")
        is_perfect = all(result.is_perfect(NUM_CALLS) for result in results)
        if policy == AT_ONCE:
            lab.report.must(not is_perfect, "without acks nothing was lost, which is pure luck")
        elif policy == POLICIES[-1]:
            lab.report.must(is_perfect, "with every ack a call was lost")
    lab.report.took(time.monotonic() - start, WORK_S, "for all three")
