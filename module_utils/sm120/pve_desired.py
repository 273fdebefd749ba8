"""The configuration a VM is to have, made from the request."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from .pve_spec import VmSpec, owner_line
from .pve_text import format_property, parse_property

__all__ = [
    "BOOT_DISK",
    "DISK_OPTIONS",
    "ROOT_ONLY",
    "create_volumes",
    "description",
    "desired_config",
    "privilege_for",
]

BOOT_DISK = "scsi0"

# Only the user root@pam with a password ticket may set these; its API tokens may not either.
ROOT_ONLY = frozenset({"affinity", "args", "hugepages", "keephugepages"})

# Which privilege on /vms/VMID a change of a key needs (PVE 9, check_vm_modify_config_perm).
_PRIVILEGES: Mapping[str, tuple[str, ...]] = {
    "VM.Config.CPU": ("affinity", "cores", "cpu", "numa", "sockets", "vcpus"),
    "VM.Config.Memory": ("balloon", "hugepages", "keephugepages", "memory"),
    "VM.Config.HWType": ("bios", "hostpci", "machine", "ostype", "scsihw", "serial", "vga"),
    "VM.Config.Disk": ("efidisk", "scsi"),
    "VM.Config.CDROM": ("ide",),
    "VM.Config.Network": ("net",),
    "VM.Config.Cloudinit": ("ciuser", "ciupgrade", "ipconfig", "nameserver", "searchdomain", "sshkeys"),
}


def privilege_for(key: str) -> str:
    """The privilege that a token needs to change ``key``."""
    stem = key.rstrip("0123456789")
    for privilege, keys in _PRIVILEGES.items():
        if stem in keys:
            return privilege
    return "VM.Config.Options"


def description(spec: VmSpec) -> str:
    """The owner's line, then the user's own words."""
    return "\n".join(
        [owner_line(spec.owner_id), *([spec.description.rstrip("\n")] if spec.description else [])]
    )


def _cpu(spec: VmSpec) -> str:
    parts = parse_property(spec.cpu, "cputype")
    if spec.guest_phys_bits is not None:
        parts["guest-phys-bits"] = str(spec.guest_phys_bits)
    return format_property(parts, "cputype")


def _args(spec: VmSpec) -> str:
    """QEMU arguments of the options that Proxmox has no key for."""
    parts: list[str] = []
    if spec.mmio64_mib is not None:
        parts.append(f"-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string={spec.mmio64_mib}")
    if spec.p2p_clique is not None:
        parts.extend(
            f"-set device.hostpci{index}.x-nv-gpudirect-clique={spec.p2p_clique}"
            for index in range(len(spec.gpus))
        )
    if spec.extra_args is not None:
        parts.append(spec.extra_args)
    return " ".join(parts)


def _devices(spec: VmSpec) -> dict[str, str]:
    config: dict[str, str] = {}
    for index, gpu in enumerate(spec.gpus):
        parts = {"mapping": gpu.mapping, "pcie": str(int(gpu.pcie))}
        if not gpu.rombar:
            parts["rombar"] = "0"
        config[f"hostpci{index}"] = format_property(parts)
    for index, node in enumerate(spec.numa_nodes):
        parts = {"cpus": node.cpus.replace(",", ";"), "memory": str(node.memory_mib)}
        if node.hostnodes is not None:
            parts["hostnodes"] = node.hostnodes.replace(",", ";")
            parts["policy"] = node.policy
        config[f"numa{index}"] = format_property(parts)
    return config


def _network(spec: VmSpec) -> str:
    parts = {"model": "virtio"}
    if spec.mac is not None:
        parts["macaddr"] = spec.mac.upper()
    parts["bridge"] = spec.bridge
    if spec.vlan is not None:
        parts["tag"] = str(spec.vlan)
    return format_property(parts, "model")


def desired_config(spec: VmSpec) -> dict[str, str]:
    """Every key the role manages, volumes excepted, in the spelling in which it is written."""
    config = {
        "name": spec.name,
        "description": description(spec),
        "tags": ";".join(sorted({tag.lower() for tag in (spec.owner_tag, *spec.tags)})),
        "ostype": "l26",
        "machine": "q35",
        "bios": "ovmf",
        "scsihw": "virtio-scsi-single",
        "serial0": "socket",
        "vga": "serial0",
        "cpu": _cpu(spec),
        "sockets": str(spec.sockets),
        "cores": str(spec.cores),
        "memory": str(spec.memory_mib),
        "balloon": "0",  # passthrough pins all memory, so a balloon could only fail
        "numa": str(int(spec.numa)),
        "onboot": str(int(spec.onboot)),
        "protection": str(int(spec.protection)),
        "agent": str(int(spec.agent)),
        "net0": _network(spec),
        "ciuser": spec.ciuser,
        "ciupgrade": str(int(spec.ciupgrade)),
        "ipconfig0": spec.ipconfig,
        **_devices(spec),
    }
    optional = {
        "sshkeys": quote("\n".join(key.strip() for key in spec.sshkeys), safe=""),
        "nameserver": " ".join(spec.nameservers),
        "searchdomain": spec.searchdomain,
        "hugepages": spec.hugepages,
        "affinity": spec.affinity,
        "args": _args(spec),
    }
    config.update({key: value for key, value in optional.items() if value})
    return config


def create_volumes(spec: VmSpec) -> dict[str, str]:
    """The values that allocate the VM's volumes; written when they do not exist and never again."""
    efi = {"file": f"{spec.efi_storage}:1", "efitype": "4m", "pre-enrolled-keys": str(int(spec.secure_boot))}
    size = 0 if spec.image_volid is not None else spec.disk_gib
    disk = {"file": f"{spec.storage}:{size}", **DISK_OPTIONS}
    if spec.image_volid is not None:
        disk["import-from"] = spec.image_volid
    return {
        BOOT_DISK: format_property(disk, "file"),
        "efidisk0": format_property(efi, "file"),
        "ide2": f"{spec.cloudinit_storage}:cloudinit",
    }


# discard hands freed blocks back to thin storage; iothread keeps model loading off the main loop.
DISK_OPTIONS: Mapping[str, str] = {"discard": "on", "iothread": "1", "ssd": "1"}
