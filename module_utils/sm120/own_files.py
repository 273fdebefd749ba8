"""Files and folders of our own on a host: put there, and taken away again without a trace."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .storage import make_private_folder, sha256, write_file


class NotOurs(Exception):
    """Something else is where a file of ours belongs."""


@dataclass(frozen=True)
class Record:
    """What was put on the host: {path: sha256}, the folders made for it, and what else the caller keeps."""

    files: dict[str, str]
    folders: tuple[str, ...] = ()
    extra: Any = None

    def dump(self) -> bytes:
        values = {"files": self.files, "folders": self.folders, "extra": self.extra}
        return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Change:
    """What is to be done, and the record that belongs to it."""

    write: dict[str, bytes]
    remove: tuple[str, ...]
    record: Record
    changed: bool
    before: dict[str, bytes]


def load(path: Path) -> Record | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Record(dict(values["files"]), tuple(values["folders"]), values.get("extra"))


def _read(path: str) -> bytes | None:
    there = Path(path)
    if not there.exists() and not there.is_symlink():
        return None
    if there.is_symlink() or not there.is_file():
        raise NotOurs(f"{path} is no plain file")
    return there.read_bytes()


def _missing_folders(path: str) -> list[str]:
    return [str(folder) for folder in reversed(Path(path).parents) if not folder.is_dir()]


def plan(wanted: Mapping[str, bytes], record: Record | None, extra: Any = None, mode: int = 0o644) -> Change:
    """Compare; a file that is there and not ours is left alone and refused."""
    known = record.files if record else {}
    before: dict[str, bytes] = {}
    write: dict[str, bytes] = {}
    for path, data in wanted.items():
        found = _read(path)
        if found is not None:
            before[path] = found
            if path not in known and found != data:
                raise NotOurs(f"{path} is there already and was not written by us")
        if found != data or stat.S_IMODE(Path(path).stat().st_mode) != mode:
            write[path] = data
    gone = tuple(path for path in known if path not in wanted)
    folders = dict.fromkeys(record.folders if record else ())
    folders.update(dict.fromkeys(folder for path in write for folder in _missing_folders(path)))
    made = Record({path: sha256(data) for path, data in wanted.items()}, tuple(folders), extra)
    for path in gone:
        before[path] = _read(path) or b""
    return Change(write, gone, made, bool(write or gone) or made != record, before)


def apply(change: Change, record_path: Path, mode: int = 0o644) -> None:
    """The way back is on disk before the first step."""
    make_private_folder(record_path.parent)
    known = load(record_path)
    both = {**(known.files if known else {}), **change.record.files}
    write_file(record_path, Record(both, change.record.folders, change.record.extra).dump(), 0o600)
    for path, data in change.write.items():
        for folder in _missing_folders(path):
            Path(folder).mkdir()
            Path(folder).chmod(0o755)  # whatever the umask: apt reads its key as another user
        write_file(Path(path), data, mode)
    for path in change.remove:
        Path(path).unlink(missing_ok=True)
    write_file(record_path, change.record.dump(), 0o600)


def forget(record_path: Path) -> None:
    """Remove a record, and the project's state folders that are empty then."""
    record_path.unlink(missing_ok=True)
    for folder in (record_path.parent, record_path.parent.parent):
        if "sglang-sm120" not in folder.parts:
            return
        try:
            folder.rmdir()
        except OSError:
            return  # other records are in it


def take_away(record: Record, record_path: Path) -> None:
    for path in record.files:
        Path(path).unlink(missing_ok=True)
    for folder in reversed(record.folders):
        try:
            Path(folder).rmdir()
        except OSError:
            continue  # others use it now
    forget(record_path)
