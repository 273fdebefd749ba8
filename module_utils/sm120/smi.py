"""What nvidia-smi prints, as values: `-q`, the `--query-...` tables, and the matrices of `topo`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
INDENT = 4  # columns per level of `nvidia-smi -q`


@dataclass
class Section:
    """One level of `nvidia-smi -q`: values and sections below it, by name."""

    values: dict[str, str] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)

    def text(self, *path: str) -> str | None:
        """The value at a path; None when it is absent or nvidia-smi says it has none."""
        here = self
        for name in path[:-1]:
            if name not in here.sections:
                return None
            here = here.sections[name]
        value = here.values.get(path[-1])
        return None if value is None or value in ("N/A", "[N/A]", "None") else value

    def number(self, *path: str) -> float | None:
        """The leading number of a value such as `143771 MiB`, `16x` or `700.00 W`."""
        found = re.match(r"-?\d+(\.\d+)?", self.text(*path) or "")
        return float(found[0]) if found else None

    def count(self, *path: str) -> int | None:
        value = self.number(*path)
        return None if value is None else int(value)


@dataclass(frozen=True)
class Query:
    """`nvidia-smi -q`: what holds for all GPUs, and one section per GPU by its bus id."""

    common: Section
    gpus: dict[str, Section]


def bus_id(text: str) -> str:
    """A PCI address as sysfs has it (`0000:06:00.0`), from any of nvidia-smi's and the kernel's spellings."""
    found = re.fullmatch(r"(?:([0-9A-Fa-f]+):)?([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-7]))?", text.strip())
    if not found:
        return text.strip().lower()
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}".lower()


def parse_query(text: str) -> Query:
    common, gpus = Section(), dict[str, Section]()
    stack = [common]
    for line in text.splitlines():
        if not line.strip() or line.startswith("="):
            continue
        if head := re.match(r"GPU\s+([0-9A-Fa-f]+:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$", line):
            stack = [gpus.setdefault(bus_id(head[1]), Section())]
            continue
        # Below a GPU the first level is indented; what holds for all stands at the margin.
        level = (len(line) - len(line.lstrip())) // INDENT - (1 if stack[0] is not common else 0)
        stack = stack[: max(level, 0) + 1]
        name, colon, value = line.partition(" : ")
        if colon:
            stack[-1].values[name.strip()] = value.strip()
            # A value may have lines below it, as a process id has.
            stack.append(Section())
        else:
            stack.append(stack[-1].sections.setdefault(name.strip(), Section()))
    return Query(common, gpus)


def parse_table(text: str, columns: int) -> list[list[str]]:
    """Rows of `--format=csv,noheader`; a line of another shape (an error text) is left out.

    The last column but one may hold commas itself: names of processes do.
    """
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) > columns >= 3:
            cells = [*cells[: columns - 2], ", ".join(cells[columns - 2 : -1]), cells[-1]]
        if len(cells) == columns:
            rows.append(cells)
    return rows


def parse_matrix(text: str) -> dict[str, dict[str, str]]:
    """`nvidia-smi topo -m` and `-p2p`: {row: {column: cell}} of the GPUs, and of `topo -m` the columns beside them."""
    lines = [ESCAPES.sub("", line) for line in text.splitlines()]
    start = next((n for n, line in enumerate(lines) if re.match(r"\s*GPU0(\s|$)", line)), None)
    if start is None:
        return {}
    columns = [name.strip() for name in lines[start].strip().split("\t")]
    if len(columns) == 1:
        columns = lines[start].split()
    matrix: dict[str, dict[str, str]] = {}
    for line in lines[start + 1 :]:
        cells = [cell.strip() for cell in line.strip().split("\t")]
        if len(cells) == 1:
            cells = line.split()
        if not re.fullmatch(r"GPU\d+", cells[0] if cells else ""):
            if matrix:
                break
            continue
        matrix[cells[0]] = dict(zip(columns, cells[1:], strict=False))
    return matrix


def gpu_pairs(matrix: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """The cells of a matrix between two different GPUs: [{from, to, status}]."""
    return [
        {"from": int(row[3:]), "to": int(column[3:]), "status": status}
        for row, cells in matrix.items()
        for column, status in cells.items()
        if re.fullmatch(r"GPU\d+", column) and column != row
    ]


def parse_module_version(text: str) -> tuple[str | None, str | None]:
    """(version, open|proprietary) of the loaded module, from /proc/driver/nvidia/version."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    if not found:
        return None, None
    return found[1], "open" if "Open Kernel Module" in found[0] else "proprietary"


def parse_mismatch(text: str) -> str | None:
    """The library's version in nvidia-smi's complaint that it differs from the module's; `unknown` without one."""
    if "Driver/library version mismatch" not in text:
        return None
    found = re.search(r"NVML library version: (\S+)", text)
    return found[1] if found else "unknown"


def parse_xids(text: str) -> list[dict[str, Any]]:
    """Xid messages of a kernel log: [{xid, bus_id, text}], oldest first."""
    return [
        {"xid": int(found[2]), "bus_id": bus_id(found[1]), "text": line.strip()}
        for line in text.splitlines()
        if (found := re.search(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)", line))
    ]
