"""What the cluster says now: one read of everything that the plan and its checks need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .pve_spec import VmSpec
from .pve_text import pci_address, properties

__all__ = [
    "Facts",
    "Mapped",
    "Pci",
    "Reader",
    "Use",
    "Vm",
    "collect",
    "collect_cluster",
    "reread",
    "running_tasks",
]


class Reader(Protocol):
    """The part of the client that reads."""

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """Read one path."""


@dataclass(frozen=True)
class Pci:
    """One PCI function of the node."""

    address: str
    pci_class: int
    device_id: str
    subsystem_id: str | None
    iommu_group: int

    @property
    def slot(self) -> str:
        """The address without the function."""
        return self.address.rpartition(".")[0]

    @property
    def is_bridge(self) -> bool:
        """PCI bridges share a group without harm."""
        return self.pci_class >> 8 == 0x0604

    @property
    def is_display(self) -> bool:
        """VGA or 3D controller."""
        return self.pci_class >> 8 in {0x0300, 0x0302}


@dataclass(frozen=True)
class Mapped:
    """One resource mapping, as it stands on our node."""

    name: str
    path: str | None
    problems: tuple[str, ...]
    description: str
    other_nodes: tuple[str, ...]


@dataclass(frozen=True)
class Use:
    """A device that another VM has in its configuration."""

    vmid: int
    name: str
    status: str
    device: str


@dataclass(frozen=True)
class Vm:
    """The VM as it is."""

    config: Mapping[str, Any]
    pending: tuple[str, ...]
    status: str
    lock: str = ""

    @property
    def running(self) -> bool:
        """Whether its QEMU process is there."""
        return self.status == "running"


@dataclass
class Facts:
    """Everything that was read."""

    version: str = ""
    is_root: bool = False
    caller: str = ""  # user or token, as messages name it
    user: str = ""
    permissions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)
    node_cpus: int = 0
    node_memory_mib: int = 0
    node_available_mib: int = 0
    resources: list[dict[str, Any]] = field(default_factory=list)
    vm: Vm | None = None
    snapshots: tuple[str, ...] = ()
    pci: list[Pci] = field(default_factory=list)
    mappings: dict[str, Mapped] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    storages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    images: Mapping[str, int] = field(default_factory=dict)  # volume -> bytes of the file, 0 when not told
    tasks: tuple[str, ...] = ()  # at work on our VM and not waited for, as "type UPID"
    unsettled: tuple[str, ...] = ()  # other VMs of the node that are being made: their GPUs are not known yet
    created: bool = False  # by this run

    def resource(self, vmid: int) -> dict[str, Any] | None:
        """The cluster's entry of a VMID."""
        return next((item for item in self.resources if int(item.get("vmid", 0)) == vmid), None)


def _pci(item: Mapping[str, Any]) -> Pci:
    def number(name: str) -> str | None:
        value = item.get(name)
        return None if value in (None, "") else str(value).lower().removeprefix("0x").zfill(4)

    vendor, device = number("subsystem_vendor"), number("subsystem_device")
    return Pci(
        address=pci_address(str(item["id"])),
        pci_class=int(str(item.get("class", "0")), 16),
        device_id=f"{number('vendor')}:{number('device')}",
        subsystem_id=f"{vendor}:{device}" if vendor and device else None,
        iommu_group=int(item.get("iommugroup", -1)),
    )


def _mapping(item: Mapping[str, Any], node: str) -> Mapped:
    entries = [dict(part.split("=", 1) for part in str(text).split(",")) for text in item.get("map", [])]
    here = [entry for entry in entries if entry.get("node") == node]
    # One path each: several devices under one name mean that Proxmox chooses, and a plan could not.
    path = pci_address(here[0]["path"]) if len(here) == 1 and ";" not in here[0]["path"] else None
    problems = [
        str(check["message"]) for check in item.get("checks") or [] if check.get("severity") == "error"
    ]
    if not here:
        problems.append(f"has no device on node {node}")
    elif path is None:
        problems.append(f"names several devices on node {node}")
    return Mapped(
        name=str(item["id"]),
        path=path,
        problems=tuple(problems),
        description=str(item.get("description") or ""),
        other_nodes=tuple(sorted({entry.get("node", "") for entry in entries} - {node})),
    )


def _devices_of(value: str) -> list[str]:
    """What one hostpci value attaches: ``mapping=NAME`` or PCI addresses."""
    parts = properties("hostpci0", value)
    devices = [f"mapping={parts['mapping']}"] if "mapping" in parts else []
    return devices + (parts["host"].split(";") if "host" in parts else [])


def _uses(client: Reader, spec: VmSpec, facts: Facts) -> None:
    """Devices that other VMs of our node have; a template runs nothing, so it uses nothing.

    A running VM holds what its configuration had at its start and will hold what is pending: both count.
    """
    facts.uses, unsettled = [], []
    for item in facts.resources:
        vmid, name = int(item.get("vmid", 0)), str(item.get("name", ""))
        here = item.get("type") == "qemu" and item.get("node") == spec.node
        if not here or vmid == spec.vmid or item.get("template"):
            continue
        entries = client.get(f"/nodes/{item['node']}/qemu/{vmid}/pending") or []
        values = {str(entry["key"]): entry for entry in entries}
        if "create" in (item.get("lock"), values.get("lock", {}).get("value")):
            unsettled.append(f"{vmid} {name}".strip())
        held = {
            device: None
            for key in sorted(values)
            if re.fullmatch(r"hostpci\d+", key)
            for state in ("value", "pending")
            if values[key].get(state)
            for device in _devices_of(str(values[key][state]))
        }
        facts.uses += [Use(vmid, name, str(item.get("status", "")), device) for device in held]
    facts.unsettled = tuple(unsettled)


def _vm(client: Reader, spec: VmSpec) -> Vm:
    base = f"/nodes/{spec.node}/qemu/{spec.vmid}"
    config = dict(client.get(f"{base}/config") or {})
    pending = client.get(f"{base}/pending") or []
    for item in pending:  # what is wanted is compared with what the next start will have
        if "pending" in item:
            config[str(item["key"])] = item["pending"]
        elif item.get("delete"):
            config.pop(str(item["key"]), None)
    status = client.get(f"{base}/status/current") or {}
    keys = sorted(str(item["key"]) for item in pending if "pending" in item or item.get("delete"))
    return Vm(
        config=config,
        pending=tuple(keys),
        status=str(status.get("status", "unknown")),
        lock=str(config.get("lock") or status.get("lock") or ""),
    )


def _snapshots(client: Reader, spec: VmSpec) -> tuple[str, ...]:
    items = client.get(f"/nodes/{spec.node}/qemu/{spec.vmid}/snapshot") or []
    return tuple(str(item["name"]) for item in items if item.get("name") != "current")


def reread(client: Reader, spec: VmSpec, facts: Facts) -> None:
    """Read the VM again after writes."""
    facts.resources = client.get("/cluster/resources", {"type": "vm"}) or []
    here = facts.resource(spec.vmid)
    facts.vm = _vm(client, spec) if here is not None and here.get("node") == spec.node else None


def _devices(client: Reader, spec: VmSpec, facts: Facts) -> None:
    if not spec.gpus:
        return
    node = f"/nodes/{spec.node}"
    # An empty black list shows bridges too, without which a group's members cannot be judged.
    facts.pci = [_pci(item) for item in client.get(f"{node}/hardware/pci", {"pci-class-blacklist": ""}) or []]
    mappings = client.get("/cluster/mapping/pci", {"check-node": spec.node}) or []
    facts.mappings = {str(item["id"]): _mapping(item, spec.node) for item in mappings}
    _uses(client, spec, facts)


def _place(client: Reader, spec: VmSpec, facts: Facts) -> None:
    node = f"/nodes/{spec.node}"
    status = client.get(f"{node}/status") or {}
    memory = status.get("memory", {})
    total, used = int(memory.get("total", 0)), int(memory.get("used", 0))
    facts.node_cpus = int(status.get("cpuinfo", {}).get("cpus", 0))
    facts.node_memory_mib = total >> 20
    facts.node_available_mib = int(memory.get("available", total - used)) >> 20
    facts.storages = {str(item["storage"]): item for item in client.get(f"{node}/storage") or []}
    if spec.image_volid is not None and facts.vm is None:
        storage = spec.image_volid.partition(":")[0]
        content = spec.image_volid.partition(":")[2].partition("/")[0]
        if storage in facts.storages:
            params = {"content": "import"} if content == "import" else {}
            items = client.get(f"{node}/storage/{storage}/content", params) or []
            facts.images = {str(item["volid"]): int(item.get("size") or 0) for item in items}


def running_tasks(client: Reader, spec: VmSpec, facts: Facts) -> list[str]:
    """Tasks that change our VM, for example those of a run whose connection broke: to be waited for.

    Not all that are active: an open console is one too, and a backup shows as a lock. Those are kept to be named.
    """
    items = client.get(f"/nodes/{spec.node}/tasks", {"vmid": spec.vmid, "source": "active"}) or []
    active = {
        str(item["upid"]): str(item.get("type"))
        for item in items
        if str(item.get("id")) == str(spec.vmid) and not item.get("endtime")
    }
    ours = [upid for upid, kind in active.items() if re.match(r"qm|resize$", kind)]
    facts.tasks = tuple(f"{kind} {upid}" for upid, kind in active.items() if upid not in ours)
    return ours


def collect_cluster(client: Reader, *, is_root: bool, caller: str, user: str) -> Facts:
    """Who we are to the cluster, and which nodes it has: readable by everyone who can log in."""
    facts = Facts(is_root=is_root, caller=caller, user=user)
    facts.version = str((client.get("/version") or {}).get("version", ""))
    facts.nodes = {str(item["node"]): str(item.get("status", "")) for item in client.get("/nodes") or []}
    facts.permissions = client.get("/access/permissions") or {}
    return facts


def collect(client: Reader, spec: VmSpec, facts: Facts) -> None:
    """Read the rest."""
    reread(client, spec, facts)
    if spec.wants_vm:
        _place(client, spec, facts)
        _devices(client, spec, facts)
        return
    if facts.vm is not None:
        facts.snapshots = _snapshots(client, spec)
    if spec.manage_mappings:
        _devices(client, spec, facts)
