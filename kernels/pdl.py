"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

A GPU leaves about a microsecond between two kernels of a stream. With PDL the next kernel is placed
on the device as soon as every program of this one has started, and fetches what no kernel writes
(weights) while it waits. The rule that keeps this correct, for every kernel launched with PDL:

    gdc_launch_dependents()   at the start: a hint to the device, it orders nothing
    load weights              constants alone
    gdc_wait()                returns once the kernel before has ended and its writes are visible
    everything else           all that an earlier kernel writes, or still reads

A kernel may let its successor start after its own wait instead: "late". Then all that ran before
the late kernel has ended when the successor starts, and the successor may read, before its wait,
whatever the late kernel itself does not write. Decode attention reads lengths, block tables and
cached KV so.

Behind a late kernel of which it needs nothing, a kernel may even wait last: decode attention does,
behind the attention of the same step's prompts. It may then read what the late kernel does not
write, past the first cache, and write what the late kernel neither reads nor writes; and nothing
that the late kernel reads may be freed between the two launches, or the second may be given it.

Every program waits, also one that finds nothing to do: a grid that ended without waiting would
release its successor while older kernels still run. (Waiting last, one program is enough.)
"""

from __future__ import annotations

import functools
import os

import torch

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton, or one that knows no PDL: can_overlap() says no
    gdc_launch_dependents = gdc_wait = None

__all__ = ["can_overlap", "gdc_launch_dependents", "gdc_wait", "launch_options"]

FIRST_CAPABILITY = (9, 0)  # Hopper


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Return whether kernels on this device may be launched with PDL."""
    if device.type != "cuda" or gdc_wait is None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def launch_options(use_pdl: bool) -> dict[str, bool]:
    """Return the launch's keyword arguments; a kernel that never waits must not get them."""
    return {"USE_PDL": True, "launch_pdl": True} if use_pdl else {"USE_PDL": False}
