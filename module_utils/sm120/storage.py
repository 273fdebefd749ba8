"""Writing that survives a power cut: temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import glob
import hashlib
import os
import tempfile
from pathlib import Path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Put these bytes at a path, whole or not at all, with a modification time of now."""
    prefix = f".{path.name}.sm120-"
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
        leftover.unlink()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix)
    try:
        with os.fdopen(handle, "wb") as target:
            target.write(data)
            target.flush()
            os.fchmod(target.fileno(), mode)
            if owner is not None:
                os.fchown(target.fileno(), *owner)
            os.fsync(target.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner enters; parents get the usual mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        folder.mkdir(mode=0o700)
        sync_folder(folder.parent)
    folder.chmod(0o700)
