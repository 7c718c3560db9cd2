"""Exercise ack: a wire of one frame that loses no call.

    byte 0      8           16 + 8 * r                 1024
         | sent | num_bytes | ack[r] ................. | payload ................... |

    nanorunner check ack my_ack.py

Below is the wire as a first draft has it: rank 0 writes and wakes the others, a rank wakes up and
reads. It loses calls. Make rank 0 wait until the frame may be overwritten, and let each rank say
when that is; nothing may wait for ever.

`self` is one end of the wire (workshop/sandbox_channel.py):

    self.words      the header: self.words[SENT], self.words[NUM_BYTES], self.words[ACKS + rank]
    self.payload    the rest; self.copy_in(data) and self.copy_out(num_bytes) move it by pieces
    self.events     self.events[rank - 1] wakes a rank
    self.ranks      the ranks that read; self.rank is this end's own
    self.frame      the last frame that this end wrote or read; the first is 1
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from nanorunner.workers.channel import Call
from nanorunner.workshop.sandbox_channel import NUM_BYTES, SENT, SandboxChannel


def write_shm(
    self: SandboxChannel,
    method: str,
    *args: Any,
    timeout_s: float = 10.0,
    check: Callable[[], None] | None = None,
) -> int:
    """Put one call on the wire and return its frame number.

    Raises ChannelError (of workers/channel.py), with nothing written, for a call larger than
    self.payload, and naming the ranks that have not acked the last frame within timeout_s.
    """
    data = pickle.dumps([method, *args], protocol=5)
    self.copy_in(data)
    self.words[NUM_BYTES] = len(data)
    self.frame += 1
    self.words[SENT] = self.frame
    for event in self.events:
        event.set()
    return self.frame


def read_shm(self: SandboxChannel, timeout_s: float = 10.0) -> Call:
    """Wait for the next frame and return it as Call(frame, method, args).

    Raises ChannelError when no frame comes within timeout_s.
    """
    event = self.events[self.rank - 1]
    event.wait(timeout_s)
    event.clear()
    self.frame = self.words[SENT]
    method, *args = pickle.loads(self.copy_out(self.words[NUM_BYTES]))
    return Call(self.frame, method, tuple(args))
