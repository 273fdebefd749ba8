"""The state folder on a host: which files were edited, out of which bytes, and what was purged for them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .gate_model import EditRecord
from .storage import make_private_folder, sha256, sync_folder, write_file

FORMAT = 1
PRISTINE = "pristine"
PENDING = "pending"


class ManifestProblem(Exception):
    """The state folder does not hold what it should."""


@dataclass
class KeptFile:
    """One edited file of a package."""

    sha256_pristine: str
    sha256_after: str
    mode: int
    uid: int
    gid: int
    edits: list[EditRecord]


@dataclass
class Entry:
    """The edited files of one package folder, by their paths relative to the folder above it."""

    package: str
    version: str
    catalogue: str
    files: dict[str, KeptFile] = field(default_factory=dict)


@dataclass
class Settled:
    """The states of the edited files for which bytecode and kernels were last purged."""

    digest: str = PRISTINE
    kernels: str = PRISTINE


@dataclass
class Manifest:
    entries: dict[str, Entry] = field(default_factory=dict)
    settled: dict[str, Settled] = field(default_factory=dict)


def _file(folder: Path) -> Path:
    return folder / "manifest.json"


def load(folder: Path) -> Manifest:
    path = _file(folder)
    if not path.is_file():
        return Manifest()
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ManifestProblem(
                f"{path} has format {told['format']}, this version of the project reads {FORMAT}"
            )
        return Manifest(
            entries={
                root: Entry(
                    **{**entry, "files": {name: KeptFile(**kept) for name, kept in entry["files"].items()}}
                )
                for root, entry in told["entries"].items()
            },
            settled={pair: Settled(**each) for pair, each in told["settled"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestProblem(f"{path} cannot be read ({error}): put it back from a backup") from error


def save(folder: Path, manifest: Manifest) -> None:
    make_private_folder(folder)
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, sort_keys=True)
    write_file(_file(folder), text.encode() + b"\n", 0o600)


def _kept(folder: Path, digest: str) -> Path:
    return folder / "pristine" / digest


def keep_bytes(folder: Path, data: bytes) -> str:
    """Store bytes under their own sha256."""
    digest = sha256(data)
    make_private_folder(folder)
    make_private_folder(folder / "pristine")
    if kept_bytes(folder, digest) is None:
        write_file(_kept(folder, digest), data, 0o600)
    return digest


def kept_bytes(folder: Path, digest: str) -> bytes | None:
    """The bytes stored under a sha256, or None where they are missing or no longer those bytes."""
    path = _kept(folder, digest)
    data = path.read_bytes() if path.is_file() else None
    return data if data is not None and sha256(data) == digest else None


def drop_unused_bytes(folder: Path, manifest: Manifest) -> None:
    """Remove stored bytes that no entry needs any more."""
    used = {kept.sha256_pristine for entry in manifest.entries.values() for kept in entry.files.values()}
    store = folder / "pristine"
    for path in store.iterdir() if store.is_dir() else ():
        if path.name not in used:
            path.unlink()
            sync_folder(store)
