"""Preprocessor conditions on __CUDA_ARCH__ in CUDA sources and headers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .scan_python import Found
from .scan_values import CAPABILITIES, admitted

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:el)?if(?:n?def)?\b(?:[^\n\\]|\\\n|\\.)*", re.MULTILINE)
_TRIGGER = re.compile(r"__CUDA_ARCH__|SM_VERSION|ENABLE_SM\d+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFINED = re.compile(r"\bdefined\s*\(?\s*(\w+)\s*\)?")


def _as_python(condition: str) -> ast.expr | None:
    """A preprocessor expression as a Python one: same operators under other names."""
    text = _DEFINED.sub(
        lambda match: "True" if match.group(1) == "__CUDA_ARCH__" else f"defined_{match.group(1)}", condition
    )
    text = re.sub(r"\b(\d+)[uUlL]+\b", r"\1", text)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def cuda_conditions(text: str) -> Iterator[Found]:
    """Every preprocessor condition on the architecture in a source."""
    for match in _DIRECTIVE.finditer(text):
        whole = " ".join(_COMMENT.sub(" ", match.group().replace("\\\n", " ")).split())
        if not _TRIGGER.search(whole):
            continue
        first = text.count("\n", 0, match.start()) + 1
        last = text.count("\n", 0, match.end()) + 1
        condition = re.sub(r"^#\s*(?:el)?if\b", "", whole)
        if condition == whole:  # ifdef and ifndef ask for device code as such, not for an architecture
            continue
        expression = _as_python(condition)
        if expression is None:
            everything = tuple(f"{major}.{minor}" for major, minor in CAPABILITIES)
            yield first, last, "preprocessor, not understood", whole, everything, whole
            continue
        admits = admitted(expression)
        if admits is not None:
            yield first, last, "preprocessor", whole, tuple(admits), whole
