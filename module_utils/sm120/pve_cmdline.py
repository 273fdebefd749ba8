"""The kernel command line of a Proxmox VE host: parameters merged one by one, and taken back one by one.

Sources: https://pve.proxmox.com/pve-docs/chapter-sysadmin.html (where each boot loader keeps the line),
https://docs.kernel.org/admin-guide/kernel-parameters.html (values of iommu, intel_iommu and amd_iommu).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .pve_finding import Finding

__all__ = ["Merge", "assignments", "check_parameters", "edit", "line_of", "merge", "split", "unmerge"]

GRUB_KEY = "GRUB_CMDLINE_LINUX_DEFAULT"
_VALUE = r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s#]*)"""
_GRUB_LINE = re.compile(
    rf"^(?P<head>[ \t]*(?:export[ \t]+)?{GRUB_KEY}=){_VALUE}(?P<tail>[ \t]*(?:#.*)?)$", re.MULTILINE
)

_ASSIGNED = re.compile(
    rf"^[ \t]*(?:export[ \t]+)?(?P<key>GRUB_CMDLINE_LINUX(?:_DEFAULT)?)\+?={_VALUE}", re.MULTILINE
)

# Parameters that may stand several times; of all others the wanted value takes the place of another.
_REPEATABLE = frozenset({"console", "earlycon", "module_blacklist", "vfio_pci.ids"})

# The values that exist; "off" of each turns passthrough off.
_KNOWN_VALUES: dict[str, set[str]] = {
    "iommu": {
        "allowdac",
        "biomerge",
        "force",
        "fullflush",
        "memaper",
        "merge",
        "noagp",
        "noaperture",
        "nobypass",
        "noforce",
        "nomerge",
        "nopt",
        "off",
        "panic",
        "pt",
        "soft",
        "usedac",
    },
    "intel_iommu": {
        "forcedac",
        "igfx_off",
        "off",
        "on",
        "pasid_off",
        "sm_off",
        "sm_on",
        "sp_off",
        "strict",
        "tboot_noforce",
    },
    "amd_iommu": {
        "force_enable",
        "force_isolation",
        "fullflush",
        "irtcachedis",
        "nohugepages",
        "off",
        "pgtbl_v1",
        "pgtbl_v2",
        "v2_pgsizes_only",
    },
}


def split(line: str) -> list[str]:
    """The parameters of a line; a quoted value may hold spaces."""
    return re.findall(r'(?:[^\s"]|"[^"]*")+', line)


def _key(parameter: str) -> str:
    """The kernel takes ``-`` and ``_`` for the same in names."""
    return parameter.partition("=")[0].replace("-", "_")


@dataclass(frozen=True)
class Merge:
    """A merged line, and what has to be done to take the merge back."""

    line: str
    added: tuple[str, ...]
    removed: tuple[str, ...]


def merge(line: str, add: Sequence[str], remove: Iterable[str] = ()) -> Merge:
    """Add and remove single parameters; every other one keeps its place.

    Wanted names that stand several times are one row, because their order matters to the kernel
    (hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=512): the line has just that row, or gets it anew.
    """
    found = split(line)
    unwanted, keys, there = set(remove), [_key(item) for item in add], [_key(item) for item in found]
    several = {key for key in keys if keys.count(key) > 1 or there.count(key) > 1} - _REPEATABLE
    in_order = [item for item in found if _key(item) in several] == [
        item for item in add if _key(item) in several
    ]

    def stays(item: str) -> bool:
        key = _key(item)
        if key in several:
            return in_order
        return item in add or (item not in unwanted and (key not in keys or key in _REPEATABLE))

    kept = [item for item in found if stays(item)]
    added = [wanted for wanted in add if wanted not in kept]
    if not added and len(kept) == len(found):
        return Merge(line, (), ())
    return Merge(" ".join([*kept, *added]), tuple(added), tuple(item for item in found if not stays(item)))


def unmerge(line: str, added: Iterable[str], removed: Sequence[str]) -> str:
    """Take a merge back in a line that someone else may have changed since."""
    ours = set(added)
    found = [item for item in split(line) if item not in ours]
    return " ".join([*found, *[item for item in removed if item not in found]])


def check_parameters(
    parameters: Iterable[str],
    where: str,
    removable: Iterable[str] = (),
    *,
    wanted: bool = False,
    by_hand: bool = False,
) -> list[Finding]:
    """Values that turn the IOMMU off, and values that do not exist.

    The kernel ignores the latter, so they are a warning where found and an error where asked for (``wanted``).
    ``by_hand``: nothing of ours changes the place where they are.
    """
    by_hand = by_hand or wanted
    findings: list[Finding] = []
    ignored = set(removable)
    for parameter in parameters:
        name, _, text = parameter.partition("=")
        known = _KNOWN_VALUES.get(_key(name))
        if known is None or parameter in ignored:
            continue
        fix = f"take {parameter} out of it" if by_hand else f"pve_host_cmdline_remove: ['{parameter}']"
        for value in text.split(","):
            if value == "off":
                findings.append(
                    Finding(
                        "kernel parameters",
                        "the IOMMU on, without which there is no passthrough",
                        f"{parameter} in {where} (a setting of bare-metal hosts)",
                        fix,
                    )
                )
            elif value.partition("=")[0] not in known:
                findings.append(
                    Finding(
                        "kernel parameters",
                        f"a value of {name} that exists ({', '.join(sorted(known))})",
                        f"{parameter} in {where}, which the kernel ignores",
                        fix,
                        severity="error" if wanted else "warning",
                    )
                )
    return findings


def _quoted(value: str) -> tuple[str, str]:
    """A shell value's quote and text."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[0], value[1:-1]
    return "", value


def assignments(text: str) -> dict[str, tuple[int, list[str]]]:
    """What a file of GRUB's adds to the kernel's parameters: key -> (number of its last line, parameters)."""
    return {
        match["key"]: (text.count("\n", 0, match.start()) + 1, split(_quoted(match["value"])[1]))
        for match in _ASSIGNED.finditer(text)
    }


def _grub_lines(text: str) -> list[re.Match[str]]:
    """GRUB's assignments of our line; one that cannot be edited in place is an error, for a second one beside it
    would take away what a user has there."""
    matches = list(_GRUB_LINE.finditer(text))
    edited = {match.start() for match in matches}
    for match in re.finditer(rf"^[ \t]*(?:export[ \t]+)?{GRUB_KEY}\+?=.*", text, re.MULTILINE):
        if match.start() not in edited:
            number = text.count("\n", 0, match.start()) + 1
            raise ValueError(
                f"line {number} is not one plain assignment ({match[0].strip()!r}): write it as "
                f'{GRUB_KEY}="..." on one line, with Unix line ends'
            )
    return matches


def line_of(text: str, kind: str) -> str:
    """The command line that a file holds; ``kind`` is grub or plain."""
    if kind == "plain":
        return " ".join(text.split("\n")).strip()
    matches = _grub_lines(text)
    return _quoted(matches[-1]["value"])[1] if matches else ""


def edit(text: str, kind: str, line: str) -> str:
    """The file's text with another command line; nothing else in it changes."""
    if kind == "plain":
        return line + "\n"
    matches = _grub_lines(text)
    if not matches:
        return f'{text}{"" if not text or text.endswith(chr(10)) else chr(10)}{GRUB_KEY}="{line}"\n'
    last = matches[-1]  # the shell's last assignment wins
    quote = _quoted(last["value"])[0] or '"'
    if quote == '"' and '"' in line:
        quote = "'"
    changed = f"{last['head']}{quote}{line}{quote}{last['tail']}"
    return text[: last.start()] + changed + text[last.end() :]
