"""An upstream that altered the text an edit holds on to, in any way, is refused with nothing touched."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120 import catalogue
from ansible.module_utils.sm120.editing import AnchorMismatch, anchor_lines, apply_edit, simulate
from ansible.module_utils.sm120.gate_model import EditRecord, Gate, Variant
from ansible.module_utils.sm120.report import Request, gates_report
from gates_driver import Gates, RunModule

wheels = importlib.import_module("wheels")

# The oldest release of each distinct text.
OLDEST = {
    ">=0.5.8,<0.5.13": "0.5.8",
    ">=0.5.8,<0.5.15": "0.5.8",
    ">=0.5.8,<0.5.19": "0.5.8",
    ">=0.5.11": "0.5.11",
    ">=0.5.14,<0.5.19": "0.5.14",
    ">=0.5.15,<0.5.19": "0.5.15",
    ">=0.5.19": "0.5.19",
    ">=0.5.19,<0.5.21": "0.5.19",
    ">=0.5.21": "0.5.21",
    ">=0.6.0,<0.6.10": "0.6.0",
    ">=0.6.0,<0.6.17": "0.6.0",
}
EDITED = [
    pytest.param(gate, variant, id=f"{gate.id}-{OLDEST[variant.versions]}")
    for gate in catalogue.GATES
    for variant in gate.variants
    if variant.kind == "edit"
]


def mutations(text: str, edit: EditRecord) -> dict[str, str]:
    """The text with the last line that the anchor matches altered in each of four ways."""
    lines = text.splitlines(keepends=True)
    at = anchor_lines(text, edit)[-1] - 1
    line = lines[at]
    middle = line.find(" ", len(line) - len(line.lstrip()))
    middle = middle if middle > 0 else len(line) - 2
    altered = {
        "deleted": "",
        "doubled": line + line,
        "wrapped": line[:middle] + "\n" + line[middle:],
        "indented": "    " + line,
    }
    return {name: "".join([*lines[:at], new, *lines[at + 1 :]]) for name, new in altered.items()}


OTHER = {"sglang": ("flashinfer", "0.6.3"), "flashinfer": ("sglang", "0.5.9")}


@pytest.mark.parametrize(("gate", "variant"), EDITED)
def test_every_alteration_of_every_anchor_is_refused(gate: Gate, variant: Variant, tmp_path: Path) -> None:
    """Delivered like that by upstream, so that the hashes are right: no edit of any gate is planned."""
    site = tmp_path / "site"
    for package, version in ((gate.package, OLDEST[variant.versions]), OTHER[gate.package]):
        wheels.unpack(package, version, site)
    roots = {name: site / name for name in ("sglang", "flashinfer")}
    request = Request(None, roots, tmp_path / "state", catalogue.FEATURES, "present", "12.0")
    assert gates_report(request)["edits"] != []
    text = (site / variant.path).read_text()
    refused = 0
    for edit in catalogue.records(gate, variant):
        assert apply_edit(text, edit) != text
        for name, altered in mutations(text, edit).items():
            assert altered != text, name
            with pytest.raises(AnchorMismatch):
                simulate(altered.encode(), catalogue.records(gate, variant))
            wheels.deliver(site, variant.path, altered.encode())
            answer = gates_report(request)
            assert (answer["edits"], answer["plan"], answer["needed"]) == ([], {}, False)
            assert any(
                gate.id in problem and "Nothing was changed" in problem for problem in answer["problems"]
            )
            assert (site / variant.path).read_text() == altered
            refused += 1
    assert refused == 4 * len(variant.edits)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["deleted", "doubled", "wrapped", "indented"])
@pytest.mark.parametrize("gate_id", ["fusion.jit", "fusion.runtime"])
def test_the_plan_refuses_and_touches_nothing(
    make_site: Any, run_module: RunModule, gate_id: str, name: str
) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.6.3"))
    (gate,) = (each for each in catalogue.GATES if each.id == gate_id)
    variant = gate.variants[0]
    edit = catalogue.records(gate, variant)[-1]
    altered = mutations((gates.site / variant.path).read_text(), edit)[name]
    wheels.deliver(gates.site, variant.path, altered.encode())
    answer = gates.info()
    assert (answer["edits"], answer["plan"], len(answer["problems"])) == ([], {}, 1)
    assert gates.states()[gate_id] == "unknown"
    assert gates.state("keep", answer["plan"])[0] == 1
    assert wheels.differing(gates.site) == set()
    assert not gates.state_dir.exists()
