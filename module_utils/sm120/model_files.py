"""Which files of a hub's repository a folder holds, proved by hash, and what is missing.

The folder's mark, .sm120-model.json, names the repository, its commit and every file with size and hash as the hub told
them, and of each file that was read and found right its size and time of change: so a second look needs neither the
hub nor to read 400 GB again, and a folder that is carried to a host without a network proves itself there.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from .storage import write_file

MARK = ".sm120-model.json"
PARTIALS = ".sm120-partial"
BLOCK = 2**24
COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelError(Exception):
    """What was wanted, what was found and what to do, in one message."""


@dataclass(frozen=True)
class HubFile:
    """One file of a repository: large ones have a SHA-256, the others Git's hash of their content."""

    path: str
    size: int
    hash: str
    kind: str  # sha256 | git


@dataclass
class Mark:
    """What a model folder says about itself."""

    repository: str
    revision: str
    files: list[HubFile]
    proved: dict[str, list[int]]  # path: [size, time of change in nanoseconds]

    def dump(self) -> bytes:
        told = {**asdict(self), "files": [asdict(each) for each in self.files]}
        return json.dumps(told, indent=1, sort_keys=True).encode() + b"\n"


def load(folder: Path, repository: str, revision: str) -> Mark | None:
    """The folder's mark, if it has one of this repository at this commit."""
    try:
        told = json.loads((folder / MARK).read_text())
        mark = Mark(
            told["repository"],
            told["revision"],
            [HubFile(**each) for each in told["files"]],
            dict(told["proved"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if (mark.repository, mark.revision) == (repository, revision) else None


def inside(name: str) -> bool:
    """Whether a file's name stays inside the folder that it is put in."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\\" not in name


def listed_before(folder: Path) -> set[str]:
    """The files that the folder's mark lists, of whatever repository and commit, and from wherever it came."""
    try:
        told = json.loads((folder / MARK).read_text())["files"]
        return {each["path"] for each in told if inside(each["path"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def store(folder: Path, mark: Mark) -> None:
    write_file(folder / MARK, mark.dump(), 0o644)


def listed(files: list[HubFile], exclude: list[str]) -> list[HubFile]:
    """The files that are wanted; a name that leads out of the folder is refused."""
    for each in files:
        if not inside(each.path):
            raise ModelError(
                f"Wanted: file names inside the repository. Found: {each.path!r}. Do not use this hub."
            )
    return sorted(
        (each for each in files if not any(fnmatch(each.path, pattern) for pattern in exclude)),
        key=lambda each: each.path,
    )


def state(path: Path) -> list[int] | None:
    """[size, time of change] of a file; None: there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return [seen.st_size, seen.st_mtime_ns]


def missing(folder: Path, mark: Mark, wanted: list[HubFile]) -> list[HubFile]:
    """The files that have not been proved as they lie there now."""
    return [each for each in wanted if mark.proved.get(each.path) != (state(folder / each.path) or [])]


def partial(folder: Path, wanted: HubFile) -> Path:
    """Where a file grows until it is whole and proved."""
    return folder / PARTIALS / f"{wanted.path}.{wanted.hash}"


def bytes_to_come(folder: Path, todo: list[HubFile]) -> int:
    """How much a download will add at most: a file of the right size may be there already, unproved."""
    needed = 0
    for each in todo:
        found, begun = state(folder / each.path), state(partial(folder, each))
        if found is None or found[0] != each.size:
            needed += max(each.size - (begun[0] if begun else 0), 0)
    return needed


def digest(path: Path, kind: str) -> str:
    """The hash of a file's content, of the kind that the hub tells for it."""
    if kind == "sha256":
        summed = hashlib.sha256()
    else:  # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        summed = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(BLOCK):
            summed.update(block)
    return summed.hexdigest()


def found_instead(path: Path, wanted: HubFile) -> str:
    """What is wrong with a file; nothing where it is whole and as the hub tells it."""
    found = state(path)
    if found is None:
        return "no such file"
    if found[0] != wanted.size:
        return f"{found[0]} bytes"
    seen = digest(path, wanted.kind)
    return "" if seen == wanted.hash else seen


def read_token(path: str) -> str:
    """The token in a file that only its owner may read."""
    file = Path(path)
    try:
        mode = file.stat().st_mode & 0o777
        token = file.read_text().strip()
    except OSError as error:
        raise ModelError(
            f"Wanted: the hub's token in the file {path} on this host. Found: {error.strerror}. "
            f"Write it there: install -m 0600 /dev/stdin {path}"
        ) from None
    if mode & 0o077:
        raise ModelError(
            f"Wanted: {path} readable by its owner alone. Found: mode {mode:04o}. Run: chmod 0600 {path}"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ModelError(
            f"Wanted: one line with the hub's token in {path}. Found: {'nothing' if not token else 'more'}."
        )
    return token


def readable(size: float) -> str:
    """A number of bytes for people."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}"


def batches(todo: list[HubFile], at_a_time: int) -> list[dict[str, Any]]:
    """The work in portions, each with a line that tells how far it leads."""
    total, done, portions = sum(each.size for each in todo), 0, []
    for start in range(0, len(todo), at_a_time):
        portion = todo[start : start + at_a_time]
        done += sum(each.size for each in portion)
        portions.append(
            {
                "files": [each.path for each in portion],
                "label": f"files {start + 1} to {start + len(portion)} of {len(todo)}, "
                f"{readable(done)} of {readable(total)}",
            }
        )
    return portions
