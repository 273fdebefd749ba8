"""Every release scanned whole: each gate is found without the catalogue, and what no gate covers has been judged."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import versions
from conftest import PAIRS, wheels

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "module_utils"))
packages, scanner, survey, manifest, reviewed = (
    importlib.import_module(f"sm120.{name}")
    for name in ("packages", "scanner", "survey", "manifest", "scan_reviewed")
)
RELEASES = [pair for pair in PAIRS if pair not in versions.MIXED]


def once(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Most files are the same from one release to the next."""
    known: dict[bytes, Any] = {}

    def remembered(text: str) -> Any:
        key = hashlib.sha256(text.encode()).digest()
        if key not in known:
            known[key] = list(read(text))
        return known[key]

    return remembered


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("python_conditions", "cuda_conditions"):
            patch.setattr(scanner, name, once(getattr(scanner, name)))
        yield


@dataclass
class Scanned:
    """The catalogue's findings in a pair of releases, and the conditions that were found without it."""

    findings: list[Any]
    conditions: list[Any]


ScanOf = Callable[[tuple[str, str]], Scanned]


@pytest.fixture(scope="module")
def scan_of(tmp_path_factory: pytest.TempPathFactory) -> ScanOf:
    """Scan a pair, once for all tests."""

    @functools.cache
    def scan(pair: tuple[str, str]) -> Scanned:
        site = tmp_path_factory.mktemp("site")
        for package, version in zip(("sglang", "flashinfer"), pair, strict=True):
            wheels.unpack(package, version, site, lambda name: scanner.reader_for(name) is not None)
        found = {name: packages.by_root(name, site / name) for name in ("sglang", "flashinfer")}
        findings = survey.survey(found, manifest.Manifest(), site).findings
        return Scanned(findings, scanner.scan(found, findings))

    return scan


@pytest.mark.parametrize("pair", RELEASES, ids=lambda pair: f"sglang-{pair[0]}-flashinfer-{pair[1]}")
def test_a_release(pair: tuple[str, str], scan_of: ScanOf) -> None:
    scanned = scan_of(pair)
    catalogued = {each.gate.id for each in scanned.findings if each.variant.kind != "absent"}
    # Upstream opened it by an entry in a list, which is no condition.
    native = {each.gate.id for each in scanned.findings if each.variant.kind == "native"}
    assert catalogued - (native & {"moe.autotune"}) <= {each.gate for each in scanned.conditions}
    assert [each.as_dict() for each in scanner.unlisted(scanned.conditions)] == []


def test_nothing_is_judged_that_no_release_has(scan_of: ScanOf) -> None:
    met = {
        (Path(each.path).name, each.within, each.text)
        for pair in RELEASES
        for each in scan_of(pair).conditions
    }
    assert set(reviewed.REVIEWED) - met == set()
