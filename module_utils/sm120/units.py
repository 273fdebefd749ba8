"""The systemd units on a host that run from a given virtual environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# In the order in which systemd takes a unit from the first that has it (systemd.unit(5)).
FOLDERS = tuple(
    Path(root, "systemd/system") for root in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
_START = re.compile(r"^\s*ExecStart\s*=(.*)", re.MULTILINE)


def environment_of(root: Path) -> Path | None:
    """The virtual environment that a folder is in."""
    for folder in root.parents:
        if (folder / "pyvenv.cfg").is_file():
            return folder
    return None


def _leads_into(path: str, environment: str) -> bool:
    """Whether a path or a link that it goes through lies in an environment, whose python is itself a link out of it."""
    for _ in range(40):  # more links than the kernel follows
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        if path.startswith(f"{environment}/"):
            return True
        if not os.path.islink(path):
            return False
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return False


def _runs_from(texts: Iterable[Path], environment: str, virtual: bool) -> bool:
    commands = [
        command
        for text in texts
        if text.is_file()
        for command in _START.findall(text.read_text(encoding="utf-8", errors="replace").replace("\\\n", " "))
        if virtual or "sglang" in command  # half of the system runs from /usr
    ]
    # Also behind numactl, env or a shell.
    words = {word for command in commands for word in re.findall(r"/[^\s\"';,=]+", command)}
    return any(_leads_into(word, environment) for word in words)


def units_of(environment: Path, folders: Sequence[Path] = FOLDERS) -> list[str]:
    """Names of the service units that start from an environment; of a template, its enabled instances."""
    root, virtual = os.path.realpath(environment), (environment / "pyvenv.cfg").is_file()
    texts: dict[str, list[Path]] = {}
    for folder in folders:
        for unit in folder.glob("*.service"):
            texts.setdefault(unit.name, [unit])
    for folder in folders:
        for drop_in in folder.glob("*.service.d/*.conf"):
            texts.setdefault(drop_in.parent.name.removesuffix(".d"), []).append(drop_in)
    names: set[str] = set()
    for name in texts:
        if not _runs_from(texts[name], root, virtual):
            continue
        stem = name.removesuffix(".service")
        if stem.endswith("@"):
            names.update(each.name for folder in folders for each in folder.glob(f"*.wants/{stem}?*.service"))
        else:
            names.add(name)
    return sorted(names)
