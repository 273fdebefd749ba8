"""What differs between the configuration found and the configuration wanted, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .pve_desired import BOOT_DISK, DISK_OPTIONS, create_volumes, desired_config
from .pve_finding import Finding
from .pve_spec import VmSpec
from .pve_text import canonical, format_property, parse_property, properties, same

__all__ = ["LIVE_KEYS", "Changes", "conflicts", "diff_config", "disk_gib", "readable"]

# Keys of ours that are removed when the request does not have them.
_REMOVABLE = re.compile(r"hostpci\d+|numa\d+|hugepages|affinity|args|nameserver|searchdomain|sshkeys")
_DISK = re.compile(r"(scsi|virtio|sata|ide)\d+|unused\d+|boot")
# A cloud-init drive, wherever someone moved it to.
CLOUDINIT = re.compile(r"cloudinit(\.\w+)?(,|$)")
_UNITS = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0, "T": 1024.0, "": 1 / 1024**3}

# Keys that take effect on a running VM without a restart.
LIVE_KEYS = frozenset(
    {"name", "description", "tags", "onboot", "protection", "ciuser", "ciupgrade", "sshkeys"}
)


@dataclass
class Changes:
    """The writes that make the found configuration the wanted one."""

    set: dict[str, str] = field(default_factory=dict)
    delete: list[str] = field(default_factory=list)
    grow_gib: int | None = None
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """Every key that is written or removed."""
        return sorted({*self.set, *self.delete})


def disk_gib(value: str) -> float:
    """The size a disk's value tells, in GiB."""
    size = parse_property(value, "file").get("size", "0")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", size)
    if match is None:
        raise ValueError(f"not a disk size: {size!r}")
    return float(match[1]) * _UNITS[match[2]]


def readable(key: str, value: object | None) -> str:
    """A value as a diff shows it."""
    if value is None:
        return ""
    try:
        return canonical(key, value)
    except ValueError:
        return str(value)


def _merged_net(wanted: str, found: str | None) -> str:
    """The wanted network device with the MAC, and whatever else was set by hand, kept."""
    if found is None:
        return wanted
    parts = {**properties("net0", found), **properties("net0", wanted)}
    if "tag" not in properties("net0", wanted):
        parts.pop("tag", None)
    model, mac = parts.pop("model"), parts.pop("macaddr", None)
    return format_property(
        {model: mac, **parts} if mac else {"model": model, **parts}, None if mac else "model"
    )


def _volume_changes(spec: VmSpec, found: Mapping[str, Any], changes: Changes) -> None:
    """Missing volumes other than the boot disk are made; of that only the options are compared."""
    for key, value in create_volumes(spec).items():
        elsewhere = key == "ide2" and any(CLOUDINIT.search(str(text)) for text in found.values())
        if key != BOOT_DISK and key not in found and not elsewhere:
            changes.set[key] = value
            changes.after[key] = value
    if BOOT_DISK not in found:
        return
    disk = str(found[BOOT_DISK])
    parts, canon = parse_property(disk, "file"), properties(BOOT_DISK, disk)
    wanted = {name: value for name, value in DISK_OPTIONS.items() if canon.get(name) != value}
    if wanted:
        changes.set[BOOT_DISK] = format_property({**parts, **wanted}, "file")
        changes.before[BOOT_DISK], changes.after[BOOT_DISK] = disk, changes.set[BOOT_DISK]
    if disk_gib(disk) < spec.disk_gib:
        changes.grow_gib = spec.disk_gib
        changes.before[f"{BOOT_DISK} size"] = parts.get("size", "0")
        changes.after[f"{BOOT_DISK} size"] = f"{spec.disk_gib}G"


def diff_config(spec: VmSpec, found: Mapping[str, Any] | None) -> Changes:
    """Compare; ``found`` is the configuration with pending changes applied, None when there is no VM."""
    changes = Changes()
    wanted = desired_config(spec)
    if found is None:
        wanted.update(create_volumes(spec))
        wanted["boot"] = f"order={BOOT_DISK}"
        changes.set = wanted
        changes.after = {key: readable(key, value) for key, value in wanted.items()}
        if spec.image_volid is not None:
            changes.grow_gib = spec.disk_gib
            changes.after[f"{BOOT_DISK} size"] = f"{spec.disk_gib}G"
        return changes
    wanted["net0"] = _merged_net(wanted["net0"], None if "net0" not in found else str(found["net0"]))
    for key, value in wanted.items():
        if not same(key, value, found.get(key)):
            changes.set[key] = value
    changes.delete = sorted(key for key in found if _REMOVABLE.fullmatch(key) and key not in wanted)
    for key in changes.keys:
        changes.before[key] = readable(key, found.get(key))
        changes.after[key] = readable(key, changes.set.get(key))
    _volume_changes(spec, found, changes)
    return changes


def conflicts(spec: VmSpec, found: Mapping[str, Any], *, created: bool = False) -> list[Finding]:
    """Differences that could only be mended by making a disk anew, which is never done.

    ``created``: by this run, so that it is too late to refuse an image that turned out larger than the disk.
    """
    findings: list[Finding] = []
    if BOOT_DISK not in found:
        disks = ", ".join(f"{key}: {found[key]}" for key in sorted(found) if _DISK.fullmatch(key))
        findings.append(
            Finding(
                BOOT_DISK,
                f"the VM's boot disk at {BOOT_DISK}; a second one is never made",
                disks or "no disk at all",
                f"attach the disk there and boot from it: qm set {spec.vmid} --{BOOT_DISK} VOLUME "
                f"--boot order={BOOT_DISK}; or destroy the VM and make it anew",
            )
        )
    if BOOT_DISK in found:
        disk = str(found[BOOT_DISK])
        storage = parse_property(disk, "file")["file"].partition(":")[0]
        if storage != spec.storage:
            findings.append(
                Finding(
                    "storage",
                    f"the boot disk on {spec.storage}",
                    f"it is on {storage}",
                    f"qm disk move {spec.vmid} {BOOT_DISK} {spec.storage}, or set storage back",
                )
            )
        if disk_gib(disk) > spec.disk_gib:
            findings.append(
                Finding(
                    "disk_gib",
                    f"{spec.disk_gib} GiB",
                    f"{disk_gib(disk):g} GiB, and disks are never shrunk",
                    f"set disk_gib to {math.ceil(disk_gib(disk))} or more",
                    severity="warning" if created else "error",
                )
            )
    if "efidisk0" in found:
        keys = parse_property(str(found["efidisk0"]), "file").get("pre-enrolled-keys", "0")
        if keys != str(int(spec.secure_boot)):
            findings.append(
                Finding(
                    "secure_boot",
                    f"pre-enrolled-keys={int(spec.secure_boot)}",
                    f"pre-enrolled-keys={keys}, fixed when the EFI disk was made",
                    "set secure_boot to match, or replace efidisk0 by hand",
                )
            )
    return findings
