"""Keep, verify, restore, settle, forget: the steps around the edits, each safe to repeat or be killed in."""

from __future__ import annotations

import glob
import os
import stat
from pathlib import Path
from typing import TypedDict

from .editing import applied_subset
from .gate_model import EditRecord
from .manifest import (
    PENDING,
    PRISTINE,
    Entry,
    KeptFile,
    Manifest,
    Settled,
    drop_unused_bytes,
    keep_bytes,
    kept_bytes,
    load,
    save,
)
from .planning import Plan, PlannedFile
from .storage import sha256, write_file


class Refused(Exception):
    """A step that would have to touch what is not proved ours."""


class FileReport(TypedDict):
    path: str
    sha256_pristine: str
    sha256_after: str
    sha256_now: str | None


def _now(file: PlannedFile) -> str | None:
    path = Path(file["path"])
    return sha256(path.read_bytes()) if path.is_file() and not path.is_symlink() else None


def reports(plan: Plan) -> list[FileReport]:
    return [
        {
            "path": file["path"],
            "sha256_pristine": file["sha256_pristine"],
            "sha256_after": file["sha256_after"],
            "sha256_now": _now(file),
        }
        for file in plan["files"]
    ]


def _recorded(manifest: Manifest, file: PlannedFile) -> KeptFile | None:
    entry = manifest.entries.get(file["root"])
    return entry.files.get(file["relative"]) if entry else None


def _sweep(file: PlannedFile) -> None:
    """Remove what lies beside an edited file: bytecode, as an unchecked .pyc would hide the edit; half-written files.

    The builtin modules copy a file that cannot be renamed into place as .ansible_tmp*NAME; a kill leaves it there.
    """
    path = Path(file["path"])
    beside = list(path.parent.glob(f".ansible_tmp*{glob.escape(path.name)}"))
    if path.suffix == ".py":
        beside += (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")
    for each in beside:
        each.unlink()


def _both(first: list[EditRecord], second: list[EditRecord]) -> list[EditRecord]:
    return first + [edit for edit in second if edit not in first]


def keep(state_dir: Path, plan: Plan, dry: bool) -> bool:
    """Store the delivered bytes and the record of the edits to come. True: there was something to write."""
    changed_since = [each for each in plan["files"] if _now(each) != each["sha256_now"]]
    if changed_since:
        names = ", ".join(each["path"] for each in changed_since)
        raise Refused(f"{names} changed between the plan and now: nothing was touched, run this again")
    manifest = load(state_dir)
    before = load(state_dir)
    for root in plan["stale"]:
        manifest.entries.pop(root, None)
    pristine: dict[str, bytes] = {}
    for file in plan["files"]:
        recorded = _recorded(manifest, file)
        if not file["edits"] and recorded is None:
            continue
        if file["sha256_now"] == file["sha256_pristine"]:
            pristine[file["sha256_pristine"]] = Path(file["path"]).read_bytes()
        elif kept_bytes(state_dir, file["sha256_pristine"]) is None:
            path = file["path"]
            raise Refused(f"{state_dir} lost the delivered bytes of {path}: nothing was touched")
        status = Path(file["path"]).stat()
        package = plan["packages"][file["package"]]
        entry = manifest.entries.setdefault(
            file["root"], Entry(file["package"], package["version"], plan["catalogue"])
        )
        entry.catalogue = plan["catalogue"]
        entry.files[file["relative"]] = KeptFile(
            sha256_pristine=file["sha256_pristine"],
            sha256_after=file["sha256_after"],
            mode=recorded.mode if recorded else stat.S_IMODE(status.st_mode),
            uid=recorded.uid if recorded else status.st_uid,
            gid=recorded.gid if recorded else status.st_gid,
            edits=_both(file["edits"], recorded.edits if recorded else []),
        )
    # Until the caches are purged for the state that comes out, no state counts as settled.
    settled = manifest.settled.setdefault(plan["pair"], Settled())
    settled.digest = PENDING
    if plan["kernels"] != plan["wanted_kernels"]:
        settled.kernels = PENDING
    if manifest == before:
        return False
    if not dry:
        for data in pristine.values():
            keep_bytes(state_dir, data)
        save(state_dir, manifest)
    return True


def restore(state_dir: Path, plan: Plan, outdated_only: bool, dry: bool) -> list[str]:
    """Put files back to what was delivered, after proving that only our edits are in each of them."""
    manifest = load(state_dir)
    ready: list[tuple[PlannedFile, KeptFile, bytes]] = []
    refused = []
    for file in plan["files"]:
        now = _now(file)
        if now == file["sha256_pristine"] or (outdated_only and not file["restore"]):
            continue
        recorded = _recorded(manifest, file)
        data = kept_bytes(state_dir, file["sha256_pristine"])
        found = Path(file["path"]).read_bytes() if now else b""
        if recorded is None or data is None or applied_subset(data, recorded.edits, found) is None:
            after = recorded.sha256_after if recorded else "unknown"
            refused.append(
                f"{file['path']}: expected sha256 {file['sha256_pristine']} as delivered or {after} "
                f"as edited, found {now or 'no file'}"
            )
        else:
            ready.append((file, recorded, data))
    if refused:
        told = "; ".join(refused)
        raise Refused(f"another hand changed these files, they were left alone, nothing was restored: {told}")
    for file, recorded, data in ready:
        if not dry:
            owner = (recorded.uid, recorded.gid) if os.geteuid() == 0 else None
            write_file(Path(file["path"]), data, recorded.mode, owner)
    if not dry:
        for file in plan["files"]:
            _sweep(file)
        wrong = [each[0]["path"] for each in ready if _now(each[0]) != each[0]["sha256_pristine"]]
        if wrong:
            raise Refused(f"{', '.join(wrong)}: written, and still not as delivered. Is the disk failing?")
    return [file["path"] for file, _, _ in ready]


def verify(plan: Plan, dry: bool) -> None:
    """Compare every file with the planned hash."""
    wrong = [
        f"{each['path']}: expected sha256 {each['sha256_after']}, found {each['sha256_now'] or 'no file'}"
        for each in reports(plan)
        if each["sha256_now"] != each["sha256_after"]
    ]
    if wrong and not dry:
        raise Refused("the edits did not give the bytes that were planned: " + "; ".join(wrong))


def forget(state_dir: Path, plan: Plan, dry: bool) -> bool:
    """Drop the records of files that are as delivered, and of versions that are no longer installed."""
    manifest = load(state_dir)
    before = load(state_dir)
    _forget(manifest, plan)
    if manifest != before and not dry:
        save(state_dir, manifest)
        drop_unused_bytes(state_dir, manifest)
    return manifest != before


def _forget(manifest: Manifest, plan: Plan) -> None:
    versions = {package["root"]: package["version"] for package in plan["packages"].values()}
    for root in plan["stale"]:
        # keep may have put an entry for the version that is now installed in its place.
        if root in manifest.entries and manifest.entries[root].version != versions.get(root):
            del manifest.entries[root]
    for file in plan["files"]:
        entry = manifest.entries.get(file["root"])
        if entry and _now(file) == file["sha256_pristine"]:
            entry.files.pop(file["relative"], None)
            if not entry.files:
                del manifest.entries[file["root"]]


def settle(state_dir: Path, plan: Plan, dry: bool) -> bool:
    """Remove bytecode, and record that it and the kernels were purged for the planned state, and what each file is."""
    unfinished = [each["path"] for each in plan["files"] if _now(each) != each["sha256_after"]]
    if unfinished and not dry:
        raise Refused(f"{', '.join(unfinished)} is not in the planned state: run the whole role again")
    if not dry:
        for file in plan["files"]:
            _sweep(file)
    manifest = load(state_dir)
    before = load(state_dir)
    _forget(manifest, plan)
    for file in plan["files"]:
        recorded = _recorded(manifest, file)
        if recorded is not None and _now(file) == file["sha256_after"]:
            recorded.edits = file["edits"]
    reached = Settled(plan["wanted_digest"], plan["wanted_kernels"])
    manifest.settled[plan["pair"]] = reached
    if reached == Settled(PRISTINE, PRISTINE):
        del manifest.settled[plan["pair"]]
    if manifest != before and not dry:
        save(state_dir, manifest)
        drop_unused_bytes(state_dir, manifest)
    return manifest != before
