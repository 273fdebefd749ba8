"""The systemd units on a host that run from a given virtual environment, and where their FlashInfer keeps kernels."""

from __future__ import annotations

import pwd
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDERS = (Path("/etc/systemd/system"), Path("/run/systemd/system"))


def environment_of(root: Path) -> Path | None:
    """The virtual environment that a folder is in."""
    for folder in root.parents:
        if (folder / "pyvenv.cfg").is_file():
            return folder
    return None


def _text(unit: Path) -> str:
    """A unit with its drop-ins, as one text."""
    parts = [unit, *sorted((unit.parent / f"{unit.name}.d").glob("*.conf"))]
    return "\n".join(part.read_text(encoding="utf-8", errors="replace") for part in parts if part.is_file())


def _runs_from(unit: Path, environment: Path) -> bool:
    start = re.compile(rf"^\s*ExecStart\s*=\s*[-@:+!|]*\"?{re.escape(str(environment))}/", re.MULTILINE)
    return start.search(_text(unit)) is not None


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """NAME=VALUE of Environment= or of a line of an EnvironmentFile=; nothing where the quotes do not close."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def _variables(text: str) -> dict[str, str]:
    """The environment that a unit gives to its process, as far as its files say; files go before lines."""
    given: dict[str, str] = {}
    for line in re.findall(r"^\s*Environment\s*=(.*)$", text, re.MULTILINE):
        given.update(_assignments(line))
    for name in re.findall(r"^\s*EnvironmentFile\s*=\s*-?\"?([^\"\n]+?)\"?\s*$", text, re.MULTILINE):
        path = Path(name)
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
            given.update(_assignments(line))
    return given


def _home(text: str) -> str:
    users = re.findall(r"^\s*User\s*=\s*(\S+)\s*$", text, re.MULTILINE)
    try:
        return pwd.getpwnam(users[-1] if users else "root").pw_dir
    except KeyError:
        return ""


def cache_bases(environment: Path, folders: Iterable[Path] = FOLDERS) -> list[str]:
    """Folders below which the units of an environment may keep FlashInfer's kernels: a workspace, and the homes."""
    bases = set()
    for unit in (unit for folder in folders for unit in folder.glob("*.service")):
        if _runs_from(unit, environment):
            text = _text(unit)
            given = _variables(text)
            bases |= {given.get("FLASHINFER_WORKSPACE_BASE", ""), given.get("HOME") or _home(text)}
    return sorted(base for base in bases if base.startswith("/") and "%" not in base)


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
