#!/usr/bin/env python3
"""Write the reference part of each role's README from its argument specs; `--check` only compares.

What stands above the marker line is written by hand and left alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MARKER = "<!-- Below: tools/role_readme.py, from meta/argument_specs.yml -->\n"


def plain(text: str | list[str]) -> str:
    """Markdown of a description: its paragraphs joined, Ansible's semantic markup as code."""
    joined = " ".join(text if isinstance(text, list) else [text])
    return re.sub(r"\b(?:V|O|C|E|RV)\(([^)]*)\)", r"`\1`", " ".join(joined.split())).replace("|", "\\|")


def variables(options: dict[str, Any]) -> str:
    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        default = "required" if option.get("required") else f"`{json.dumps(option.get('default'))}`"
        choices = (
            f" One of {', '.join(f'`{choice}`' for choice in option['choices'])}."
            if "choices" in option
            else ""
        )
        lines.append(
            f"| `{name}` | {kind} | {default.replace('|', chr(92) + '|')} | {plain(option['description'])}{choices} |"
        )
    return "\n".join(lines) + "\n"


def readme(role: Path) -> str:
    """The README as it should be."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    path = role / "README.md"
    above = f"# {role.name}\n\n{plain(specs['main']['description'])}\n\n"
    if path.exists():
        above = path.read_text().split(MARKER)[0].rstrip() + "\n\n"
    points = [f"- `{name}`: {plain(spec['short_description'])}." for name, spec in specs.items()]
    entry_points = "## Entry points\n\n" + "\n".join(points) + "\n\n"
    return above + MARKER + entry_points + "## Variables\n\n" + variables(specs["main"].get("options", {}))


def main() -> None:
    stale = []
    for spec in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        role = spec.parents[1]
        path, wanted = role / "README.md", readme(role)
        if path.exists() and path.read_text() == wanted:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if "--check" not in sys.argv:
            path.write_text(wanted)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}. Run: tools/role_readme.py")


if __name__ == "__main__":
    main()
