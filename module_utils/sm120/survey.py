"""The state of every gate on this disk, proved by hash and not by the look of a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import catalogue
from .editing import AnchorMismatch, anchor_lines, applied_subset, first_line, simulate
from .gate_model import EditRecord, Gate, State, Variant
from .manifest import PRISTINE, KeptFile, Manifest, kept_bytes
from .packages import DISTRIBUTIONS, Package, delivered
from .storage import sha256
from .versions import Ranges


@dataclass(frozen=True)
class FileState:
    """A file that gates live in: what was delivered, what is there, which edits of ours explain it."""

    package: Package
    relative: str
    truth: str | None
    now: str | None
    pristine: bytes | None
    recorded: KeptFile | None
    applied: tuple[EditRecord, ...] | None
    trouble: str = ""

    @property
    def path(self) -> Path:
        return self.package.base / self.relative

    @property
    def text(self) -> str:
        return self.path.read_bytes().decode(errors="replace") if self.now else ""


@dataclass(frozen=True)
class Finding:
    """A gate, its state and where to look."""

    gate: Gate
    variant: Variant | None
    file: FileState | None
    state: State
    line: int | None = None
    found: str = ""
    expected: str = ""

    @property
    def lines(self) -> set[int]:
        """Lines that this gate is in: its anchors, its pattern, and what its edits make harmless."""
        if self.file is None or self.variant is None:
            return set()
        text = self.file.text
        edits = catalogue.records(self.gate, self.variant)
        lines = {line for edit in edits for line in anchor_lines(text, edit)}
        for pattern in filter(None, (self.variant.pattern, self.variant.covers)):
            lines |= {
                text.count("\n", 0, match.end() - 1) + 1 for match in re.finditer(pattern, text, re.MULTILINE)
            }
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.gate.id,
            "label": self.gate.label,
            "feature": self.gate.feature or None,
            "layer": self.gate.layer,
            "package": self.gate.package,
            "path": str(self.file.path) if self.file else None,
            "line": self.line,
            "state": self.state,
            "found": self.found,
            "expected": self.expected,
            "why": self.gate.why,
            "note": self.variant.note if self.variant else "",
        }


def look_at(package: Package, relative: str, manifest: Manifest, state_dir: Path) -> FileState:
    """Compare a file with what was delivered and with what our recorded edits make of it."""
    path = package.base / relative
    told = delivered(package, relative)
    truth, blob = told if told else (None, None)
    entry = manifest.entries.get(str(package.root))
    recorded = entry.files.get(relative) if entry and entry.version == package.version else None
    if path.is_symlink():
        trouble = f"is a symbolic link to {path.resolve()}: an edit would change a file that others use"
        return FileState(package, relative, truth, None, None, recorded, None, trouble)
    if not path.is_file():
        trouble = "is missing" if truth else "does not exist in this version"
        return FileState(package, relative, truth, None, None, recorded, None, trouble)
    data = path.read_bytes()
    now = sha256(data)
    if truth is None:
        trouble = "was not delivered with the package"
        return FileState(package, relative, truth, now, None, recorded, None, trouble)
    if now == truth:
        return FileState(package, relative, truth, now, data, recorded, ())
    pristine = blob or kept_bytes(state_dir, truth)
    if recorded is None or pristine is None:
        trouble = f"differs from what was delivered, and {state_dir} has no record of an edit"
        return FileState(package, relative, truth, now, pristine, recorded, None, trouble)
    applied = applied_subset(pristine, recorded.edits, data)
    trouble = "" if applied is not None else "was changed by another hand after it was edited"
    return FileState(package, relative, truth, now, pristine, recorded, applied, trouble)


def _line(text: str, number: int | None) -> str:
    return text.splitlines()[number - 1].strip() if number else ""


def _closed_at(text: str, edit: EditRecord) -> int | None:
    return next(iter(anchor_lines(text, edit)), None)


def _opened_at(text: str, edit: EditRecord) -> int | None:
    """The line that an edit has made, as far as its own text tells; the anchor's may be gone."""
    args = edit["args"]
    made = str(args.get("line") or args.get("replace") or args["marker"].replace("{mark}", "BEGIN"))
    made = re.sub(r"\\\d", "", made).strip()
    hit = (
        first_line(text, str(args.get("after", "")) + r"[\s\S]*?" + re.escape(made))
        if len(made) > 1
        else None
    )
    if hit is None:
        return None
    lines = text.splitlines()[hit[0] - 1 :]
    return next(number for number, line in enumerate(lines, hit[0]) if made in line)


def _after(pristine: bytes, edit: EditRecord) -> str:
    """What the anchor's line is after an edit; of a block, its first line."""
    if edit["module"] == "blockinfile":
        return str(edit["args"]["block"]).splitlines()[0].strip()
    return _line(simulate(pristine, [edit]).decode(), _closed_at(pristine.decode(), edit))


def _edit_gate(gate: Gate, variant: Variant, file: FileState) -> Finding:
    mine = catalogue.records(gate, variant)
    if file.applied is None or file.pristine is None:
        state: State = "unknown" if file.truth is None and file.now is None else "drifted"
        return Finding(gate, variant, file, state, None, file.now or file.trouble, file.truth or "")
    applied = [edit for edit in file.applied if edit["gate"] == gate.id]
    known = [edit for edit in file.recorded.edits if edit["gate"] == gate.id] if file.recorded else []
    if not applied:
        try:
            simulate(file.pristine, mine)
        except (AnchorMismatch, ValueError) as error:
            return Finding(gate, variant, file, "unknown", None, str(error), "the anchors of the catalogue")
        at = _closed_at(file.text, mine[-1])
        expected = _after(file.pristine, mine[-1])
        return Finding(gate, variant, file, "closed", at, _line(file.text, at), expected)
    at = _opened_at(file.text, applied[-1])
    state = "open" if len(applied) == len(known) else "partial"
    expected = f"{len(known)} edits, found {len(applied)}"
    return Finding(gate, variant, file, state, at, _line(file.text, at), expected)


def _text_gate(gate: Gate, variant: Variant, file: FileState) -> Finding:
    """A gate that upstream opened, does not have, or that is only listed: in a file as delivered or as we edited it."""
    if file.applied is None and (file.now is not None or file.truth is not None):
        return Finding(gate, variant, file, "drifted", None, file.now or file.trouble, file.truth or "")
    text = file.text
    count = len(re.findall(variant.pattern, text, re.MULTILINE)) if text else 0
    match = re.search(variant.pattern, text, re.MULTILINE)
    line = text.count("\n", 0, match.end() - 1) + 1 if match else None
    shown = _line(text, line)
    if variant.kind == "absent" and count == 0:
        return Finding(gate, variant, file, "absent", None, "no such text", "no such text")
    if variant.kind == "native" and count == variant.count:
        return Finding(gate, variant, file, "native", line, shown, shown)
    if variant.kind == "listed" and count:
        return Finding(gate, variant, file, "closed", line, shown, "")
    wanted = 0 if variant.kind == "absent" else variant.count
    found = f"{count} matches of {variant.pattern!r}"
    return Finding(gate, variant, file, "unknown", line, found, f"{wanted} matches")


@dataclass(frozen=True)
class Survey:
    """Everything that was found, in the order in which edits are made."""

    findings: tuple[Finding, ...]
    files: dict[tuple[str, str], FileState]

    def feature_state(self, feature: str) -> State:
        """open: every gate passes. closed: no edit of ours. The rest is named by the worst found."""
        states = [each.state for each in self.findings if each.gate.feature == feature]
        for worst in ("drifted", "unknown", "partial"):
            if worst in states:
                return worst
        if "closed" not in states:
            return "open"
        return "partial" if "open" in states else "closed"

    def digest(self, package: str | None = None, after: dict[tuple[str, str], str] | None = None) -> str:
        """Identifies the state of all edited files (of one package); `after`: hashes they will have."""
        lines = []
        for key, file in sorted(self.files.items()):
            found = (after or {}).get(key, file.now)
            if package in (None, key[0]) and found != file.truth:
                lines.append(f"{key[0]} {key[1]} {found}\n")
        return sha256("".join(lines).encode()) if lines else PRISTINE


def survey(
    packages: dict[str, Package], manifest: Manifest, state_dir: Path, gates: Sequence[Gate] = catalogue.GATES
) -> Survey:
    """Classify every gate of the packages that are there."""
    sites = [site for package in packages.values() for site in package.site_dirs]
    ranges = Ranges(sites)
    files: dict[tuple[str, str], FileState] = {}

    def look(package: Package, relative: str) -> FileState:
        key = (package.name, relative)
        if key not in files:
            files[key] = look_at(package, relative, manifest, state_dir)
        return files[key]

    findings = []
    for gate in gates:
        package = packages.get(gate.package)
        if package is None:
            missing = f"{DISTRIBUTIONS[gate.package]} is not installed"
            findings.append(Finding(gate, None, None, "unknown", found=missing))
            continue
        variant = catalogue.variant_for(gate, package.version, ranges)
        if variant is None:
            known = ", ".join(each.versions for each in gate.variants)
            findings.append(Finding(gate, None, None, "unknown", None, package.version, known))
        elif variant.kind == "edit":
            findings.append(_edit_gate(gate, variant, look(package, variant.path)))
        else:
            findings.append(_text_gate(gate, variant, look_at(package, variant.path, manifest, state_dir)))
    for package in packages.values():
        entry = manifest.entries.get(str(package.root))
        for relative in entry.files if entry and entry.version == package.version else ():
            look(package, relative)
    return Survey(tuple(findings), files)
