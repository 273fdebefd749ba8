"""The edits worked out in memory are the bytes that the builtin modules write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120 import editing
from gates_driver import BUILTIN, RunModule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LINES = st.lists(
    st.sampled_from(["anchor", "    anchor", "other", "", "def x():", "def y():", "é # anchor,"]), max_size=9
)
BLOCK = {"marker": "# {mark} test", "block": "one\n\n    two"}
EDITS = [
    ("lineinfile", {"regexp": r"^( *)anchor$", "line": r"\1changed", "backrefs": True}),
    ("lineinfile", {"regexp": r"anchor", "line": r"anchor, more", "backrefs": True}),
    ("blockinfile", {**BLOCK, "insertafter": r"^ *anchor$"}),
    ("blockinfile", {**BLOCK, "insertbefore": r"anchor"}),
    ("replace", {"regexp": r"^(other)$", "replace": r"\1 thing"}),
    ("replace", {"regexp": r"anchor$", "replace": "changed", "after": r"def x\(", "before": r"\ndef "}),
    ("replace", {"regexp": r"anchor", "replace": "changed", "after": r"\ndef x\("}),
    ("replace", {"regexp": r"anchor", "replace": "changed", "before": r"def y\("}),
]


@pytest.mark.parametrize(("name", "args"), EDITS)
@given(lines=LINES, closed=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_memory_equals_module(
    name: str, args: dict[str, Any], lines: list[str], closed: bool, tmp_path: Path, run_module: RunModule
) -> None:
    text = "\n".join(lines) + ("\n" if closed and lines else "")
    path = tmp_path / "text"
    path.write_text(text)
    code, answer = run_module(BUILTIN[name].main, path=str(path), **args)
    assert code == 0, answer
    worked_out, matches = editing._MODULES[name](text, args)
    if matches:
        assert path.read_text() == worked_out
    elif name != "blockinfile":  # without its anchor blockinfile appends, which apply_edit refuses
        assert path.read_text() == worked_out == text
    edit = editing.EditRecord(gate="g", module=name, args=args, count=matches + 1)
    with pytest.raises(editing.AnchorMismatch):
        editing.apply_edit(text, edit)


@pytest.mark.parametrize("text", [b"a\r\nb\n", b"a\x0cb\n", "a\u2028b\n".encode()])
def test_refuses_line_ends_that_the_modules_split_differently(text: bytes) -> None:
    with pytest.raises(ValueError, match="line ends"):
        editing.simulate(text, [])


def test_a_second_block_of_the_same_marker_is_not_inserted() -> None:
    edit = editing.EditRecord(
        gate="g", module="blockinfile", args={**BLOCK, "insertafter": "^anchor"}, count=1
    )
    once = editing.apply_edit("anchor\n", edit)
    with pytest.raises(editing.AnchorMismatch):
        editing.apply_edit(once, edit)


def test_every_choice_of_edits_is_recognised() -> None:
    edits = [
        editing.EditRecord(gate="g", module="lineinfile", args={"regexp": f"^{old}$", "line": new}, count=1)
        for old, new in (("a", "A"), ("b", "B"), ("c", "C"))
    ]
    pristine = b"a\nb\nc\n"
    seen = set()
    for chosen in editing.subsets(edits):
        found = editing.simulate(pristine, chosen)
        assert editing.applied_subset(pristine, edits, found) == chosen
        seen.add(found)
    assert len(seen) == 8
    assert editing.applied_subset(pristine, edits, b"a\nb\nd\n") is None
