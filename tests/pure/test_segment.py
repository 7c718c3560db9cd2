"""The wire's shared memory has no name once it exists, and old names are cleared away."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import subprocess
import sys
import time

import pytest

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


def test_full_shared_memory_is_refused_in_words_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_space(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda size: name)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"1,048,576 bytes .* --shm-size=1g"):
        Segment()
    assert not (FOLDER / (PREFIX + name)).exists()
    assert set(os.listdir("/proc/self/fd")) <= before


ON_A_FULL_FOLDER = """
mount -t tmpfs -o size=8k tmpfs /dev/shm && head -c 8192 /dev/zero > /dev/shm/full
exec "$@"
"""
MAKE_ONE = "from nanorunner.segment import Segment; Segment()"


def test_a_full_folder_is_no_bus_error() -> None:
    in_a_namespace = ["unshare", "-rm", "sh", "-ec"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*in_a_namespace, ON_A_FULL_FOLDER, "sh", "true"], capture_output=True, timeout=20
        ).returncode
    ):
        pytest.skip("no user namespaces here")
    command = [*in_a_namespace, ON_A_FULL_FOLDER, "sh", sys.executable, "-c", MAKE_ONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1, done
    assert "/dev/shm has 0 free (No space left on device)" in done.stderr


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
