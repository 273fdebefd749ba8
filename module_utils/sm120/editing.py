"""What lineinfile (backrefs), blockinfile (markers) and replace (after/before) do to a text, in memory.

Only the options that the catalogue uses. The unit tests hold each of them against the builtin module itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .gate_model import EditRecord


class AnchorMismatch(Exception):
    """The text an edit holds on to is not there as often as it should be."""

    def __init__(self, edit: EditRecord, found: int) -> None:
        self.edit = edit
        self.found = found
        super().__init__(f"{anchor(edit)!r} matches {found} times where {edit['count']} were expected")


def anchor(edit: EditRecord) -> str:
    """The expression an edit looks for."""
    args = edit["args"]
    value = args.get("regexp") or args.get("insertafter") or args.get("insertbefore")
    return str(value)


def _lineinfile(text: str, args: dict[str, Any]) -> tuple[str, int]:
    expression = re.compile(args["regexp"])
    lines = text.splitlines(keepends=True)
    hits = [(at, match) for at, line in enumerate(lines) if (match := expression.search(line))]
    if hits:
        at, match = hits[-1]
        lines[at] = match.expand(args["line"]) + "\n"
    return "".join(lines), len(hits)


def _blockinfile(text: str, args: dict[str, Any]) -> tuple[str, int]:
    lines = text.splitlines(keepends=True)
    begin, end = (args["marker"].replace("{mark}", mark) + "\n" for mark in ("BEGIN", "END"))
    if begin in lines or end in lines:
        return text, 0
    after = args.get("insertafter")
    expression = re.compile(after or args["insertbefore"])
    hits = [at for at, line in enumerate(lines) if expression.search(line)]
    if hits:
        at = hits[-1] + (1 if after else 0)
        if at and not lines[at - 1].endswith("\n"):
            lines[at - 1] += "\n"
        block = args["block"] if args["block"].endswith("\n") else args["block"] + "\n"
        lines[at:at] = [begin, *block.splitlines(keepends=True), end]
    return "".join(lines), len(hits)


def _section(text: str, args: dict[str, Any]) -> tuple[int, int]:
    """The part of a text that replace works in; empty where its bounds are not found."""
    after, before = args.get("after"), args.get("before")
    if not after and not before:
        return 0, len(text)
    inside = f"{after or ''}(?P<subsection>.*{'?' if after and before else ''}){before or ''}"
    section = re.search(inside, text, re.DOTALL)
    return section.span("subsection") if section else (0, 0)


def _replace(text: str, args: dict[str, Any]) -> tuple[str, int]:
    start, stop = _section(text, args)
    changed, count = re.subn(re.compile(args["regexp"], re.MULTILINE), args["replace"], text[start:stop])
    return text[:start] + changed + text[stop:], count


_MODULES = {"lineinfile": _lineinfile, "blockinfile": _blockinfile, "replace": _replace}


def apply_edit(text: str, edit: EditRecord) -> str:
    """The text after one edit; refuses when the anchor does not match as often as it must."""
    changed, found = _MODULES[edit["module"]](text, edit["args"])
    if found != edit["count"]:
        raise AnchorMismatch(edit, found)
    return changed


def simulate(pristine: bytes, edits: Sequence[EditRecord]) -> bytes:
    """The bytes that the builtin modules would leave after these edits, in this order."""
    text = pristine.decode()
    if text and text.splitlines() != text.removesuffix("\n").split("\n"):
        raise ValueError("line ends other than a line feed: the builtin modules differ on such a file")
    for edit in edits:
        text = apply_edit(text, edit)
    return text.encode()


def subsets(edits: Sequence[EditRecord]) -> Iterator[tuple[EditRecord, ...]]:
    """Every ordered choice of edits, the whole first: what an interrupted run can have left behind."""
    for size in range(len(edits), -1, -1):
        yield from itertools.combinations(edits, size)


def applied_subset(
    pristine: bytes, edits: Sequence[EditRecord], found: bytes
) -> tuple[EditRecord, ...] | None:
    """Which of the edits made `found` out of `pristine`; None where no choice of them does."""
    for chosen in subsets(edits):
        try:
            if simulate(pristine, chosen) == found:
                return chosen
        except AnchorMismatch:  # an older and a newer form of the same edit exclude each other
            continue
    return None


def anchor_lines(text: str, edit: EditRecord) -> list[int]:
    """Numbers (from 1) of the lines on which an edit's anchor matches."""
    start, stop = _section(text, edit["args"])
    matches = re.finditer(anchor(edit), text[start:stop], re.MULTILINE)
    return [text.count("\n", 0, start + match.start()) + 1 for match in matches]


def first_line(text: str, expression: str) -> tuple[int, str] | None:
    """Number (from 1) and stripped text of the line on which an expression first matches."""
    match = re.search(expression, text, re.MULTILINE)
    if match is None:
        return None
    at = match.start() + len(match.group()) - len(match.group().lstrip("\n"))
    number = text.count("\n", 0, at) + 1
    return number, text.splitlines()[number - 1].strip()
