#!/usr/bin/env python3
"""Write the table of docs/gates.md from the catalogue; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/matrix")]

import versions  # noqa: E402 - the path has to be set first

from module_utils.sm120 import catalogue  # noqa: E402
from module_utils.sm120.versions import Ranges  # noqa: E402

BEGIN, END = (
    "<!-- Below: tools/gates_doc.py, from the catalogue -->\n",
    "<!-- Above: tools/gates_doc.py -->\n",
)
SHOWN = {"edit": "edit", "native": "native", "absent": "absent", "listed": "listed"}


def _table(package: str, releases: list[str]) -> str:
    """States per release: one line for each run of releases with the same texts."""
    ranges = Ranges()
    gates = [gate for gate in catalogue.GATES if gate.package == package]
    rows: list[tuple[list[str], tuple[str, ...]]] = []
    for release in releases:
        cells = []
        for gate in gates:
            variant = catalogue.variant_for(gate, release, ranges)
            place = f"{SHOWN[variant.kind]} `{Path(variant.path).name}`" if variant else "unknown"
            cells.append(place)
        if rows and rows[-1][1] == tuple(cells):
            rows[-1][0].append(release)
        else:
            rows.append(([release], tuple(cells)))
    head = f"| {package} | " + " | ".join(f"{gate.id} ({gate.label})" for gate in gates) + " |\n"
    lines = head + "|---" * (len(gates) + 1) + "|\n"
    for releases_, cells in rows:
        span = releases_[0] if len(releases_) == 1 else f"{releases_[0]} - {releases_[-1]}"
        lines += f"| {span} | " + " | ".join(cells) + " |\n"
    return lines


def generated() -> str:
    gates = "".join(
        f"| {gate.id} | {gate.label} | {gate.feature or 'none'} | {gate.layer} | {gate.package} | {gate.why} |\n"
        for gate in catalogue.GATES
    )
    return (
        "| gate | label | feature | layer | package | why it is there |\n|---|---|---|---|---|---|\n"
        + gates
        + "\n"
        + _table("sglang", list(versions.PINS))
        + "\n"
        + _table("flashinfer", list(versions.FLASHINFER))
    )


def main() -> None:
    path = ROOT / "docs/gates.md"
    text = path.read_text()
    above, _, rest = text.partition(BEGIN)
    below = rest.partition(END)[2]
    wanted = f"{above}{BEGIN}\n{generated()}\n{END}{below}"
    if text == wanted:
        return
    if "--check" in sys.argv:
        sys.exit("docs/gates.md is out of date. Run: tools/gates_doc.py")
    path.write_text(wanted)


if __name__ == "__main__":
    main()
