"""One operator at a time: a lock that names its holder, and that only a proof of death or an order breaks."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from .storage import make_private_folder, sync_folder, write_file


class Holder(TypedDict):
    """Who works on the gates: the run's id, and where its ansible-playbook runs since when.

    `where` tells this boot of that machine and its process numbers from others of the same name."""

    id: str
    user: str
    host: str
    where: str
    pid: int
    pid_started: str
    since: str


class Locked(Exception):
    """Another operator is at work."""

    def __init__(self, holder: Holder, path: Path) -> None:
        self.holder = holder
        super().__init__(
            f"{holder['user']} on {holder['host']} (ansible-playbook, process {holder['pid']}) has worked on "
            f"these gates since {holder['since']}: {path}. Nothing was changed. Wait for that run; if it "
            f"is gone for good, run again with -e sm120_gates_break_lock={holder['id']}"
        )


def _path(folder: Path) -> Path:
    return folder / "lock.json"


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Reading and replacing the lock is one step for everybody on this host."""
    make_private_folder(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def holder(folder: Path) -> Holder | None:
    """Who holds the lock, if anybody does."""
    path = _path(folder)
    if not path.is_file():
        return None
    told: Holder = json.loads(path.read_text(encoding="utf-8"))
    return told


def take(folder: Path, me: Holder, break_lock: str = "") -> None:
    """Take the lock, also from the holder whose id is given as broken; refuse while another run has it."""
    with _exclusive(folder):
        other = holder(folder)
        if other is not None and other["id"] not in (me["id"], break_lock):
            raise Locked(other, _path(folder))
        write_file(_path(folder), json.dumps(me).encode() + b"\n", 0o600)


def check(folder: Path, me: Holder | None, break_lock: str = "") -> None:
    """Refuse to go on where another run has the lock."""
    other = holder(folder)
    if other is not None and other["id"] not in (me["id"] if me else "", break_lock):
        raise Locked(other, _path(folder))


def release(folder: Path, me: Holder) -> None:
    """Give the lock back if it is ours."""
    with _exclusive(folder):
        other = holder(folder)
        if other is not None and other["id"] == me["id"]:
            _path(folder).unlink()
            sync_folder(folder)
