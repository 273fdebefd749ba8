"""Files and folders of our own on a host: put there, and taken away again without a trace."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .storage import make_private_folder, sha256, write_file


class NotOurs(Exception):
    """Something else is where a file of ours belongs."""


@dataclass(frozen=True)
class Record:
    """What was put on the host: {path: sha256}, the folders made for it, and what else the caller keeps.

    While a file is written anew its entry has two hashes: a run that is cut off leaves one or the other there."""

    files: dict[str, str]
    folders: tuple[str, ...] = ()
    extra: Any = None

    def dump(self) -> bytes:
        values = {"files": self.files, "folders": self.folders, "extra": self.extra}
        return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Change:
    """What is to be done, and the record that belongs to it; `left` is no longer wanted and somebody else's by now."""

    write: dict[str, bytes]
    remove: tuple[str, ...]
    record: Record
    changed: bool
    before: dict[str, bytes]
    left: tuple[str, ...] = ()


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


def changed_since(record: Record, paths: Iterable[str]) -> tuple[str, ...]:
    """Of these files of ours those that somebody has changed or put something else in the place of."""

    def ours(path: str) -> bool:
        there = Path(path)
        if there.is_symlink() or not there.is_file():
            return not (there.is_symlink() or there.exists())
        return sha256(there.read_bytes()) in record.files[path].split()

    return tuple(path for path in paths if not ours(path))


def left_message(paths: Iterable[str]) -> str:
    return (
        f"Wanted: {', '.join(paths)} as written by us, to remove. Found: changed since by somebody else. "
        f"Left there; if nobody needs it: rm {' '.join(paths)}"
    )


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
            if path not in known:
                raise NotOurs(f"{path} is there already and was not written by us")
        if found != data or stat.S_IMODE(Path(path).stat().st_mode) != mode:
            write[path] = data
    gone = [path for path in known if path not in wanted]
    left = changed_since(record, gone) if record else ()
    remove = tuple(path for path in gone if path not in left)
    folders = dict.fromkeys(record.folders if record else ())
    folders.update(dict.fromkeys(folder for path in write for folder in _missing_folders(path)))
    made = Record({path: sha256(data) for path, data in wanted.items()}, tuple(folders), extra)
    for path in remove:
        before[path] = _read(path) or b""
    return Change(write, remove, made, bool(write) or made != record, before, left)


def apply(change: Change, record_path: Path, mode: int = 0o644) -> None:
    """The way back is on disk before the first step."""
    make_private_folder(record_path.parent)
    known = load(record_path)
    both = dict(known.files if known else {})
    for path, now in change.record.files.items():
        both[path] = " ".join(dict.fromkeys((*both.get(path, "").split(), now)))
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
    """Remove what was put there, but for what somebody has changed since."""
    left = changed_since(record, record.files)
    for path in record.files:
        if path not in left:
            Path(path).unlink(missing_ok=True)
    for folder in reversed(record.folders):
        try:
            Path(folder).rmdir()
        except OSError:
            continue  # others use it now
    forget(record_path)
