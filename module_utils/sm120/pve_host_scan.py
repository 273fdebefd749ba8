"""A look at a Proxmox VE host: boot loader, kernel parameters, GPUs, IOMMU groups, drivers.

Every path is below a root folder, so that tests can give one of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .pve_cmdline import GRUB_KEY, assignments, check_parameters, line_of, split
from .pve_finding import Finding

__all__ = ["HostGpu", "Loader", "boot_loaders", "findings", "gpus", "scan"]

VFIO = "vfio-pci"
# Modules whose listing stops a boot or takes the cards; vfio_virqfd is part of vfio since Linux 6.2.
UNWANTED_MODULES = frozenset({"nouveau", "nvidia", "nvidia_drm", "nvidiafb", "vfio_virqfd"})


@dataclass(frozen=True)
class Loader:
    """A boot loader's file for the command line, and the programs that make it count."""

    name: str
    path: str
    kind: str
    refresh: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class HostGpu:
    """One GPU as the host's sysfs shows it."""

    address: str
    device_id: str
    driver: str | None
    iommu_group: int | None
    strangers: tuple[str, ...]
    answers: bool
    bar_mib: int


def boot_loaders(root: Path, status: str) -> list[Loader]:
    """Where the command line lives; ``status`` is what ``proxmox-boot-tool status`` printed."""
    refresh = ("proxmox-boot-tool", "refresh")
    managed = (root / "etc/kernel/proxmox-boot-uuids").exists()
    configured = " ".join(re.findall(r"is configured with:\s*(.*)", status))
    found: list[Loader] = []
    if managed and re.search(r"\buefi\b", configured):
        found.append(Loader("systemd-boot", "/etc/kernel/cmdline", "plain", (refresh,)))
    if not found or re.search(r"\bgrub\b", configured):
        programs = (("update-grub",), refresh) if managed else (("update-grub",),)
        found.append(Loader("grub", "/etc/default/grub", "grub", programs))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link(path: Path) -> str | None:
    return path.resolve().name if path.exists() else None


def _id(device: Path) -> str:
    return f"{_text(device / 'vendor')[2:]}:{_text(device / 'device')[2:]}".lower()


def _bar_mib(device: Path) -> int:
    """Size of all BARs that have an address, from the first six lines of ``resource``."""
    total = 0
    for line in _text(device / "resource").splitlines()[:6]:
        start, end, _ = (int(part, 16) for part in line.split())
        total += end - start + 1 if start else 0
    return total >> 20


def _answers(device: Path) -> bool:
    """A card that fell off the bus reads as ones."""
    try:
        return any(byte != 0xFF for byte in (device / "config").read_bytes()[:64])
    except OSError:
        return False


def _strangers(root: Path, device: Path, group: str | None, cards: set[str]) -> tuple[str, ...]:
    if group is None:
        return ()
    folder = root / "sys/kernel/iommu_groups" / group / "devices"
    members = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    return tuple(
        name
        for name in members
        if name.rpartition(".")[0] not in cards
        and not _text(device.parent / name / "class").startswith("0x0604")
    )


def gpus(root: Path, ids: Iterable[str]) -> list[HostGpu]:
    """The GPUs of these ids, by address."""
    wanted = {item.lower() for item in ids}
    folder = root / "sys/bus/pci/devices"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    cards = [
        item for item in devices if _id(item) in wanted and _text(item / "class")[:6] in ("0x0300", "0x0302")
    ]
    slots = {item.name.rpartition(".")[0] for item in cards}
    found = []
    for card in cards:
        group = _link(card / "iommu_group")
        found.append(
            HostGpu(
                address=card.name,
                device_id=_id(card),
                driver=_link(card / "driver"),
                iommu_group=None if group is None else int(group),
                strangers=_strangers(root, card, group, slots),
                answers=_answers(card),
                bar_mib=_bar_mib(card),
            )
        )
    return found


def _phys_bits(root: Path) -> int | None:
    match = re.search(r"address sizes\s*:\s*(\d+) bits physical", _text(root / "proc/cpuinfo"))
    return None if match is None else int(match[1])


def _intel_iommu_needed(root: Path) -> bool:
    """The IOMMU of Intel is off by itself before Linux 6.8 (Proxmox VE admin guide, PCI passthrough)."""
    release = re.match(r"(\d+)\.(\d+)", _text(root / "proc/sys/kernel/osrelease"))
    old = release is not None and (int(release[1]), int(release[2])) < (6, 8)
    return old and "GenuineIntel" in _text(root / "proc/cpuinfo")


def _listed_modules(root: Path) -> dict[str, list[str]]:
    """Modules loaded at boot, by file."""
    files = [root / "etc/modules", *sorted((root / "etc/modules-load.d").glob("*.conf"))]
    return {
        f"/{path.relative_to(root)}": [
            line.split()[0].replace("-", "_")
            for line in _text(path).splitlines()
            if line.strip() and line[0] not in "#;"
        ]
        for path in files
    }


def _boot_lines(root: Path, loaders: list[Loader]) -> list[dict[str, Any]]:
    """What each loader's files add to the next kernel's parameters, and what of it cannot be edited in place."""
    found = []
    for loader in loaders:
        path = root / loader.path[1:]
        text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        problem = ""
        try:
            ours = split(line_of(text, loader.kind))
        except ValueError as unreadable:
            ours, problem = [], str(unreadable)
        found.append({"where": loader.path, "parameters": ours, "editable": True, "problem": problem})
        if loader.kind != "grub":
            continue
        for other in [path, *sorted((root / "etc/default/grub.d").glob("*.cfg"))]:
            for key, (number, parameters) in assignments(_text(other)).items():
                if other != path or key != GRUB_KEY:
                    where = f"{key}, line {number} of /{other.relative_to(root)}"
                    found.append({"where": where, "parameters": parameters, "editable": False, "problem": ""})
    return found


def _newer_than_boot(root: Path, loaders: list[Loader]) -> bool:
    """Whether a file that a boot reads was changed since the last one; if not, another reboot changes nothing."""
    booted = re.search(r"^btime (\d+)", _text(root / "proc/stat"), re.MULTILINE)
    files = [root / loader.path[1:] for loader in loaders]
    for pattern in ("etc/default/grub.d/*", "etc/mod*.d/*", "boot/initrd*", "boot/grub/grub.cfg"):
        files += root.glob(pattern)
    return any(path.exists() and path.stat().st_mtime > int(booted[1] if booted else 0) for path in files)


def scan(root: Path, ids: Iterable[str], status: str) -> dict[str, Any]:
    """Everything the role needs to know."""
    loaders = boot_loaders(root, status)
    return {
        "loaders": [asdict(item) for item in loaders],
        "boot_lines": _boot_lines(root, loaders),
        "newer_than_boot": _newer_than_boot(root, loaders),
        "parameters": split(_text(root / "proc/cmdline")),
        "gpus": [asdict(item) for item in gpus(root, ids)],
        "phys_bits": _phys_bits(root),
        "intel_iommu_needed": _intel_iommu_needed(root),
        "modules": _listed_modules(root),
        "grub_overrides": [
            f"/{path.relative_to(root)}"
            for path in sorted((root / "etc/default/grub.d").glob("*.cfg"))
            if re.search(rf"^\s*{GRUB_KEY}=(?!.*\${{?{GRUB_KEY})", _text(path), re.MULTILINE)
        ],
    }


def findings(
    seen: dict[str, Any],
    *,
    count: int,
    removable: Iterable[str] = (),
    accept_group_members: bool = False,
    active: Iterable[str] = (),
    after: bool = False,
) -> list[Finding]:
    """What is wrong; with ``after`` also what the kernel that runs has not taken up."""
    found = []
    for line in seen["boot_lines"]:
        ignored, by_hand = (removable, False) if line["editable"] else ((), True)
        found += check_parameters(line["parameters"], line["where"], ignored, by_hand=by_hand)
        if line["problem"]:
            wanted = "a command line that can be edited in place"
            found.append(Finding(line["where"], wanted, line["problem"], "edit it by hand"))
    found += _only_running(seen, () if after else removable)
    cards = [HostGpu(**{**item, "strangers": tuple(item["strangers"])}) for item in seen["gpus"]]
    if len(cards) < count:
        addresses = ", ".join(card.address for card in cards) or "none"
        found.append(
            Finding(
                "GPUs",
                f"{count}",
                f"{len(cards)} ({addresses})",
                "lspci -nn; dmesg; power and risers; the ids asked for",
            )
        )
    for card in cards:
        if not card.answers:
            found.append(
                Finding(
                    card.address,
                    "a card that answers",
                    "its configuration space reads as ones: it fell off the bus, or hangs after a reset",
                    "power the host off and on; then see the reset options in docs/proxmox.md",
                )
            )
        if card.strangers:
            found.append(
                Finding(
                    card.address,
                    f"IOMMU group {card.iommu_group} with bridges and GPUs only",
                    f"{', '.join(card.strangers)} too",
                    "another slot, or pve_host_accept_group_members: true when the host can do without them",
                    severity="warning" if accept_group_members else "error",
                )
            )
    for path, names in seen["modules"].items():
        for name in sorted(UNWANTED_MODULES & set(names)):
            found.append(
                Finding(
                    "modules",
                    f"{name} not loaded at boot",
                    f"{name} in {path}",
                    f"take the line out of {path}",
                    severity="warning",
                )
            )
    for path in seen["grub_overrides"]:
        found.append(
            Finding(
                "GRUB",
                f"{GRUB_KEY} of /etc/default/grub to count",
                f"{path} sets it anew",
                f'append to it there: {GRUB_KEY}="${GRUB_KEY} ..."',
            )
        )
    return [*found, *(_after(seen, cards, active) if after else [])]


def _coming(seen: dict[str, Any]) -> set[str]:
    return {item for line in seen["boot_lines"] for item in line["parameters"]}


def _only_running(seen: dict[str, Any], removable: Iterable[str]) -> list[Finding]:
    """Bad parameters of the kernel that runs which none of the files has."""
    fix = "reboot; if that is done, another loader boots: proxmox-boot-tool status, efibootmgr"
    return [
        replace(item, fix=fix, reboot=bool(seen["newer_than_boot"]))
        for item in check_parameters(seen["parameters"], "/proc/cmdline", {*removable, *_coming(seen)})
    ]


def _after(seen: dict[str, Any], cards: list[HostGpu], active: Iterable[str]) -> list[Finding]:
    """What the kernel that runs has not taken up; a reboot mends what was changed since the last one."""
    missing = [item for item in active if item not in seen["parameters"]]
    newer = bool(seen["newer_than_boot"])
    stale = newer and bool(_only_running(seen, ()) or set(missing) & _coming(seen))
    found = []
    if missing:
        found.append(
            Finding(
                "kernel parameters",
                f"{' '.join(missing)} in the kernel that runs",
                " ".join(seen["parameters"]),
                "reboot; if that is done, see which loader boots: proxmox-boot-tool status",
                reboot=stale,
            )
        )
    outside = [card.address for card in cards if card.iommu_group is None]
    if outside:
        fix = "enable the IOMMU (AMD-Vi, VT-d) in the firmware, then reboot"
        found.append(Finding(", ".join(outside), "an IOMMU group each", "none", fix, reboot=stale))
    for driver in sorted({card.driver or "none" for card in cards} - {VFIO}):
        lost = [
            card.address
            for card in cards
            if (card.driver or "none") == driver and card.iommu_group is not None
        ]
        if lost:
            fix = f"reboot; if that is done, see lspci -nnk -s {lost[0]}"
            found.append(Finding(", ".join(lost), f"driver {VFIO}", driver, fix, reboot=newer))
    return found
