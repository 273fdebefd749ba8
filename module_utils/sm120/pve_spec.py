"""What is asked for: the arguments of the module pve_gpu_vm and the typed request made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["ARGUMENTS", "ROLE_NAME", "Gpu", "NumaNode", "VmSpec", "owner_line"]

ROLE_NAME = "sglang-sm120"

_GPU_OPTIONS = {
    "mapping": {"type": "str", "required": True},
    "path": {"type": "str"},
    "pcie": {"type": "bool", "default": True},
    "rombar": {"type": "bool", "default": True},
}
_NUMA_OPTIONS = {
    "cpus": {"type": "str", "required": True},
    "memory_mib": {"type": "int", "required": True},
    "hostnodes": {"type": "str"},
    "policy": {"type": "str", "choices": ["bind", "preferred", "interleave"], "default": "bind"},
}

# AnsibleModule's argument_spec; the module's DOCUMENTATION says what each one means.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "api_host": {"type": "str", "required": True},
    "api_port": {"type": "int", "default": 8006},
    "api_user": {"type": "str", "required": True},
    "api_token_id": {"type": "str"},
    "api_token_secret": {"type": "str", "no_log": True},
    "api_token_secret_file": {"type": "path", "no_log": False},
    "api_password": {"type": "str", "no_log": True},
    "api_password_file": {"type": "path", "no_log": False},
    "validate_certs": {"type": "bool", "default": True},
    "ca_path": {"type": "path"},
    "fingerprint": {"type": "str"},
    "request_timeout_seconds": {"type": "int", "default": 30},
    "node": {"type": "str", "required": True},
    "vmid": {"type": "int", "required": True},
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "started", "stopped", "absent"], "default": "started"},
    "owner_id": {"type": "str", "required": True},
    "owner_tag": {"type": "str", "default": "sglang-sm120"},
    "description": {"type": "str", "default": ""},
    "tags": {"type": "list", "elements": "str", "default": []},
    "gpus": {"type": "list", "elements": "dict", "options": _GPU_OPTIONS, "default": []},
    "gpu_ids": {"type": "list", "elements": "str", "default": ["10de:2bb5", "10de:2bb1"]},
    "gpu_function": {"type": "str", "choices": ["0", "all"], "default": "0"},
    "gpu_bar_mib": {"type": "int", "default": 131168},
    "manage_mappings": {"type": "bool", "default": False},
    "accept_group_members": {"type": "bool", "default": False},
    "host_phys_bits": {"type": "int"},
    "guest_phys_bits": {"type": "int"},
    "sockets": {"type": "int", "default": 1},
    "cores": {"type": "int"},
    "cpu": {"type": "str", "default": "host,phys-bits=host"},
    "memory_mib": {"type": "int"},
    "numa": {"type": "bool", "default": False},
    "numa_nodes": {"type": "list", "elements": "dict", "options": _NUMA_OPTIONS, "default": []},
    "hugepages": {"type": "str", "choices": ["any", "2", "1024"]},
    "affinity": {"type": "str"},
    "mmio64_mib": {"type": "int"},
    "p2p_clique": {"type": "int"},
    "extra_args": {"type": "str"},
    "root_path": {"type": "str", "choices": ["none", "password", "ssh"], "default": "none"},
    "storage": {"type": "str"},
    "efi_storage": {"type": "str"},
    "cloudinit_storage": {"type": "str"},
    "disk_gib": {"type": "int", "default": 200},
    "image_volid": {"type": "str"},
    "image_url": {"type": "str"},
    "image_checksum": {"type": "str"},
    "secure_boot": {"type": "bool", "default": False},
    "bridge": {"type": "str", "default": "vmbr0"},
    "mac": {"type": "str"},
    "vlan": {"type": "int"},
    "ipconfig": {"type": "str", "default": "ip=dhcp"},
    "nameservers": {"type": "list", "elements": "str", "default": []},
    "searchdomain": {"type": "str"},
    "ciuser": {"type": "str", "default": "ubuntu"},
    "sshkeys": {"type": "list", "elements": "str", "default": [], "no_log": False},
    "ciupgrade": {"type": "bool", "default": False},
    "agent": {"type": "bool", "default": True},
    "onboot": {"type": "bool", "default": True},
    "protection": {"type": "bool", "default": True},
    "allow_restart": {"type": "bool", "default": False},
    "force_stop": {"type": "bool", "default": False},
    "start_timeout_seconds": {"type": "int"},
    "shutdown_timeout_seconds": {"type": "int", "default": 300},
    "task_timeout_seconds": {"type": "int", "default": 1800},
    "address_timeout_seconds": {"type": "int", "default": 0},
    "confirm_destroy": {"type": "str", "default": ""},
    "destroy_with_snapshots": {"type": "bool", "default": False},
    "destroy_unreferenced": {"type": "bool", "default": False},
}


@dataclass(frozen=True)
class Gpu:
    """One passed-through GPU: a resource mapping and how it is attached."""

    mapping: str
    path: str | None = None
    pcie: bool = True
    rombar: bool = True


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node of the guest."""

    cpus: str
    memory_mib: int
    hostnodes: str | None = None
    policy: str = "bind"


@dataclass(frozen=True)
class VmSpec:
    """The VM asked for. Names and defaults are ARGUMENTS's."""

    node: str
    vmid: int
    name: str
    state: str
    owner_id: str
    owner_tag: str
    description: str
    tags: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    gpu_ids: tuple[str, ...]
    gpu_function: str
    gpu_bar_mib: int
    manage_mappings: bool
    accept_group_members: bool
    host_phys_bits: int | None
    guest_phys_bits: int | None
    sockets: int
    cores: int
    cpu: str
    memory_mib: int
    numa: bool
    numa_nodes: tuple[NumaNode, ...]
    hugepages: str | None
    affinity: str | None
    mmio64_mib: int | None
    p2p_clique: int | None
    extra_args: str | None
    root_path: str
    storage: str
    efi_storage: str
    cloudinit_storage: str
    disk_gib: int
    image_volid: str | None
    image_url: str | None
    image_checksum: str | None
    secure_boot: bool
    bridge: str
    mac: str | None
    vlan: int | None
    ipconfig: str
    nameservers: tuple[str, ...]
    searchdomain: str | None
    ciuser: str
    sshkeys: tuple[str, ...]
    ciupgrade: bool
    agent: bool
    onboot: bool
    protection: bool
    allow_restart: bool
    force_stop: bool
    start_timeout_seconds: int | None
    shutdown_timeout_seconds: int
    task_timeout_seconds: int
    confirm_destroy: str
    destroy_with_snapshots: bool
    destroy_unreferenced: bool

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> VmSpec:
        """Build the request from the module's parameters; an empty text is the same as none given."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = params[field.name]
            if isinstance(value, list):
                value = tuple(value)
            argument = ARGUMENTS[field.name]
            if value == "" and argument.get("default") is None and not argument.get("required"):
                value = None
            values[field.name] = value
        values["gpus"] = tuple(Gpu(**gpu) for gpu in values["gpus"])
        values["numa_nodes"] = tuple(NumaNode(**node) for node in values["numa_nodes"])
        values["gpu_ids"] = tuple(gpu_id.lower() for gpu_id in values["gpu_ids"])
        values["cores"] = values["cores"] or 0
        values["memory_mib"] = values["memory_mib"] or 0
        values["storage"] = values["storage"] or ""
        for name in ("efi_storage", "cloudinit_storage"):
            values[name] = values[name] or values["storage"]
        return cls(**values)

    @property
    def wants_vm(self) -> bool:
        """Whether the VM is to exist."""
        return self.state != "absent"

    @property
    def start_seconds(self) -> int:
        """How long a start may take: one second a GiB, four with GPUs, as Proxmox counts; 300 at least.

        Memory of a VM with passthrough is pinned page by page before it runs (qemu-server 9.2.6).
        """
        if self.start_timeout_seconds is not None:
            return self.start_timeout_seconds
        gib = -(-self.memory_mib // 1024)
        return max(300, gib * (4 if self.gpus else 1))


def owner_line(owner_id: str) -> str:
    """The line of the description that says whose VM this is."""
    return f"managed-by: {ROLE_NAME} owner={owner_id}"
