"""Conditions on the compute capability in Python sources, by syntax tree."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from .scan_values import CAPABILITIES, admitted, major_of, name_of


class Found(NamedTuple):
    """A condition in a source, and the statement and function around it."""

    first: int
    last: int
    form: str
    text: str
    admits: tuple[str, ...]
    statement: str
    within: str = ""


# Only files, and in them only statements, with one of these words are read: all of SGLang would take minutes.
_TRIGGER = re.compile(
    r"capability|is_sm_?\d|is_(?:blackwell|hopper|ampere)|SM_VERSION|sm_version|device_sm|sm_arch|cuda_arch"
    r"|\b(?:\w+_)?major\b\s*(?:[=!<>]=|[<>]|in\b|not\b)|[=<>]\s*(?:\w+_)?major\b|major_versions|majors"
    r"|cuMulticastGetGranularity|MULTICAST_SUPPORTED|is_multicast_supported|multicast_supported"
    r"|[\"']\S*(?:sm|compute)_\d{2,3}|\b(?:arch|cc|sm)\b\s*(?:[=!<>]=|[<>]|in\b|not\b)"
)
_LISTS = re.compile(
    r"^(?:\w+_)?(?:supported_)?(?:major_versions|majors|compute_capabilit(?:y|ies)|device_capability_majors)$"
)
_MULTICAST = re.compile(r"cuMulticastGetGranularity|MULTICAST_SUPPORTED|is_multicast_supported")
_COMMENTED_ENTRY = re.compile(r"^#\s*[\"'](\w+)[\"'],$")
_ARCH_STRING = re.compile(r"(?:sm|compute)_(\d{2,3})[af]?\b")
_NEAR = 40
_ALL = tuple(f"{major}.{minor}" for major, minor in CAPABILITIES)
# A board without NVLink multicast, as SM120 boards are, is what these calls turn away.
_WITH_MULTICAST = ("9.0", "10.0", "10.3")


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a branch refuses: it raises, or returns false or nothing, whatever it logs before."""
    last = body[-1]
    if isinstance(last, ast.Return):
        return last.value is None or (isinstance(last.value, ast.Constant) and not last.value.value)
    return isinstance(last, ast.Raise)


def _majors(numbers: list[int]) -> tuple[str, ...]:
    wanted = {major_of(number) for number in numbers}
    return tuple(name for name in _ALL if int(name.partition(".")[0]) in wanted)


def _integers(node: ast.expr) -> list[int]:
    """The integers of a literal list."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return []
    values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


class _Reader(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines()
        self.triggers = [number for number, line in enumerate(self.lines, 1) if _TRIGGER.search(line)]
        self.found: list[Found] = []
        self.statement: ast.stmt | None = None
        self.guards: set[int] = set()
        self.within = ""

    def _add(self, node: ast.expr, form: str, admits: tuple[str, ...]) -> None:
        shown = " ".join(ast.unparse(node).split())
        first = self.statement.lineno if self.statement else node.lineno
        # A compound statement speaks through its head and the first lines of its body.
        last = max(
            node.end_lineno or node.lineno, min(getattr(self.statement, "end_lineno", first), first + 12)
        )
        # A generated table is one statement of a megabyte, with a condition on every line of it.
        near = max(first, node.lineno - _NEAR), min(last, (node.end_lineno or node.lineno) + _NEAR)
        around = "\n".join(self.lines[near[0] - 1 : near[1]])
        ends = node.end_lineno or node.lineno
        self.found.append(Found(node.lineno, ends, form, shown, admits, around, self.within))

    def _is_silent(self, node: ast.AST) -> bool:
        """Whether no line of a node has a word that could matter."""
        if not isinstance(node, ast.stmt | ast.expr):
            return False
        decorators = [each.lineno for each in getattr(node, "decorator_list", [])]
        place = bisect_left(self.triggers, min([node.lineno, *decorators]))
        return place == len(self.triggers) or self.triggers[place] > (node.end_lineno or node.lineno)

    def visit(self, node: ast.AST) -> None:
        if self._is_silent(node):
            return
        if isinstance(node, ast.stmt):
            outer, self.statement = self.statement, node
            function = self.within
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.within = node.name
            if isinstance(node, ast.If) and _leaves(node.body):
                self.guards.add(id(node.test))
            self.generic_visit(node)
            self.statement, self.within = outer, function
        elif not (isinstance(node, ast.expr) and self._expression(node)):
            self.generic_visit(node)

    def _is_definition(self, node: ast.expr) -> bool:
        """Whether a variable like _is_sm90_supported is set to this: its readers are the conditions."""
        statement = self.statement
        if not isinstance(statement, ast.Assign) or statement.value is not node:
            return False
        return all(
            admitted(ast.Name(name_of(target), ast.Load())) is not None for target in statement.targets
        )

    def _expression(self, node: ast.expr) -> bool:
        """Report an expression that depends on the capability as a whole; False: look inside it."""
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            return True
        if isinstance(node, ast.BoolOp | ast.UnaryOp | ast.Compare | ast.Call | ast.Name | ast.Attribute):
            guard = id(node) in self.guards
            admits = admitted(node, guard)
            if admits is not None:
                form = "definition" if self._is_definition(node) else "guard" if guard else "condition"
                self._add(node, form, tuple(admits))
                return True
        if _MULTICAST.search(name_of(node)):
            self._add(node, "multicast", _WITH_MULTICAST)
            return True
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                numbers = _integers(keyword.value)
                if numbers and _LISTS.match(keyword.arg or ""):
                    self._add(keyword.value, f"list {keyword.arg}", _majors(numbers))
            for argument in node.args:
                numbers = _integers(argument)
                if numbers and _LISTS.match(name_of(node)):
                    self._add(argument, f"list {name_of(node)}", _majors(numbers))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            numbers = [int(number) for number in _ARCH_STRING.findall(node.value)]
            if numbers and " " not in node.value:
                self._add(node, "architecture string", _majors(numbers))
        return False


def _commented_entries(text: str) -> Iterator[Found]:
    """Entries that upstream commented out of a list: a gate with no condition in it."""
    if not re.search(r"#\s*[\"']\w+[\"'],", text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _COMMENTED_ENTRY.match(token.string) if token.type == tokenize.COMMENT else None
        if match and token.line.strip() == token.string:
            at = token.start[0]
            yield Found(at, at, "commented out of a list", token.string, ("9.0", "10.0"), token.string)


def python_conditions(text: str) -> list[Found]:
    """Every condition on the compute capability in a source."""
    found = list(_commented_entries(text))
    if _TRIGGER.search(text):
        reader = _Reader(text)
        reader.visit(ast.parse(text))
        found += reader.found
    return sorted(found)
