"""The wire's shared memory has no name once it exists, and old names are cleared away."""

from __future__ import annotations

import os
import secrets
import time

from nanorunner.segment import FOLDER, PREFIX, STALE_S, Segment, remove_stale


def test_a_segment_has_no_name_and_belongs_to_its_user_alone() -> None:
    segment = Segment()
    # of this one: other programs make and remove theirs meanwhile
    assert os.readlink(f"/proc/self/fd/{segment.fd}").endswith(" (deleted)")
    status = os.fstat(segment.fd)
    assert status.st_size == len(segment.buffer) == 1 << 20
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0
    segment.close()
    segment.close()


def test_only_old_names_are_removed() -> None:
    old, new = (FOLDER / (PREFIX + secrets.token_hex(8)) for _ in range(2))
    try:
        for path in (old, new):
            path.touch()
        then = time.time() - STALE_S - 5
        os.utime(old, (then, then))
        remove_stale()
        assert not old.exists()
        assert new.exists()
    finally:
        for path in (old, new):
            path.unlink(missing_ok=True)
