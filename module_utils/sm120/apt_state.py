"""What dpkg has and what apt would do, from their answers; and what is to be refused before apt does it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Run = Callable[[list[str]], tuple[int, str]]

QUERY = ["dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Want}\t${db:Status-Status}\n"]
SIMULATE = ["apt-get", "-s", "-y", "-q", "-o", "Debug::NoLocking=1"]
INSTALL_OPTIONS = ["--no-install-recommends", "-o", "APT::Install-Suggests=0"]


@dataclass(frozen=True)
class Package:
    version: str
    want: str  # install, hold, deinstall, purge
    status: str  # installed, config-files, half-configured, ...

    @property
    def there(self) -> bool:
        return self.status not in ("not-installed", "config-files")


@dataclass(frozen=True)
class Simulation:
    """One `apt-get -s`: {name: (version now, version then)}, names that go, and why it cannot."""

    install: dict[str, tuple[str, str]]
    remove: tuple[str, ...]
    error: str


def parse_packages(text: str) -> dict[str, Package]:
    """All that dpkg knows; of a package of several architectures, the one that is there."""
    found: dict[str, Package] = {}
    for line in text.splitlines():
        name, version, want, status = [*line.split("\t"), "", "", ""][:4]
        if name not in found or not found[name].there:
            found[name] = Package(version, want, status)
    return found


def parse_simulation(code: int, text: str) -> Simulation:
    install: dict[str, tuple[str, str]] = {}
    remove: list[str] = []
    for line in text.splitlines():
        if done := re.match(r"Inst (\S+) (?:\[([^\]]+)\] )?\((\S+)", line):
            install[done[1]] = (done[2] or "", done[3])
        elif done := re.match(r"(?:Remv|Purg) (\S+)", line):
            remove.append(done[1])
    error = "" if code == 0 else "; ".join(complaints(text)) or f"apt-get ended with {code}"
    return Simulation(install, tuple(remove), error)


def complaints(text: str) -> list[str]:
    """Errors, and the indented lines that belong to one or to the list of unmet dependencies."""
    found, inside = [], False
    for line in text.splitlines():
        inside = line.startswith("E: ") or "unmet dependencies" in line or (inside and line.startswith(" "))
        if inside and not line.endswith("unmet dependencies:"):
            found.append(" ".join(line.split()))
    return found


def query(run: Run) -> dict[str, Package]:
    code, text = run(QUERY)
    if code != 0:
        raise OSError(f"dpkg-query ended with {code}: {' '.join(text.split())[-300:]}")
    return parse_packages(text)


def simulate(run: Run, action: str, names: Iterable[str], *options: str) -> Simulation:
    return parse_simulation(*run([*SIMULATE, *INSTALL_OPTIONS, *options, action, *names]))


def held(packages: dict[str, Package]) -> list[str]:
    return sorted(name for name, package in packages.items() if package.want == "hold")


def branch_of(version: str) -> str:
    """A package's upstream version: without epoch and Debian revision."""
    return version.partition(":")[2] or version


def of_branch(version: str, branch: str) -> bool:
    """Whether a version is of a branch (580) or is a release (580.159.04)."""
    return re.match(rf"{re.escape(branch)}(?![0-9])", branch_of(version)) is not None


def refusal(
    planned: Simulation, packages: dict[str, Package], ours: Iterable[str], unheld: Iterable[str]
) -> str:
    """Why apt must not do this; empty when it may. `ours` may be removed, `unheld` were held by us."""
    kept = [name for name in held(packages) if name not in set(unheld)]
    changed = [name for name in (*planned.install, *planned.remove) if name in kept]
    if changed:
        return f"{', '.join(changed)} on hold (apt-mark showhold); to release: apt-mark unhold {' '.join(changed)}"
    if planned.error:
        holds = f"; packages on hold: {', '.join(kept)}" if kept else ""
        return f"apt-get cannot: {planned.error}{holds}"
    strangers = [name for name in planned.remove if name not in set(ours)]
    if strangers:
        return f"apt-get would remove {', '.join(strangers)}"
    return ""


def to_purge(
    run: Run,
    ours: Iterable[str],
    requested: Iterable[str],
    unheld: Iterable[str],
    packages: dict[str, Package],
) -> tuple[list[str], str]:
    """(what can go without taking anything else along, why some stays). What the operator holds stays."""
    ours, unheld = list(ours), list(unheld)
    keep = set(held(packages)) - set(unheld)
    present = [
        name
        for name in ours
        if name in packages and packages[name].status != "not-installed" and name not in keep
    ]

    def purged(names: list[str], *options: str) -> Simulation:
        # `unheld` are released before the real purge.
        return simulate(run, "purge", names, "--allow-change-held-packages", *options)

    if not present:
        return [], ""
    whole = purged(present)
    if whole.error:
        return [], whole.error
    if set(whole.remove) <= set(present):
        # Names that came with a later release of ours: Ubuntu's firmware has the release in its name.
        releases = {packages[name].version for name in unheld if name in packages and packages[name].there}
        later = [
            name
            for name, package in packages.items()
            if package.there and package.version in releases and name not in {*ours, *keep}
        ]
        unneeded = set(purged(present, "--auto-remove").remove) if later else set()
        return [*present, *(name for name in later if name in unneeded)], ""
    # Something else needs part of it by now: what was asked for goes, and what nothing needs after it.
    asked = [name for name in present if name in set(requested)]
    if not asked:
        return [], ""
    needed_by = sorted(set(purged(asked).remove) - set(present))
    if needed_by:
        return [], f"{', '.join(asked)} needed by {', '.join(needed_by)}"
    return [name for name in present if name in set(purged(asked, "--auto-remove").remove)], ""
