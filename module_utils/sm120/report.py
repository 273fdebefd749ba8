"""Everything that sm120_gates_info answers: packages, state folder and catalogue put together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from . import catalogue
from .defeats import find_nvcc, look_for_defeats
from .gate_lock import holder
from .manifest import ManifestProblem, load
from .packages import DISTRIBUTIONS, Package, PackageProblem, by_interpreter, by_root, search_path
from .planning import Want, blocking, edit_tasks, make_plan, problem
from .scanner import ScanProblem, scan, unlisted
from .survey import Finding, Survey, survey
from .units import cache_bases, environment_of, units_of
from .versions import PackagingMissing, Ranges

# Older fused MoE modules are built without the flags that make their kernels wait for each other (#2913).
MOE_FLAGS_SINCE = "0.6.8"


@dataclass(frozen=True)
class Request:
    """What the module was asked."""

    python: str | None
    roots: dict[str, Path]
    state_dir: Path
    features: Sequence[str]
    want: Want
    capability: str
    scan: bool = False


def find_packages(request: Request) -> tuple[dict[str, Package], list[str]]:
    """The packages that can be found, and what stands in the way of the others."""
    found: dict[str, Package] = {}
    problems = []
    if request.roots:
        for name, root in request.roots.items():
            try:
                found[name] = by_root(name, root)
            except PackageProblem as error:
                problems.append(str(error))
        return found, problems
    if request.python is None or not Path(request.python).is_file():
        return {}, [f"no runtime yet: {request.python} does not exist. Run the runtime play first"]
    try:
        path = search_path(request.python)
    except PackageProblem as error:
        return {}, [str(error)]
    for name in catalogue_packages():
        try:
            package = by_interpreter(name, path)
        except PackageProblem as error:
            problems.append(str(error))
            continue
        if package is None:
            problems.append(
                f"{DISTRIBUTIONS[name]} is not installed for {request.python}: run the runtime play first"
            )
        else:
            found[name] = package
    return found, problems


def catalogue_packages() -> list[str]:
    return sorted({gate.package for gate in catalogue.GATES})


class Crossed(TypedDict):
    """A feature whose gates do not agree: which let SM120 through, which do not, and what a server would do now."""

    feature: str
    open: list[str]
    closed: list[str]
    text: str


def _half_open(feature: str, gates: list[Finding]) -> Iterator[Crossed]:
    """An upper gate that passes over a closed one beneath it, for each of those; or edits that are made in part."""
    for place, lower in enumerate(gates):
        upper = [each.gate.id for each in gates[place + 1 :] if each.state in ("open", "native")]
        if lower.state == "closed" and upper:
            end = "fail there"
            if lower.gate.layer == "jit":
                end = "die with 'RuntimeError: No supported CUDA architectures found for major versions [9, 10]'"
            text = (
                f"{feature}: {', '.join(upper)} would let SM120 through to {lower.gate.id}, which is closed: "
                f"a server started now would {end}"
            )
            yield {"feature": feature, "open": upper, "closed": [lower.gate.id], "text": text}


def crossed_layers(found: Survey) -> list[Crossed]:
    """Features whose upper gate passes over a closed one beneath it, or that are open in part."""
    crossed: list[Crossed] = []
    for feature in catalogue.FEATURES:
        gates = [each for each in found.findings if each.gate.feature == feature]
        crossed += _half_open(feature, gates)
        if found.feature_state(feature) == "partial":
            opened = [each.gate.id for each in gates if each.state in ("open", "partial")]
            closed = [each.gate.id for each in gates if each.state in ("closed", "partial")]
            text = (
                f"{feature}: only a part of its edits is made, as an interrupted run or a reinstalled package "
                f"leaves it: {', '.join(opened)} open, {', '.join(closed)} closed"
            )
            crossed.append({"feature": feature, "open": opened, "closed": closed, "text": text})
    return crossed


def _notes(packages: dict[str, Package], features: Sequence[str], ranges: Ranges) -> list[str]:
    flashinfer = packages.get("flashinfer")
    if (
        "moe_autotune" in features
        and flashinfer
        and ranges.contains(f"<{MOE_FLAGS_SINCE}", flashinfer.version)
    ):
        return [
            f"moe_autotune: the fused MoE of FlashInfer {flashinfer.version} is built without the GDC flags, "
            "which its kernels need on SM120 for programmatic dependent launch; prefer "
            f"{MOE_FLAGS_SINCE} or newer"
        ]
    return []


def _environments(request: Request, packages: dict[str, Package]) -> set[Path]:
    """The virtual environments that the packages are in."""
    if request.python is not None:
        return {Path(request.python).parent.parent}
    return {each for package in packages.values() if (each := environment_of(package.root)) is not None}


def gates_report(request: Request) -> dict[str, Any]:
    """The whole answer; nothing on the host is changed."""
    packages, problems = find_packages(request)
    if request.capability.partition(".")[0] != "12":
        problems.append(
            f"capability {request.capability}: the catalogue opens gates for compute capability 12.x only; "
            "leave this host out of the gates play"
        )
    environments = _environments(request, packages)
    answer: dict[str, Any] = {
        "packages": {
            name: {"version": package.version, "root": str(package.root), "source": package.source}
            for name, package in sorted(packages.items())
        },
        "gates": [],
        "features": dict.fromkeys(catalogue.FEATURES, "unknown"),
        "consistent": True,
        "crossed": [],
        "edits": [],
        "plan": {},
        "needed": False,
        "purge": False,
        "digest": "pristine",
        "wanted_digest": "pristine",
        "settled": True,
        "lock": None,
        "units": sorted({unit for each in environments for unit in units_of(each)}),
        "caches": sorted({base for each in environments for base in cache_bases(each)}),
        "conditions": [],
        "unlisted": [],
        "notes": [],
        "problems": problems,
    }
    try:
        manifest = load(request.state_dir)
        found = survey(packages, manifest, request.state_dir)
        ranges = Ranges([site for package in packages.values() for site in package.site_dirs])
    except ManifestProblem as error:
        problems.append(str(error))
        return answer
    except PackagingMissing as error:
        if not problems:  # an environment that is gone holds no packaging either
            problems.append(str(error))
        return answer
    answer["gates"] = [finding.as_dict() for finding in found.findings]
    answer["features"] = {feature: found.feature_state(feature) for feature in catalogue.FEATURES}
    crossed = crossed_layers(found)
    answer["consistent"] = not crossed
    answer["crossed"] = crossed
    answer["notes"] = _notes(packages, request.features, ranges)
    answer["lock"] = holder(request.state_dir)
    answer["digest"] = answer["wanted_digest"] = found.digest()
    flashinfer = packages.get("flashinfer")
    if flashinfer and request.want == "present" and "allreduce_fusion" in request.features:
        defeats = look_for_defeats(flashinfer, ranges, request.python, find_nvcc(request.python))
        problems += defeats.problems
        answer["notes"] += defeats.notes
    problems += [
        problem(each, packages, request.python)
        for each in blocking(found, packages, request.want, request.features)
    ]
    if request.scan:
        try:
            conditions = scan(packages, found.findings)
        except ScanProblem as error:
            problems.append(str(error))
        else:
            answer["conditions"] = [each.as_dict() for each in conditions]
            answer["unlisted"] = [each.as_dict() for each in unlisted(conditions)]
    if problems:
        return answer
    plan = make_plan(found, packages, manifest, request.want, request.features)
    answer["plan"] = plan
    answer["edits"] = edit_tasks(plan, request.python or sys.executable)
    for key in ("needed", "wanted_digest"):
        answer[key] = plan[key]
    answer["purge"] = plan["kernels"] != plan["wanted_kernels"] or not plan["kernels_settled"]
    answer["settled"] = plan["settled"] and plan["kernels_settled"]
    return answer
