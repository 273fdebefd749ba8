"""Purging FlashInfer's JIT cache: only what is proved to be one, and never under a running process."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

# Compiled code lies in <version>/<architectures>/, or in <version>/ itself where no architecture was set. The
# rest (cubins, tuning results) is the same before and after an edit, and an air-gapped host cannot fetch it
# again: it stays.
_VERSION = re.compile(r"^\d+\.\d+\w*(\.\w+)*(\+[\w.]+)?$")
_BELOW_VERSION = re.compile(r"^(\d+[a-z]?(_\d+[a-z]?)*|cached_ops|generated|flashinfer_jit\.log)$")
LOG = "flashinfer_jit.log"


class Refused(Exception):
    """What is there is not a FlashInfer cache, or it is in use."""


class Busy(TypedDict):
    pid: int
    command: str
    path: str


@dataclass(frozen=True)
class Contents:
    """What a purge removes from a cache, and how much that is."""

    folder: Path
    paths: tuple[Path, ...]
    size: int


def cache_folder(base: Path) -> Path:
    """The cache below a home or workspace folder; refuses one that leads elsewhere."""
    if not base.is_absolute() or base == Path("/"):
        raise Refused(
            f"{base} cannot hold a cache: wanted the absolute path of a home folder, not / itself; "
            "remove /.cache/flashinfer by hand where there is one"
        )
    folder = base / ".cache" / "flashinfer"
    for part in (folder.parent, folder):
        if part.is_symlink():
            raise Refused(
                f"{part} is a symbolic link to {part.resolve()}: purge that place by hand if it is meant"
            )
    return folder


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def contents(folder: Path) -> Contents:
    """The compiled code in a cache; refuses a folder that FlashInfer cannot have filled."""
    if not folder.is_dir():
        return Contents(folder, (), 0)
    entries = sorted(folder.iterdir())
    versions = [entry for entry in entries if entry.is_dir() and _VERSION.match(entry.name)]
    if entries and not versions and not any(entry.name in ("cubins", LOG) for entry in entries):
        names = ", ".join(entry.name for entry in entries[:3])
        raise Refused(
            f"{folder} is not a FlashInfer cache, it holds {names}: nothing was removed, look at it"
        )
    paths, size = [], 0
    for version in versions:
        strange = [
            each for each in version.iterdir() if each.is_symlink() or not _BELOW_VERSION.match(each.name)
        ]
        if version.is_symlink() or strange:
            named = strange[0] if strange else version
            raise Refused(f"{named} is nothing that FlashInfer puts there: nothing was removed, look at it")
        files = list(_files(version))
        # Its log alone is what every import of FlashInfer leaves, also after a purge.
        if any(file.name != LOG for file in files):
            paths.append(version)
            size += sum(file.lstat().st_size for file in files)
    return Contents(folder, tuple(paths), size)


def _open_files(process: Path) -> Iterator[str]:
    """Paths that a process has open or mapped; nothing where it is gone or not ours to look at."""
    handles: list[Path] = []
    with suppress(OSError):
        handles = list((process / "fd").iterdir())
    for handle in handles:
        with suppress(OSError):  # closed meanwhile: the others count all the same
            yield str(handle.readlink())
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]


def users_of(folder: Path, proc: Path = Path("/proc")) -> list[Busy]:
    """Processes that have a file below a folder open or mapped."""
    inside = f"{folder.resolve()}/"
    busy: list[Busy] = []
    for process in sorted(proc.glob("[0-9]*"), key=lambda each: int(each.name)):
        for path in _open_files(process):
            if path.startswith(inside):
                command = "gone by now"
                with suppress(OSError):
                    command = (process / "comm").read_text(errors="replace").strip()
                busy.append({"pid": int(process.name), "command": command, "path": path})
                break
    return busy


def busy_message(busy: list[Busy]) -> str:
    names = ", ".join(f"{each['command']} (process {each['pid']}, {each['path']})" for each in busy)
    return f"the cache is in use by {names}: stop that first, then run this again; nothing was removed"


def purge(found: Contents) -> None:
    """Remove what `contents` named, and the folder when nothing is left in it."""
    for path in found.paths:
        shutil.rmtree(path)
    if found.paths and not any(found.folder.iterdir()):
        found.folder.rmdir()
