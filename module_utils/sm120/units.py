"""The systemd units on a host that run from a given virtual environment."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# In the order in which systemd takes a unit from the first that has it (systemd.unit(5)).
FOLDERS = tuple(
    Path(root, "systemd/system") for root in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
_COMMENT = re.compile(r"^\s*[#;].*\n?", re.MULTILINE)
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


def _text(parts: Iterable[Path]) -> str:
    """A unit with its drop-ins, or files of variables, as one text: without comments, each setting on one line."""
    texts = [part.read_text(encoding="utf-8", errors="replace") for part in parts if part.is_file()]
    return "\n".join(_COMMENT.sub("", text).replace("\\\n", " ") for text in texts)


def _runs_from(text: str, environment: str, virtual: bool) -> bool:
    commands = [
        command
        for command in _START.findall(text)
        if virtual or "sglang" in command  # half of the system runs from /usr
    ]
    # Also behind numactl, env or a shell.
    words = {word for command in commands for word in re.findall(r"/[^\s\"';,=]+", command)}
    return any(_leads_into(word, environment) for word in words)


def _texts_of(environment: Path, folders: Sequence[Path]) -> dict[str, str]:
    """The text of each service unit that starts from an environment."""
    root, virtual = os.path.realpath(environment), (environment / "pyvenv.cfg").is_file()
    parts: dict[str, list[Path]] = {}
    for folder in folders:
        for unit in folder.glob("*.service"):
            parts.setdefault(unit.name, [unit])
    for folder in folders:
        for drop_in in sorted(folder.glob("*.service.d/*.conf")):
            parts.setdefault(drop_in.parent.name.removesuffix(".d"), []).append(drop_in)
    texts = {name: _text(files) for name, files in parts.items()}
    return {name: text for name, text in texts.items() if _runs_from(text, root, virtual)}


def units_of(environment: Path, folders: Sequence[Path] = FOLDERS) -> list[str]:
    """Names of the service units that start from an environment; of a template, its enabled instances."""
    names: set[str] = set()
    for name in _texts_of(environment, folders):
        stem = name.removesuffix(".service")
        if stem.endswith("@"):
            names.update(each.name for folder in folders for each in folder.glob(f"*.wants/{stem}?*.service"))
        else:
            names.add(name)
    return sorted(names)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """NAME=VALUE of Environment= or of a line of an EnvironmentFile=; nothing where the quotes do not close."""
    try:
        words = shlex.split(text)
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
        for line in _text([Path(name)]).splitlines():
            given.update(_assignments(line))
    return given


def _home(text: str) -> str:
    users = re.findall(r"^\s*User\s*=\s*(\S+)\s*$", text, re.MULTILINE)
    try:
        return pwd.getpwnam(users[-1] if users else "root").pw_dir
    except KeyError:
        return ""


def _holds_kernels(base: str) -> bool:
    """Whether there may be a cache below a folder; in / of a service user there is none, it could not write there."""
    if not base.startswith("/") or "%" in base:
        return False
    return base != "/" or Path("/.cache/flashinfer").is_dir()


def cache_bases(environment: Path, folders: Sequence[Path] = FOLDERS) -> list[str]:
    """Folders below which the units of an environment may keep FlashInfer's kernels: a workspace, and the homes."""
    bases = set()
    for text in _texts_of(environment, folders).values():
        given = _variables(text)
        bases |= {given.get("FLASHINFER_WORKSPACE_BASE", ""), given.get("HOME") or _home(text)}
    return sorted(filter(_holds_kernels, bases))
