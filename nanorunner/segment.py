"""The wire's shared memory: made by rank 0, inherited by the ranks, nameless from then on.

    SharedMemory(create) -> open a descriptor -> unlink -> ranks start with the descriptor

The name exists for less than a millisecond, before any rank does. So no crash after it, not even
the end of the whole process group, can leave a segment behind, and two engines cannot meet in one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from nanorunner.workers.channel import SEGMENT_BYTES

FOLDER = Path("/dev/shm")
PREFIX = "nanorunner-"
STALE_S = 10.0  # no living engine keeps a name for longer than a few milliseconds

logger = logging.getLogger("nanorunner")


class Segment:
    """SEGMENT_BYTES of zero-filled shared memory, private to this user.

    buffer: Owner: rank 0, which alone closes it. Place: host memory, mapped by every rank.
    Lifetime: until close() here and the end of the ranks. Last writer: channel.py says which bytes
    are whose.
    """

    def __init__(self) -> None:
        """Make it; RuntimeError where shared memory is no file, OSError where it is full."""
        if not FOLDER.is_dir():
            raise RuntimeError("tp 2 and more need Linux or WSL2 (no /dev/shm here); use tp 1")
        remove_stale()
        # first: starting it between create and unlink would stretch the time the name exists
        resource_tracker.ensure_running()
        name = PREFIX + secrets.token_hex(16)
        self._memory = SharedMemory(name=name, create=True, size=SEGMENT_BYTES)  # mode 0600
        self.fd = -1
        try:
            self.fd = os.open(FOLDER / name, os.O_RDWR)
            _reserve(self.fd)
        except OSError:
            self.close_descriptor()
            self._memory.close()
            raise
        finally:
            self._memory.unlink()
        buffer = self._memory.buf
        assert buffer is not None, "open memory has a buffer"
        self.buffer: memoryview = buffer

    def close_descriptor(self) -> None:
        """Drop rank 0's copy of the descriptor, once every rank has its own."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Unmap the memory; every view of it must have been released. A second call is harmless."""
        self.close_descriptor()
        self.buffer.release()
        self._memory.close()


def _reserve(fd: int) -> None:
    """Take the segment's pages: making it took none, and a write to a missing one is a SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, SEGMENT_BYTES)
    except OSError as error:
        free = shutil.disk_usage(FOLDER).free
        raise OSError(
            f"tp 2 and more need {SEGMENT_BYTES:,} bytes of shared memory, {FOLDER} has {free:,} "
            f"free ({error.strerror}); remove what others left there, or give the container more "
            "(docker run --shm-size=1g, or --ipc=host)"
        ) from error


def remove_stale() -> None:
    """Remove names that a crash between create and unlink has left."""
    for path in FOLDER.glob(PREFIX + "*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or another user's
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
                logger.warning("removed %s, which a crashed start had left", path)
