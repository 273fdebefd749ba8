"""A file that is changed and later put back: byte for byte where nobody else changed it meanwhile."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from pathlib import Path

from .pve_cmdline import edit, line_of, merge, unmerge
from .storage import sha256

__all__ = ["Change", "Record", "plan_absent", "plan_present", "record_path"]


@dataclass(frozen=True)
class Record:
    """What a file was before the first change, and what was done to it."""

    path: str
    pristine: bytes
    sha256_after: str
    added: tuple[str, ...]
    removed: tuple[str, ...]

    def dump(self) -> str:
        """As JSON."""
        values = {
            "path": self.path,
            "pristine_base64": base64.b64encode(self.pristine).decode(),
            "sha256_pristine": sha256(self.pristine),
            "sha256_after": self.sha256_after,
            "added": self.added,
            "removed": self.removed,
        }
        return json.dumps(values, indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, text: str) -> Record:
        """From JSON; a record whose bytes do not have their digest is not believed."""
        values = json.loads(text)
        pristine = base64.b64decode(values["pristine_base64"])
        if sha256(pristine) != values["sha256_pristine"]:
            raise ValueError("the recorded bytes do not have their recorded digest")
        added, removed = tuple(values["added"]), tuple(values["removed"])
        return cls(values["path"], pristine, values["sha256_after"], added, removed)


@dataclass(frozen=True)
class Change:
    """A file's next bytes and the record to keep; None keeps none."""

    data: bytes
    record: Record | None
    line_before: str
    line_after: str


def record_path(folder: str, path: str) -> Path:
    """Where the record of a file lies."""
    return Path(folder) / (path.strip("/").replace("/", "-") + ".json")


def plan_present(
    path: str, data: bytes, kind: str, add: list[str], remove: list[str], record: Record | None
) -> Change:
    """Merge the wanted parameters; what an earlier run added and is no longer wanted goes."""
    text = data.decode()
    before = line_of(text, kind)
    base = before
    if record is not None:
        gone = [item for item in record.added if item not in add]
        back = [item for item in record.removed if item not in remove and not _replaced(item, add)]
        base = unmerge(before, gone, back) if gone or back else before
    merged = merge(base, add, remove)
    if merged.line == before:
        return Change(data, record, before, before)
    after = edit(text, kind, merged.line).encode()
    if record is None:
        made = Record(path, data, sha256(after), merged.added, merged.removed)
        return Change(after, made, before, merged.line)
    kept_added = [item for item in record.added if item in add]
    kept_removed = [item for item in record.removed if item in remove or _replaced(item, add)]
    untouched = sha256(data) in (record.sha256_after, sha256(record.pristine))
    made = replace(
        record,
        sha256_after=sha256(after) if untouched else record.sha256_after,
        added=tuple(dict.fromkeys([*kept_added, *merged.added])),
        removed=tuple(dict.fromkeys([*kept_removed, *merged.removed])),
    )
    return Change(after, made, before, merged.line)


def _replaced(item: str, add: list[str]) -> bool:
    """Whether a wanted parameter stands in the place of this one."""
    return bool(merge(item, add).removed)


def plan_absent(data: bytes, kind: str, record: Record | None) -> Change:
    """Put the file back: its first bytes, or, where someone else changed it, without our parameters."""
    text = data.decode()
    before = line_of(text, kind)
    if record is None:
        return Change(data, None, before, before)
    if sha256(data) == record.sha256_after:
        return Change(record.pristine, None, before, line_of(record.pristine.decode(), kind))
    line = unmerge(before, record.added, record.removed)
    return Change(data if line == before else edit(text, kind, line).encode(), None, before, line)
