"""The systemd units on a host that run from a given virtual environment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FOLDERS = (Path("/etc/systemd/system"), Path("/run/systemd/system"))


def environment_of(root: Path) -> Path | None:
    """The virtual environment that a folder is in."""
    for folder in root.parents:
        if (folder / "pyvenv.cfg").is_file():
            return folder
    return None


def _runs_from(unit: Path, environment: Path) -> bool:
    drop_ins = unit.parent / f"{unit.name}.d"
    start = re.compile(rf"^\s*ExecStart\s*=\s*[-@:+!|]*\"?{re.escape(str(environment))}/", re.MULTILINE)
    texts = [unit, *sorted(drop_ins.glob("*.conf"))]
    return any(
        start.search(text.read_text(encoding="utf-8", errors="replace")) for text in texts if text.is_file()
    )


def units_of(environment: Path, folders: Iterable[Path] = FOLDERS) -> list[str]:
    """Names of the service units that start from an environment; of a template, its enabled instances."""
    names = set()
    for folder in folders:
        for unit in folder.glob("*.service"):
            if not _runs_from(unit, environment):
                continue
            if unit.stem.endswith("@"):
                names |= {each.name for each in folder.glob(f"*.wants/{unit.stem}?*.service")}
            else:
                names.add(unit.name)
    return sorted(names)
