"""Install packages whole or not at all, hold them, and take away later exactly what was installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .apt_state import (
    INSTALL_OPTIONS,
    Package,
    Run,
    Simulation,
    of_branch,
    query,
    refusal,
    simulate,
    to_purge,
)
from .own_files import forget
from .storage import make_private_folder, write_file

MIB = 2**20
LOCK_WAIT = ["-o", "DPkg::Lock::Timeout=600"]
KEEP_CONFIGURATION = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
CHANGE_OURS = ["--allow-downgrades", "--allow-change-held-packages"]


class Refused(Exception):
    """Nothing was changed: why."""


class Undone(Exception):
    """Something failed and was taken back: what."""


class Failed(Exception):
    """Something failed and packages are left, which the record has: what."""


@dataclass(frozen=True)
class Record:
    """What the operator asked for, what came with it and was not there before, and what we hold."""

    requested: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Record | None:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(*(tuple(values[name]) for name in ("requested", "installed", "held")))

    def save(self, path: Path) -> None:
        make_private_folder(path.parent)
        write_file(path, (json.dumps(self.__dict__, indent=1, sort_keys=True) + "\n").encode(), 0o600)

    @classmethod
    def has_packages(cls, path: Path) -> bool:
        """Also of a record that cannot be read: what it may have is not given up."""
        try:
            record = cls.load(path)
        except (OSError, ValueError, KeyError, TypeError):
            return True
        return record is not None and bool(record.installed)


@dataclass(frozen=True)
class Asked:
    names: tuple[str, ...]
    record: Path
    branch: str = ""  # versions to have and to hold
    free_mib: Mapping[str, int] = field(default_factory=dict)
    update: bool = True
    check: bool = False


@dataclass(frozen=True)
class Done:
    changed: bool
    installed: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def run_apt(argv: list[str]) -> tuple[int, str]:
    """(exit code, output and errors), never asking, in English."""
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
        "NEEDRESTART_SUSPEND": "1",
    }
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    return done.returncode, done.stdout.decode("utf-8", "replace")


def free_space(path: str) -> tuple[int, int]:
    """(device, MiB free) of the file system that a path is or will be on."""
    folder = next(each for each in (Path(path), *Path(path).parents) if each.is_dir())
    return folder.stat().st_dev, shutil.disk_usage(folder).free // MIB


def too_full(wanted: Mapping[str, int]) -> str:
    """The first file system with less room than is wanted on it in all; empty when there is room."""
    sums: dict[int, tuple[list[str], int, int]] = {}
    for path, mib in wanted.items():
        device, free = free_space(path)
        paths, total, _ = sums.get(device, ([], 0, 0))
        sums[device] = ([*paths, path], total + mib, free)
    for paths, total, free in sums.values():
        if free < total:
            return f"{free} MiB free for {' and '.join(paths)}, which take up to {total} MiB"
    return ""


def wrong_packages(asked: Asked, packages: Mapping[str, Package], record: Record) -> list[str]:
    """Names that are not there, and ours that are of another branch."""
    wrong = [name for name in asked.names if name not in packages or not packages[name].there]
    if asked.branch:
        wrong += [
            name
            for name in asked.names
            if name not in wrong
            and name in record.held
            and not of_branch(packages[name].version, asked.branch)
        ]
    return wrong


def to_hold(asked: Asked, packages: Mapping[str, Package], record: Record) -> list[str]:
    """Of what was asked for or came with it, the installed packages of the branch."""
    if not asked.branch:
        return []
    return [
        name
        for name in dict.fromkeys((*asked.names, *record.installed))
        if name in packages and packages[name].there and of_branch(packages[name].version, asked.branch)
    ]


def plan(
    run: Run, asked: Asked, packages: dict[str, Package], record: Record, wrong: list[str]
) -> Simulation:
    """What apt would do; Refused when it must not."""
    full = too_full(asked.free_mib)
    if full:
        raise Refused(full)
    options = CHANGE_OURS if record.held else []
    planned = simulate(run, "install", wrong, *options)
    why = refusal(planned, packages, record.installed, record.held)
    if why:
        raise Refused(why)
    return planned


def install(run: Run, asked: Asked) -> Done:
    record = Record.load(asked.record) or Record()
    packages = query(run)
    wrong = wrong_packages(asked, packages, record)
    new: dict[str, str] = {}
    if wrong:
        if asked.update and not asked.check:
            run(["apt-get", "update", "-q", *LOCK_WAIT])  # sources of others may fail: the plan tells
        planned = plan(run, asked, packages, record, wrong)
        new = {name: then for name, (now, then) in planned.install.items() if not now}
        if asked.check:
            return Done(True, {name: then for name, (_, then) in planned.install.items()}, planned.remove)
        kept = record
        record = replace(
            record,
            requested=tuple(dict.fromkeys((*record.requested, *wrong))),
            installed=tuple(dict.fromkeys((*record.installed, *new))),
        )
        record.save(asked.record)
        options = [*INSTALL_OPTIONS, *KEEP_CONFIGURATION, *LOCK_WAIT, *(CHANGE_OURS if kept.held else [])]
        code, said = run(["apt-get", "-y", "-q", *options, "install", *wrong])
        if code != 0:
            left = _undo(run, asked, kept, list(new))
            raise (Failed if left else Undone)(_end_of(said) + left)
    try:
        unheld = _hold(run, asked, record, query(run) if wrong else packages)
    except OSError as error:
        if not wrong:
            raise
        raise Failed(f"what was installed could not be held: {error}") from error
    return Done(bool(wrong or unheld), new, (), tuple(unheld))


def _hold(run: Run, asked: Asked, record: Record, packages: Mapping[str, Package]) -> list[str]:
    """The packages that were put on hold now."""
    unheld = [name for name in to_hold(asked, packages, record) if packages[name].want != "hold"]
    if unheld and not asked.check:
        _mark(run, "hold", unheld)
        replace(record, held=tuple(dict.fromkeys((*record.held, *unheld)))).save(asked.record)
    return unheld


def _end_of(said: str, characters: int = 600) -> str:
    return " ".join(said.split())[-characters:]


def _mark(run: Run, action: str, names: list[str]) -> None:
    code, said = run(["apt-mark", action, *names])
    if code != 0:
        raise OSError(f"apt-mark {action} {' '.join(names)} ended with {code}: {_end_of(said, 300)}")


def _undo(run: Run, asked: Asked, kept: Record, new: list[str]) -> str:
    """Purge what this run brought; why not, if that failed too."""
    try:
        packages = query(run)
    except OSError as error:
        return f" -- and what is left of {', '.join(new)} cannot be told: {error}"
    brought = [name for name in new if name in packages and packages[name].status != "not-installed"]
    code, said = run(["apt-get", "-y", "-q", *LOCK_WAIT, "purge", *brought]) if brought else (0, "")
    if code != 0:
        return f" -- and taking {', '.join(brought)} back failed: {_end_of(said, 300)}"
    if kept == Record():
        forget(asked.record)
    else:
        kept.save(asked.record)
    return ""


def remove(run: Run, asked: Asked) -> Done:
    record = Record.load(asked.record)
    if record is None:
        return Done(False)
    packages = query(run)
    holds = [name for name in record.held if name in packages and packages[name].want == "hold"]
    gone, why = to_purge(run, record.installed, record.requested, record.held, packages)
    if why:
        raise Refused(why)
    if asked.check:
        return Done(True, {}, tuple(gone), tuple(holds))
    if holds:
        _mark(run, "unhold", holds)
    if gone:
        code, said = run(["apt-get", "-y", "-q", *LOCK_WAIT, "purge", *gone])
        if code != 0:
            packages = query(run)
            again = [name for name in holds if name in packages and packages[name].there]
            if again:
                _mark(run, "hold", again)
            raise Failed(_end_of(said))
    forget(asked.record)
    return Done(True, {}, tuple(gone), tuple(holds))
