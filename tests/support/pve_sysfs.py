"""A made-up Proxmox VE host: the files below /sys and /proc that pve_host_info reads.

Alone: ``python3 pve_sysfs.py ROOT [--driver vfio-pci] [--cmdline 'quiet iommu=pt']``.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

GIB = 1 << 30
# BAR0 64 MiB, BAR2 128 GiB, BAR4 32 MiB, all 64-bit: the odd lines of the resource file are empty.
BARS = [(0x1000_0000_0000, 64 << 20), (0x2000_0000_0000, 128 * GIB), (0x1000_0800_0000, 32 << 20)]


def link(path: Path, target: Path) -> None:
    """A relative symbolic link, as sysfs has them."""
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def device(
    root: Path, address: str, ids: str, pci_class: str, group: int | None, *, alive: bool = True
) -> Path:
    """One PCI function."""
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True, exist_ok=True)
    vendor, number = ids.split(":")
    (folder / "vendor").write_text(f"0x{vendor}\n")
    (folder / "device").write_text(f"0x{number}\n")
    (folder / "class").write_text(f"{pci_class}\n")
    (folder / "config").write_bytes(b"\xde\x10" * 32 if alive else b"\xff" * 64)
    lines = [f"0x{0:016x} 0x{0:016x} 0x{0:016x}"] * 7
    for index, (start, size) in enumerate(BARS):
        lines[2 * index] = f"0x{start:016x} 0x{start + size - 1:016x} 0x000000000014220c"
    (folder / "resource").write_text("\n".join(lines) + "\n")
    if group is not None:
        members = root / "sys/kernel/iommu_groups" / str(group) / "devices"
        members.mkdir(parents=True, exist_ok=True)
        link(folder / "iommu_group", members.parent)
        link(members / address, folder)
    return folder


def bind(root: Path, address: str, driver: str | None) -> None:
    """Give a device to a driver."""
    folder = root / "sys/bus/pci/devices" / address
    (folder / "driver").unlink(missing_ok=True)
    if driver is not None:
        drivers = root / "sys/bus/pci/devices/.drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        link(folder / "driver", drivers)


def make(
    root: Path, gpus: int = 8, driver: str | None = None, cmdline: str = "quiet", iommu: bool = True
) -> None:
    """A host with GPUs behind bridges, each pair in an IOMMU group."""
    for folder in ("sys/bus/pci/devices", "sys/kernel/iommu_groups"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for old in (root / folder).iterdir():  # the folders themselves may be mounted somewhere
            shutil.rmtree(old)
    for index in range(gpus):
        group = 20 + index if iommu else None
        device(root, f"0000:{0x10 + index:02x}:01.0", "1022:14ab", "0x060400", group)
        address = f"0000:{0x11 + 0x10 * index:02x}:00.0"
        device(root, address, "10de:2bb5", "0x030200", group)
        bind(root, address, driver)
    for path, text in (
        ("proc/cmdline", f"BOOT_IMAGE=/boot/vmlinuz root=ZFS=rpool/ROOT/pve-1 {cmdline}\n"),
        ("proc/cpuinfo", "vendor_id\t: AuthenticAMD\naddress sizes\t: 52 bits physical, 57 bits virtual\n"),
        ("proc/sys/kernel/osrelease", "6.14.11-1-pve\n"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def main() -> None:
    """Make it below ROOT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--driver")
    parser.add_argument("--cmdline", default="quiet")
    options = parser.parse_args()
    make(options.root, driver=options.driver, cmdline=options.cmdline)


if __name__ == "__main__":
    main()
