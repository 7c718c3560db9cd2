"""What the GPUs of one host share for small all-reduces: memory that every rank writes to directly.

Each rank owns NUM_BUFFERS buffers of `capacity` slots, which every other rank has mapped. A call
stores its data into the others' memory, looks at its own until all have come, and adds up:

    packet (8 bytes)   bit 63 | 1 | call number mod 2**31 | 32 bits of data | bit 0
    slot (16 bytes)    two packets: the tag twice, 8 bytes of data
    buffer             call number mod NUM_BUFFERS; in it, a share of the slots for each sender

8 aligned bytes are stored and loaded at once, so who sees a packet's tag sees its data: the packet
is its own signal. There is no flag, no fence and no barrier, and data may have any value.

The call number is a counter on the device, so a replayed CUDA graph counts on. A call has
CALL_SHARES shares: each program of a launch adds its part of them as the last thing it does, all
parts together are one call, and a program reads the counter before it adds. So all programs of a
launch see the same number, and none has to be the last.

Why no packet is overwritten before it was read, whatever the ranks' speeds. All calls of a rank are
on one stream, and a kernel sends only after the kernel before it has ended (with programmatic
launch: after gdc_wait). No rank can end a call before every other has sent in it: it waits for the
packets of all, or (two shots) for a sum of rank 0, which has waited for them.

    1  A rank that sends in call c + 2 has ended its call c + 1, so every other rank had sent in
       call c + 1, and had ended its call c before.
    2  Therefore, while a rank is in call c, others send in c and c + 1, never further ahead, and it
       has read all packets of c - 1 and before. For that alone two buffers would do.
    3  The third makes room to clean up. During call c the buffer of c - 1, which will be that of
       c + 2, is nobody's. Each call wipes the next stripe of STRIPE slots of it. So no packet gets
       older than NUM_BUFFERS * capacity / STRIPE calls (6,144 by default), and when the tag comes
       round again, after 2**31 calls, no old packet can pass for a new one.

This holds for any mix of forms and sizes, as long as all ranks make the same calls in the same
order. Steps in flight (depth 2) do not enter: they lengthen a stream, and a stream has one order.

Who gives up. At every `check_every`-th look a waiting program reads two words in host memory: the
abort word, set by the host, and the error word, set by a program that gives up, so that the rank's
later kernels do not wait either. It gives up by itself after the time in the table. What a call
returns then is nonsense, and the ring is of no further use: the host looks at the error word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_BUFFERS = 3
STRIPE = 128  # slots that a call wipes
CALL_SHARES = 1 << 16  # and at most so many programs in a launch
SLOT_BYTES = 16
WORD_BYTES = 8  # of data in a slot
DEFAULT_CAPACITY = 1 << 18  # 1 MiB of data from each of 2 ranks; 12 MiB of memory on each rank
CHECK_EVERY = 8192  # looks, about 5 ms: the two words lie behind a slow bus

# Places in the table, in int64 elements, and in the two words.
COUNTER, GIVE_UP_AFTER, WORDS, PEERS = 0, 1, 2, 3
ABORT, ERROR = 0, 1


@dataclass(frozen=True, kw_only=True)
class PeerRing:
    """One rank's view of the ring.

    table: int64 on the device, [PEERS + ranks]: call counter in shares; the time to give up after
    (nanoseconds on a GPU, looks in the interpreter); address of the two int32 words; and of each
    rank's memory, as this rank sees it. Owner: whoever mapped that memory, and as long as it is
    mapped. Last writer: the kernels, of the counter alone.
    """

    rank: int
    ranks: int
    capacity: int  # slots in a buffer; a multiple of STRIPE
    max_programs: int  # that surely run at once: they wait for each other; equal on all ranks
    table: torch.Tensor
    check_every: int = CHECK_EVERY


def ring_bytes(capacity: int) -> int:
    """Return the size of one rank's memory, which must be zero before the first call."""
    return NUM_BUFFERS * capacity * SLOT_BYTES


def make_table(
    peers: list[int], words: int, give_up_after: int, device: torch.device
) -> torch.Tensor:
    """Return the table of a new ring from addresses; PeerRing says what it holds."""
    places = [0, give_up_after, words, *peers]
    return torch.tensor(places, dtype=torch.int64, device=device)  # sync: once, at the start
