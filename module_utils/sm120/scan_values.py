"""What an expression is worth on each compute capability: true, false, or not known from the text alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from operator import add, eq, ge, gt, le, lt, mul, ne
from typing import Any

Capability = tuple[int, int]

CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))

UNKNOWN = object()

# Names that hold a compute capability, in whatever form; the constant that one is compared with tells which.
_WHOLE = re.compile(
    r"^(?:[a-z]+_)*(?:get_)?(?:device_)?(?:compute_)?(?:capability|sm_version|device_sm|sm_arch|cuda_arch|arch)$"
    r"|^SM_VERSION$|^cc$|^sm$|^__CUDA_ARCH__$"
)
_MAJOR = re.compile(r"^(?:sm|cc|device|arch|compute|capability)?_?major$")
_MINOR = re.compile(r"^(?:sm|cc|device|arch|compute|capability)?_?minor$")
_PREDICATE = re.compile(
    r"^_*(?:is|use)_?(?:cuda_)?sm_?(\d{2,3})[af]?((?:_or_(?:sm_?)?\d{2,3}[af]?)*)(?:_supported)?$"
)
_ARCHITECTURE = re.compile(r"^(?:sm_?|compute_)?(\d{2,3})[af]?$")
_NAMED = {"blackwell": (10, 11, 12), "hopper": (9,), "ampere": (8,)}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Mult: mul,
}


class Whole:
    """A compute capability whose form is not known until it is compared."""


def name_of(node: ast.expr) -> str:
    """The last part of a name, an attribute or a call."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def major_of(number: int) -> int:
    """12 of 12, 120, 121 and 1200."""
    while number >= 20:
        number //= 10
    return number


def _predicate(name: str, capability: Capability) -> object:
    """What is_sm90_supported() and its like answer."""
    match = _PREDICATE.match(name)
    if match:
        numbers = [match.group(1), *re.findall(r"\d{2,3}", match.group(2))]
        return capability[0] in {major_of(int(number)) for number in numbers}
    for word, majors in _NAMED.items():
        if re.match(rf"^_*is_{word}(_supported)?$", name):
            return capability[0] in majors
    return UNKNOWN


def _value(node: ast.expr, capability: Capability) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.NamedExpr):
        return _value(node.value, capability)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        values = [_value(each, capability) for each in node.elts]
        return UNKNOWN if UNKNOWN in values else tuple(values)
    if isinstance(node, ast.BinOp):
        sides = [_value(each, capability) for each in (node.left, node.right)]
        known = type(node.op) in _ARITHMETIC and all(type(each) is int for each in sides)
        return _ARITHMETIC[type(node.op)](*sides) if known else UNKNOWN
    name = name_of(node)
    if isinstance(node, ast.Subscript):
        whole = isinstance(_value(node.value, capability), Whole)
        at = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return capability[0 if at == 0 else 1] if whole and at in (0, 1) else UNKNOWN
    if _MAJOR.match(name):
        return capability[0]
    if _MINOR.match(name):
        return capability[1]
    return Whole() if _WHOLE.match(name) else UNKNOWN


def holds_capability(node: ast.expr) -> bool:
    """Whether a value is a compute capability, a part of one, or made of one."""
    values = [_value(node, capability) for capability in CAPABILITIES]
    return isinstance(values[0], Whole) or (UNKNOWN not in values and len(set(values)) > 1)


def _in_form_of(other: Any, capability: Capability) -> Any:
    """The capability as the thing it is compared with writes one."""
    major, minor = capability
    if isinstance(other, tuple):
        if len(other) == 2 and all(isinstance(each, int) for each in other) and other[1] < 8 <= other[0] < 20:
            return capability
        forms = {type(_in_form_of(each, capability)): _in_form_of(each, capability) for each in other}
        return next(iter(forms.values())) if len(forms) == 1 else UNKNOWN
    if isinstance(other, bool) or not isinstance(other, int | float | str):
        return UNKNOWN
    if isinstance(other, str):
        match = _ARCHITECTURE.match(other)
        return other.replace(match.group(1), f"{major}{minor}") if match else UNKNOWN
    if isinstance(other, float):
        return float(f"{major}.{minor}")
    if other >= 500:
        return 100 * major + 10 * minor
    return 10 * major + minor if other >= 20 else major


def _compared(left: Any, operator: ast.cmpop, right: Any, capability: Capability) -> object:
    if isinstance(operator, ast.In | ast.NotIn):
        if isinstance(left, Whole) and isinstance(right, tuple):
            # (9, 0) in ((9, 0), (10, 0)) compares pairs; 9 in (9, 10) compares numbers.
            pairs = all(isinstance(each, tuple) for each in right) and right != ()
            left = capability if pairs else _in_form_of(right[0], capability) if right else UNKNOWN
        if UNKNOWN in (left, right) or not isinstance(right, tuple) or isinstance(left, Whole):
            return UNKNOWN
        return (left in right) is isinstance(operator, ast.In)
    if isinstance(left, Whole):
        left = _in_form_of(right, capability)
    if isinstance(right, Whole):
        right = _in_form_of(left, capability)
    if left is UNKNOWN or right is UNKNOWN or isinstance(left, Whole) or isinstance(right, Whole):
        return UNKNOWN
    try:
        return _COMPARE[type(operator)](left, right)
    except (KeyError, TypeError):
        return UNKNOWN


def truth(node: ast.expr, capability: Capability) -> object:
    """True, False or UNKNOWN, by the three-valued logic of and, or and not."""
    if isinstance(node, ast.BoolOp):
        decisive = isinstance(node.op, ast.Or)
        values = [truth(each, capability) for each in node.values]
        if decisive in values:
            return decisive
        return UNKNOWN if UNKNOWN in values else not decisive
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = truth(node.operand, capability)
        return UNKNOWN if value is UNKNOWN else not value
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        results = [
            _compared(_value(left, capability), operator, _value(right, capability), capability)
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False)
        ]
        if False in results:
            return False
        return UNKNOWN if UNKNOWN in results else True
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return node.value
    return _predicate(name_of(node), capability)


def admitted(node: ast.expr, guard: bool = False) -> list[str] | None:
    """Capabilities on which an expression can be true; None: it does not depend on them.

    Of a guard, those that it does not turn away. What it may turn away for another reason too, as in
    `backend == "x" and not is_sm90()`, it turns away, for as long as it lets other capabilities through for sure.
    """
    values = [truth(node, capability) for capability in CAPABILITIES]
    values = [value if value is UNKNOWN else bool(value) for value in values]
    if len(set(map(id, values))) == 1:
        return None
    passing = (False,) if guard and False in values else (UNKNOWN, not guard)
    return [
        f"{major}.{minor}"
        for (major, minor), value in zip(CAPABILITIES, values, strict=True)
        if value in passing
    ]
