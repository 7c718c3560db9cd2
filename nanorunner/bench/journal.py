"""A sweep's rows on disk: one JSON object a line, only ever appended, each line synced.

    {"key": ..., "settings": {...}, "status": "ok", "result": {...}}
    {"key": ..., "settings": {...}, "status": "failed", "error": [...]}
    {"key": ..., "sett                     <- killed here: a torn line, which counts for nothing

A line counts once its newline is there. A kill at any moment can tear the last line alone, because
the one before was synced first; the next writer cuts the torn end off. Two sweeps cannot write one
folder: the file is locked while it is open.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

FILE_NAME = "rows.jsonl"

Row = dict[str, Any]


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Return the complete rows and how many bytes of a torn line follow them.

    Raises ValueError naming the line for a complete line that is no JSON object: a kill cannot
    leave one, so somebody has edited or damaged the file.
    """
    if not path.exists():
        return [], 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(content[:end].split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "key" not in row:
            raise ValueError(f"{path}, line {number}: is no row of a sweep; remove the line")
        rows.append(row)
    return rows, len(content) - end


def latest(rows: list[Row]) -> dict[str, Row]:
    """Return the newest row of each key: a failed one that was run again is replaced."""
    return {row["key"]: row for row in rows}


class Journal:
    """The file open for appending, locked; a torn end is cut off when it is opened.

    rows: what was there before. num_torn_bytes: what was cut off. Raises BlockingIOError when
    another process has it open, ValueError as read_rows does.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows, self.num_torn_bytes = read_rows(self.path)
            if self.num_torn_bytes:
                self._file.truncate(self.path.stat().st_size - self.num_torn_bytes)
            _sync_folder(folder)  # the file's name is as lasting as its lines
        except BaseException:
            self._file.close()
            raise

    def append(self, row: Row) -> None:
        """Write one row; when this returns, no kill can lose it."""
        line = json.dumps(row, allow_nan=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.append(row)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
