"""What /proc tells about processes: their children, dead or stopped, what they have open, their control groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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


def pids(proc: Path = PROC) -> list[int]:
    """All processes that are ours to see, lowest number first."""
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def descendants(pid: int, proc: Path = PROC) -> list[Process]:
    """All processes below `pid`, itself not included."""
    children: dict[int, list[Process]] = {}
    for each in pids(proc):
        if process := read_process(each, proc):
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return sorted(found, key=lambda process: process.pid)


def opened(pid: int, proc: Path = PROC) -> Iterator[str]:
    """What a process has open; nothing where it has ended or is not ours to look into."""
    with contextlib.suppress(OSError):
        for descriptor in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield os.readlink(descriptor)


def control_groups(pid: int, proc: Path = PROC) -> list[str]:
    """Its control groups, one for each hierarchy, systemd's last; nothing where the process has ended."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 2)[2] for line in lines]


def pid_namespace(pid: int | str, proc: Path = PROC) -> str | None:
    """None where the process has ended or is not ours to look into."""
    try:
        return os.readlink(proc / str(pid) / "ns/pid")
    except OSError:
        return None


def writers_of(path: Path, proc: Path = PROC) -> set[int]:
    """The processes, as far as they are ours to see, that hold a file open for writing."""
    try:
        wanted = path.stat()
    except OSError:
        return set()
    found = set()
    for pid in pids(proc):
        process = proc / str(pid)
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to see
            if any(
                _is(descriptor, wanted) and _writes(process, descriptor)
                for descriptor in (process / "fd").iterdir()
            ):
                found.add(pid)
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
