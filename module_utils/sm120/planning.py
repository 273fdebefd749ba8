"""From the state of the gates to a plan: what to restore, what to edit, and the hashes that must come out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from . import catalogue
from .editing import simulate
from .gate_model import EditRecord
from .manifest import Manifest, Settled
from .packages import DISTRIBUTIONS, Package
from .storage import sha256
from .survey import FileState, Finding, Survey

Want = Literal["present", "absent"]


class PlannedFile(TypedDict):
    """A file of the plan; `restore` says that it goes back to what was delivered before any edit."""

    package: str
    root: str
    relative: str
    path: str
    sha256_pristine: str
    sha256_now: str
    sha256_after: str
    restore: bool
    edits: list[EditRecord]


class PlannedPackage(TypedDict):
    version: str
    root: str
    source: str


class Plan(TypedDict):
    """What sm120_gates_info hands to sm120_gates_state."""

    want: Want
    pair: str
    packages: dict[str, PlannedPackage]
    catalogue: str
    files: list[PlannedFile]
    stale: list[str]
    digest: str
    wanted_digest: str
    kernels: str
    wanted_kernels: str
    settled: bool
    kernels_settled: bool
    needed: bool


def pair_key(packages: dict[str, Package]) -> str:
    return "|".join(f"{name}={package.root}" for name, package in sorted(packages.items()))


def repair_command(package: Package, file: FileState, python: str | None) -> str:
    """The command that puts a file back to what its package delivered."""
    if package.source == "git":
        return f"git -C {shlex.quote(str(package.base))} checkout HEAD -- {shlex.quote(file.relative)}"
    called = f"{shlex.quote(python)} -m pip" if python else "pip"
    return f"{called} install --force-reinstall --no-deps {DISTRIBUTIONS[package.name]}=={package.version}"


def compare_command(package: Package, file: FileState, python: str | None) -> str:
    """The command that shows how a file differs from what its package delivered."""
    if package.source == "git":
        return f"git -C {shlex.quote(str(package.base))} diff HEAD -- {shlex.quote(file.relative)}"
    called = f"{shlex.quote(python)} -m pip" if python else "pip"
    requirement = f"{DISTRIBUTIONS[package.name]}=={package.version}"
    return (
        f'folder=$(mktemp -d) && {called} install --quiet --no-deps --target "$folder" {requirement} && '
        f'diff "$folder"/{shlex.quote(file.relative)} {shlex.quote(str(file.path))}'
    )


def problem(finding: Finding, packages: dict[str, Package], python: str | None) -> str:
    """Wanted, found, and what to do next, for a gate that stops the plan."""
    gate, file = finding.gate, finding.file
    package = packages[gate.package]
    name = f"{DISTRIBUTIONS[gate.package]} {package.version}"
    newest = catalogue.NEWEST_READ[gate.package]
    if file is None:
        return (
            f"{gate.id} ({gate.label}): {name} is outside the catalogue, which knows "
            f"{finding.expected}. Nothing was changed. Install a version that it knows."
        )
    if finding.state == "unknown":
        return (
            f"{gate.id} ({gate.label}): {name} has moved this gate: {file.path}: "
            f"{finding.found or file.trouble}, expected {finding.expected or 'the file'}. "
            f"Nothing was changed. The catalogue was read against {newest}: install a version that it knows."
        )
    after = f", after our edits {file.recorded.sha256_after}" if file.recorded else ""
    return (
        f"{gate.id} ({gate.label}): {file.path} of {name} "
        f"{file.trouble or 'does not have the text expected'}. "
        f"Expected sha256 {file.truth} as delivered{after}; found {file.now or 'no file'}. It was left "
        f"alone. Look at the change: {compare_command(package, file, python)}; then put the file back: "
        f"{repair_command(package, file, python)} and run this again."
    )


def blocking(
    survey: Survey, packages: dict[str, Package], want: Want, features: Sequence[str]
) -> list[Finding]:
    """What forbids the plan: wanted gates that are not understood, edited files that others changed."""
    stop = []
    for finding in survey.findings:
        if finding.gate.package not in packages:
            continue
        wanted = want == "present" and finding.gate.feature in features
        ours = finding.file is not None and finding.file.recorded is not None
        # Where no edit of this release goes, a way back has nothing to do with what others changed.
        edited = finding.variant is not None and finding.variant.kind == "edit"
        if (finding.state == "drifted" and (wanted or ours or (edited and want == "absent"))) or (
            finding.state == "unknown" and wanted
        ):
            stop.append(finding)
    return stop


def _planned(file: FileState, edits: list[EditRecord]) -> PlannedFile | None:
    """What has to happen to one file; None where nothing of ours is in it or wanted in it."""
    if not edits and not file.applied and file.recorded is None:
        return None
    if file.pristine is None or file.truth is None or file.now is None:
        raise ValueError(f"{file.path} {file.trouble}")
    after = sha256(simulate(file.pristine, edits))
    return {
        "package": file.package.name,
        "root": str(file.package.root),
        "relative": file.relative,
        "path": str(file.path),
        "sha256_pristine": file.truth,
        "sha256_now": file.now,
        "sha256_after": after,
        "restore": file.now not in (file.truth, after),
        "edits": edits,
    }


def make_plan(
    survey: Survey,
    packages: dict[str, Package],
    manifest: Manifest,
    want: Want,
    features: Sequence[str],
) -> Plan:
    """Resolve what is wanted into files, hashes and edits. Call it only where nothing blocks."""
    wanted: dict[tuple[str, str], list[EditRecord]] = {}
    for finding in survey.findings:
        if (
            want == "present"
            and finding.gate.feature in features
            and finding.variant
            and finding.variant.edits
        ):
            key = (finding.gate.package, finding.variant.path)
            wanted.setdefault(key, []).extend(catalogue.records(finding.gate, finding.variant))
    files = []
    recorded_otherwise = False
    for key, file in survey.files.items():
        planned = _planned(file, wanted.get(key, []))
        if planned:
            files.append(planned)
            recorded = file.recorded.edits if file.recorded else []
            recorded_otherwise |= recorded != planned["edits"]
    after = {(each["package"], each["relative"]): each["sha256_after"] for each in files}
    pair = pair_key(packages)
    settled = manifest.settled.get(pair, Settled())
    stale = [
        root
        for root, entry in manifest.entries.items()
        if any(
            str(package.root) == root and package.version != entry.version for package in packages.values()
        )
    ]
    plan: Plan = {
        "want": want,
        "pair": pair,
        "packages": {
            name: {"version": package.version, "root": str(package.root), "source": package.source}
            for name, package in packages.items()
        },
        "catalogue": catalogue.digest(),
        "files": files,
        "stale": stale,
        "digest": survey.digest(),
        "wanted_digest": survey.digest(after=after),
        "kernels": survey.digest("flashinfer"),
        "wanted_kernels": survey.digest("flashinfer", after),
        "settled": settled.digest == survey.digest(),
        "kernels_settled": settled.kernels == survey.digest("flashinfer"),
        "needed": False,
    }
    plan["needed"] = bool(
        recorded_otherwise
        or stale
        or plan["digest"] != plan["wanted_digest"]
        or not plan["settled"]
        or not plan["kernels_settled"]
    )
    return plan


def edit_tasks(plan: Plan, python: str) -> list[dict[str, Any]]:
    """The calls of the builtin modules that the plan still needs, bottom layer first."""
    check = "import ast, sys; ast.parse(open(sys.argv[1], 'rb').read())"
    order = {gate.id: place for place, gate in enumerate(catalogue.GATES)}
    tasks = []
    for file in plan["files"]:
        if file["sha256_now"] == file["sha256_after"]:
            continue
        validate = (
            f"{shlex.quote(python)} -I -c {shlex.quote(check)} %s" if file["path"].endswith(".py") else ""
        )
        tasks += [
            {
                "gate": edit["gate"],
                "module": edit["module"],
                "path": file["path"],
                "args": edit["args"],
                "validate": validate,
            }
            for edit in file["edits"]
        ]
    return sorted(tasks, key=lambda task: order[str(task["gate"])])
