"""Conditions on the compute capability in Python sources, by syntax tree."""

from __future__ import annotations

import ast
import copy
import io
import re
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

from .scan_values import CAPABILITIES, admitted, holds_capability, major_of, name_of


class Found(NamedTuple):
    """A condition in a source, the statement and function around it, and the names that its branch sets."""

    first: int
    last: int
    form: str
    text: str
    admits: tuple[str, ...]
    statement: str
    within: str = ""
    sets: tuple[str, ...] = ()


# Only files, and in them only statements, with one of these words are read: all of SGLang would take minutes.
_TRIGGER = re.compile(
    r"capability|is_sm_?\d|is_(?:blackwell|hopper|ampere)|SM_VERSION|sm_version|device_sm|sm_arch|cuda_arch"
    r"|\b(?:\w+_)?major\b\s*(?:[=!<>]=|[<>]|in\b|not\b)|[=<>]\s*(?:\w+_)?major\b|major_versions|majors"
    r"|cuMulticastGetGranularity|MULTICAST_SUPPORTED|is_multicast_supported|multicast_supported"
    r"|[\"']\S*(?:sm|compute)_\d{2,3}|\b(?:arch|cc|sm)\b\s*(?:[=!<>]=|[<>]|in\b|not\b)"
)
# `cap = get_device_capability()` and `high, low = ...`: lines with these names are read, too.
_OTHER_NAMES = re.compile(
    r"^[ \t]*((?:\w+\.)?\w+(?:,[ \t]*\w+)?)[ \t]*(?::[^=\n]+)?=(?!=)[ \t]*(?:\(\s*)?"
    r"[^\n]*(?:capability|\b(?:\w+_)?major\b)"
    r"|\b(\w+) := [^\n]*capability",
    re.MULTILINE,
)
_NAMED_LIST = re.compile(
    r"^[ \t]*(?:\w+\.)?(\w+)[ \t]*(?::[^=\n]+)?=[ \t]*(?:frozenset|set|tuple|list)?\(?[\[({]", re.MULTILINE
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


def _sets(statement: ast.stmt | None, test: ast.expr) -> tuple[str, ...]:
    """Names, attributes and keys that the branch of an if sets when this is its condition, or a part of it."""
    if not isinstance(statement, ast.If) or not any(each is test for each in ast.walk(statement.test)):
        return ()
    names = set()
    for line in statement.body:
        for node in ast.walk(line):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                key = target.slice if isinstance(target, ast.Subscript) else None
                names.add(str(key.value) if isinstance(key, ast.Constant) else name_of(target))
    return tuple(sorted(names - {""}))


def _majors(numbers: list[int]) -> tuple[str, ...]:
    wanted = {major_of(number) for number in numbers}
    return tuple(name for name in _ALL if int(name.partition(".")[0]) in wanted)


def _literal(node: ast.expr) -> ast.expr | None:
    """The list, tuple or set of constants that an expression is, frozenset([...]) and its like included."""
    if (
        isinstance(node, ast.Call)
        and name_of(node) in ("frozenset", "set", "tuple", "list")
        and len(node.args) == 1
    ):
        node = node.args[0]
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return node if isinstance(node, ast.List | ast.Tuple | ast.Set) else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, field, []))


def _named_lists(tree: ast.Module) -> dict[str, ast.expr]:
    """Lists of constants by the names that they have in a source; not those that one name has two of."""
    found: dict[str, ast.expr | None] = {}
    for node in _statements(tree.body):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = _literal(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = name_of(target)
            same = value is not None and (
                name not in found or ast.dump(found[name] or target) == ast.dump(value)
            )
            found[name] = value if same else None
    return {name: value for name, value in found.items() if name and value is not None}


def _other_names(text: str) -> set[str]:
    """Names that a source gives to a capability, or to what it makes of one."""
    names: set[str] = set()
    for match in re.finditer("capability|major", text):
        # With the line before, where a value in parentheses may begin.
        begin = text.rfind("\n", 0, max(text.rfind("\n", 0, match.start()), 0)) + 1
        end = text.find("\n", match.end())
        for pair in _OTHER_NAMES.findall(text[begin : end if end >= 0 else None]):
            names |= {name.rpartition(".")[2] for name in re.split(r",[ \t]*", pair[0] or pair[1])}
    return names


class _Spelled(ast.NodeTransformer):
    """An expression with names replaced by what they stand for."""

    def __init__(self, meaning: Callable[[ast.expr], ast.expr | None]) -> None:
        self.meaning = meaning

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.meaning(node) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self.meaning(node) or node


def _integers(node: ast.expr) -> list[int]:
    """The integers of a literal list."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return []
    values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


class _Reader(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.lines = text.splitlines()
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        patterns = [_TRIGGER]
        if names := _other_names(text):
            patterns.append(re.compile(rf"\b(?:{'|'.join(sorted(names))})\b"))
        hits = {bisect_right(starts, match.start()) for each in patterns for match in each.finditer(text)}
        self.triggers = sorted(hits)
        self.attributes: dict[str, ast.expr] = {}
        self.scopes: list[dict[str, ast.expr]] = [{}]
        self.list_names = set(_NAMED_LIST.findall(text))
        self.known = set(self.list_names)
        self.has_walrus = ":=" in text
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
        self.found.append(
            Found(node.lineno, ends, form, shown, admits, around, self.within, _sets(self.statement, node))
        )

    def _is_silent(self, node: ast.AST) -> bool:
        """Whether no line of a node has a word that could matter."""
        if not isinstance(node, ast.stmt | ast.expr):
            return False
        decorators = [each.lineno for each in getattr(node, "decorator_list", [])]
        place = bisect_left(self.triggers, min([node.lineno, *decorators]))
        return place == len(self.triggers) or self.triggers[place] > (node.end_lineno or node.lineno)

    @cached_property
    def named_lists(self) -> dict[str, ast.expr]:
        return _named_lists(self.tree)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """Remember a capability under another name."""
        if isinstance(value, ast.IfExp):
            value = value.body if holds_capability(value.body) else value.orelse
        if isinstance(target, ast.Tuple):
            for place, each in enumerate(target.elts[:2]):
                self._bind(each, ast.Subscript(value, ast.Constant(place), ast.Load()))
            return
        value = self._spelled(value)
        names = self.attributes if isinstance(target, ast.Attribute) else self.scopes[-1]
        if holds_capability(value):
            names[name_of(target)] = value
            self.known.add(name_of(target))
        else:
            names.pop(name_of(target), None)

    def _meaning(self, node: ast.expr) -> ast.expr | None:
        """What a name stands for: a capability, or a list of constants."""
        name = name_of(node)
        for names in [self.attributes] if isinstance(node, ast.Attribute) else reversed(self.scopes):
            if name in names:
                return names[name]
        return self.named_lists.get(name) if name in self.list_names else None

    def _spelled(self, node: ast.expr) -> ast.expr:
        names = (name_of(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute))
        if self.known.isdisjoint(names):
            return node
        spelled: ast.expr = _Spelled(self._meaning).visit(copy.deepcopy(node))
        return spelled

    def visit(self, node: ast.AST) -> None:
        if self._is_silent(node):
            return
        if isinstance(node, ast.stmt):
            outer, self.statement = self.statement, node
            function = self.within
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.within = node.name
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if inner:
                self.scopes.append({})
            if isinstance(node, ast.If) and _leaves(node.body):
                self.guards.add(id(node.test))
            self.generic_visit(node)
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, node.value)
            if inner:
                self.scopes.pop()
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
            for each in ast.walk(node) if self.has_walrus else ():
                if isinstance(each, ast.NamedExpr):
                    self._bind(each.target, each.value)
            guard = id(node) in self.guards
            admits = admitted(self._spelled(node), guard)
            if admits is not None:
                form = "definition" if self._is_definition(node) else "guard" if guard else "condition"
                self._add(node, form, tuple(admits))
                return True
        if _MULTICAST.search(name_of(node)):
            self._add(node, "multicast", _WITH_MULTICAST)
            return True
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                numbers = _integers(self._spelled(keyword.value))
                if numbers and _LISTS.match(keyword.arg or ""):
                    self._add(keyword.value, f"list {keyword.arg}", _majors(numbers))
            for argument in node.args:
                numbers = _integers(self._spelled(argument))
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
        reader.visit(reader.tree)
        found += reader.found
    return sorted(found)
