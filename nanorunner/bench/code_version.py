"""Which code is running: the commit, and a hash of the source that a changed tree cannot fake.

Needs no torch: a sweep asks before it starts anything.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # the clone, where it is one
GIT_TIMEOUT_S = 10.0
TRACKED_FILES = ("--porcelain", "--untracked-files=no")  # somebody's notes change no result


def code_version() -> str:
    """Return what a row's key holds: the commit without regard to changes, and source_digest()."""
    commit = git_commit() or "no commit"
    return f"{commit.removesuffix('+changes')} {source_digest()}"


def git_commit() -> str | None:
    """Return this clone's commit, with "+changes" when files differ; None outside of a clone.

    NANORUNNER_COMMIT names it where a copy of the tree without its history is measured.
    """
    if "NANORUNNER_COMMIT" in os.environ:
        return os.environ["NANORUNNER_COMMIT"]
    if not (ROOT / ".git").exists():  # installed, perhaps below somebody else's repository
        return None
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", *TRACKED_FILES) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def source_digest(package: Path = PACKAGE) -> str:
    """Return a hash of the package's own Python and YAML files, but for the ready sweeps.

    The YAML decides results: shapes of models, sizes of kernels. workers/, kernels/ and configs/
    are links, which os.walk follows when told to.
    """
    sweeps = package / "configs" / "sweeps"  # what is measured, not how: a row has its settings
    total = hashlib.sha256()
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(each for each in folders if Path(folder, each) != sweeps)
        for name in sorted(names):
            if name.endswith((".py", ".yaml")):
                path = Path(folder, name)
                total.update(path.relative_to(package).as_posix().encode() + b"\0")
                total.update(path.read_bytes())
    return total.hexdigest()[:12]


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=GIT_TIMEOUT_S,
    )
    return done.stdout.strip()
