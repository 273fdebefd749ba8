"""What /proc tells about a server's processes: who listens on a port, which children are dead or stopped."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str  # R S D Z T ... as in /proc/PID/stat
    name: str


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold both spaces and parentheses.
    name = text[text.find("(") + 1 : text.rfind(")")]
    state, parent = text[text.rfind(")") + 2 :].split()[:2]
    return Process(pid, int(parent), state, name)


def descendants(pid: int, proc: Path = PROC) -> list[Process]:
    """All processes below `pid`, itself not included."""
    children: dict[int, list[Process]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (process := read_process(int(entry.name), proc)):
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return sorted(found, key=lambda process: process.pid)


def listener_inodes(port: int, proc: Path = PROC) -> set[str]:
    """Sockets that listen on a TCP port, over IPv4 and IPv6."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def listener_pid(port: int, proc: Path = PROC) -> int | None:
    """The process that listens on a port; None when nobody does or it is not ours to see."""
    wanted = {f"socket:[{inode}]" for inode in listener_inodes(port, proc)}
    if not wanted:
        return None
    for entry in sorted(proc.iterdir(), key=lambda path: path.name):
        if not entry.name.isdigit():
            continue
        try:
            for descriptor in (entry / "fd").iterdir():
                if os.readlink(descriptor) in wanted:
                    return int(entry.name)
        except OSError:
            continue
    return None


def writers_of(path: Path, proc: Path = PROC) -> set[int]:
    """The processes, as far as they are ours to see, that hold a file open for writing."""
    try:
        wanted = path.stat()
    except OSError:
        return set()
    found = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to see
            if any(
                _is(descriptor, wanted) and _writes(entry, descriptor)
                for descriptor in (entry / "fd").iterdir()
            ):
                found.add(int(entry.name))
    return found


def _is(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        held = descriptor.stat()
    except OSError:
        return False
    return (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino)


def _writes(process: Path, descriptor: Path) -> bool:
    for line in (process / "fdinfo" / descriptor.name).read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def dead_children(pid: int, proc: Path = PROC) -> list[Process]:
    """Children of a server that have ended and were not collected: its parent has not noticed."""
    return [p for p in descendants(pid, proc) if p.state == "Z" and p.name.startswith("sglang")]


def stopped_children(pid: int, proc: Path = PROC) -> list[Process]:
    """Processes of a server that are stopped by a signal or a debugger."""
    return [p for p in descendants(pid, proc) if p.state in ("T", "t") and p.name.startswith("sglang")]
