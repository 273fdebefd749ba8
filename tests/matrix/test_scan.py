"""Every release scanned whole: each gate is found without the catalogue, and what no gate covers has been judged."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def judged() -> set[tuple[str, str, str]]:
    """Which of the reviewed conditions were met in some release."""
    return set()


@pytest.mark.parametrize("pair", RELEASES, ids=lambda pair: f"sglang-{pair[0]}-flashinfer-{pair[1]}")
def test_a_release(pair: tuple[str, str], judged: set[tuple[str, str, str]], tmp_path: Path) -> None:
    for package, version in zip(("sglang", "flashinfer"), pair, strict=True):
        wheels.unpack(package, version, tmp_path, lambda name: scanner.reader_for(name) is not None)
    found = {name: packages.by_root(name, tmp_path / name) for name in ("sglang", "flashinfer")}
    findings = survey.survey(found, manifest.Manifest(), tmp_path).findings
    conditions = scanner.scan(found, findings)
    catalogued = {each.gate.id for each in findings if each.variant.kind != "absent"}
    # Upstream opened it by an entry in a list, which is no condition.
    unconditional = {each.gate.id for each in findings if each.variant.kind == "native"} & {"moe.autotune"}
    assert catalogued - unconditional <= {condition.gate for condition in conditions}
    assert [condition.as_dict() for condition in scanner.unlisted(conditions)] == []
    judged |= {(Path(each.path).name, each.within, each.text) for each in conditions} & set(reviewed.REVIEWED)


def test_nothing_is_judged_that_no_release_has(judged: set[tuple[str, str, str]]) -> None:
    assert judged == set(reviewed.REVIEWED)
