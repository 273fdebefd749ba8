"""The words of the gate catalogue: gates, the texts they had in upstream's releases, and their edits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

EditModule = Literal["lineinfile", "blockinfile", "replace"]
State = Literal["closed", "open", "partial", "native", "absent", "drifted", "unknown"]

# Bottom layer first: the order in which edits are made, so that no gate opens over a closed one beneath it.
LAYERS = ("header", "jit", "workspace", "runtime", "start")

PACKAGES = ("flashinfer", "sglang")
PASSING: tuple[State, ...] = ("open", "native", "absent")


class EditRecord(TypedDict):
    """An edit as manifest and plan carry it: enough to repeat it in memory with no catalogue at hand."""

    gate: str
    module: EditModule
    args: dict[str, Any]
    count: int


@dataclass(frozen=True)
class Edit:
    """One call of a builtin module; `count` says how often its anchor matches in upstream's text."""

    module: EditModule
    args: Mapping[str, Any]
    count: int = 1

    def record(self, gate: str) -> EditRecord:
        return {"gate": gate, "module": self.module, "args": dict(self.args), "count": self.count}


@dataclass(frozen=True)
class Variant:
    """A gate as one distinct text of upstream has it.

    kind `edit`: closed, and `edits` open it. `native`: upstream is open, which `pattern` (found `count` times
    in `path`) proves. `absent`: there is no such gate, which `pattern` found nowhere in `path` proves.
    `listed`: a gate that is shown and never opened. `covers` matches lines that the edits make harmless
    without changing them.
    """

    versions: str
    kind: Literal["edit", "native", "absent", "listed"]
    path: str
    edits: tuple[Edit, ...] = ()
    pattern: str = ""
    count: int = 1
    covers: str = ""
    note: str = ""


@dataclass(frozen=True)
class Gate:
    """A condition of upstream that keeps SM120 out, with every text it had."""

    id: str
    label: str
    feature: str
    layer: str
    package: str
    why: str
    variants: tuple[Variant, ...] = field(default=())
