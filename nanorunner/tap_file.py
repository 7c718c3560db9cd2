"""The file of `--tap-json`: a JSON object a line, there as soon as its frame is said.

It may be a named pipe, so that another program shows the frames as they come. Whoever reads it must
be there before the start, and may not hold up the engine: one who leaves, or reads nothing for
READER_WAIT_S, ends the file with a warning, and the run goes on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import time
from typing import Any

READER_WAIT_S = 5.0

logger = logging.getLogger("nanorunner")


class TapFile:
    """A file of JSON lines; what was there before is overwritten."""

    def __init__(self, path: str) -> None:
        """Open it; ValueError, by the setting's name, when that cannot be done now."""
        self._path = path
        # without O_NONBLOCK a pipe that nobody reads would hold us here for ever
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ENXIO:
                reason = "nobody reads this pipe; start its reader first"
            else:
                reason = f"{os.strerror(error.errno or 0)}; name a file in a folder that is there"
            raise ValueError(f"tap_json {path}: {reason}") from error

    def write(self, row: dict[str, Any]) -> None:
        """Write one line; when that fails, the reason is logged and no more is written."""
        if self._fd < 0:
            return
        data = memoryview(json.dumps(row).encode() + b"\n")
        deadline = time.monotonic() + READER_WAIT_S
        try:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # a pipe is full
                    left_s = max(0.0, deadline - time.monotonic())  # 0: it is looked at once more
                    if not select.select([], [self._fd], [], left_s)[1]:
                        raise TimeoutError(f"read by nobody for {READER_WAIT_S:g} s") from None
        except OSError as error:  # the reader has left, or the disk is full
            self.close()
            logger.warning(
                "tap_json %s: %s; from frame %d on nothing is written there",
                self._path,
                error.strerror or error,
                row["frame"],
            )

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
