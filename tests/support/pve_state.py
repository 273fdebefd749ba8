"""A made-up Proxmox VE node for tests: state and rules, without HTTP.

It behaves as the real API was seen to (PVE 9): who may set what, what is refused with which status,
which writes allocate a disk or a MAC anew, and what becomes pending on a running VM.
Written for this project; it shares no code with Proxmox or with other fakes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

NODE = "pve1"
GIB = 1 << 30
ROOT_ONLY = {"affinity", "args", "hugepages", "keephugepages"}
LIVE = {"name", "description", "tags", "onboot", "protection", "ciuser", "ciupgrade", "sshkeys"}
KNOWN = {
    *[
        "affinity",
        "args",
        "agent",
        "balloon",
        "bios",
        "boot",
        "ciupgrade",
        "ciuser",
        "cores",
        "cpu",
        "description",
        "digest",
        "hugepages",
    ],
    *[
        "keephugepages",
        "lock",
        "machine",
        "memory",
        "name",
        "nameserver",
        "numa",
        "onboot",
        "ostype",
        "protection",
        "scsihw",
    ],
    *["searchdomain", "sockets", "sshkeys", "startup", "tags", "template", "vcpus", "vga", "vmid", "delete"],
}
FAMILIES = {
    "hostpci": 16,
    "numa": 8,
    "net": 32,
    "scsi": 31,
    "ide": 4,
    "ipconfig": 32,
    "serial": 4,
    "efidisk": 1,
}
HOSTPCI = {"host", "mapping", "pcie", "rombar", "romfile", "x-vga", "legacy-igd", "device-id", "vendor-id"}
CPUS = {"host", "max", "kvm64", "qemu64", "x86-64-v2-AES", "x86-64-v3", "EPYC", "EPYC-Genoa"}
PRIVILEGES = [
    "VM.Allocate",
    "VM.Audit",
    "VM.Config.CPU",
    "VM.Config.Memory",
    "VM.Config.HWType",
    "VM.Config.Disk",
    "VM.Config.Network",
    "VM.Config.Options",
    "VM.Config.Cloudinit",
    "VM.Config.CDROM",
    "VM.PowerMgmt",
    "Datastore.AllocateSpace",
    "Datastore.Audit",
    "Datastore.AllocateTemplate",
    "Mapping.Use",
    "Mapping.Audit",
    "SDN.Use",
    "Sys.Audit",
    "VM.GuestAgent.Audit",
]
# What a change of a key needs on /vms/VMID; every other key is an option.
KEY_PRIVILEGES = {
    **dict.fromkeys(["cores", "cpu", "numa", "sockets", "vcpus", "affinity"], "VM.Config.CPU"),
    **dict.fromkeys(["balloon", "memory", "hugepages", "keephugepages"], "VM.Config.Memory"),
    **dict.fromkeys(["bios", "hostpci", "machine", "ostype", "scsihw", "serial", "vga"], "VM.Config.HWType"),
    **dict.fromkeys(["efidisk", "scsi"], "VM.Config.Disk"),
    "ide": "VM.Config.CDROM",
    "net": "VM.Config.Network",
    **dict.fromkeys(
        ["ciuser", "ciupgrade", "ipconfig", "nameserver", "searchdomain", "sshkeys"], "VM.Config.Cloudinit"
    ),
}


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str, errors: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.errors = status, message, errors


@dataclass
class Caller:
    """Who sends a request."""

    name: str
    root: bool
    permissions: dict[str, dict[str, int]]

    def may(self, path: str, privilege: str) -> bool:
        """The nearest path that is listed decides; one above with what it hands down."""
        probe = path
        while probe not in self.permissions and probe != "/":
            probe = probe.rpartition("/")[0] or "/"
        grants = self.permissions.get(probe, {})
        return self.root or (privilege in grants and (probe == path or bool(grants[privilege])))

    def need(self, path: str, *privileges: str) -> None:
        """One of the privileges, or 403."""
        if not any(self.may(path, privilege) for privilege in privileges):
            raise ApiError(403, f"Permission check failed ({path}, {'|'.join(privileges)})")


@dataclass
class Task:
    """A task: its effect comes when it has been looked at ``polls`` times."""

    upid: str
    kind: str
    vmid: int
    effect: Callable[[], None]
    polls: int
    exitstatus: str | None = None
    log: list[str] = field(default_factory=list)


@dataclass
class Machine:
    """A VM: the configuration that runs, and what waits for the next start."""

    config: dict[str, str]
    status: str = "stopped"
    pending: dict[str, str | None] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)  # what its guest agent tells; none: it does not answer

    def merged(self) -> dict[str, str]:
        """The configuration with pending changes applied."""
        merged = {**self.config, **{key: value for key, value in self.pending.items() if value is not None}}
        return {key: value for key, value in merged.items() if self.pending.get(key, "") is not None}

    def digest(self) -> str:
        """What a writer must quote."""
        text = json.dumps([self.config, self.pending], sort_keys=True)
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def gpu(bus: int, group: int, device: str = "0x2bb5") -> dict[str, Any]:
    """One GPU as hardware/pci lists it."""
    return {
        "id": f"0000:{bus:02x}:00.0",
        "class": "0x030200",
        "vendor": "0x10de",
        "device": device,
        "subsystem_vendor": "0x10de",
        "subsystem_device": "0x204e",
        "iommugroup": group,
    }


def bridge(bus: int, group: int) -> dict[str, Any]:
    """The root port above a GPU."""
    return {
        "id": f"0000:{bus:02x}:01.0",
        "class": "0x060400",
        "vendor": "0x1022",
        "device": "0x14ab",
        "iommugroup": group,
    }


def properties(text: str) -> dict[str, str]:
    """Sub-keys; an unnamed value is under the empty name."""
    return {k if eq else "": v if eq else k for k, eq, v in (part.partition("=") for part in text.split(","))}


class State:
    """One node with eight GPUs, two storages and a cloud image."""

    def __init__(self) -> None:
        self.vms: dict[int, Machine] = {}
        self.others: list[dict[str, Any]] = []
        self.tasks: dict[str, Task] = {}
        self.task_polls = 1
        self.task_faults: dict[str, str] = {}
        self.pci = [
            item for i in range(8) for item in (bridge(0x10 + i, 20 + i), gpu(0x11 + 0x10 * i, 20 + i))
        ]
        self.mappings: dict[str, dict[str, Any]] = {}
        self.storages = {"local": "import,iso,vztmpl", "local-zfs": "images,rootdir"}
        self.images = {"local:import/noble.qcow2": 3.5}  # GiB once imported; the file is smaller
        self.volumes: dict[str, float] = {}
        self.memory_mib, self.cpus, self.free_mib = 1_048_576, 128, 900_000
        self.avail_gib = 4096.0
        self.macs = 0
        self.version = "9.0.3"

    # -- tasks ---------------------------------------------------------------------------------
    def task(self, kind: str, vmid: int, user: str, effect: Callable[[], None]) -> str:
        """Start a task; its effect comes later."""
        upid = f"UPID:{NODE}:0000{len(self.tasks):04X}:00000000:6740A000:{kind}:{vmid}:{user}:"
        self.tasks[upid] = Task(upid, kind, vmid, effect, self.task_polls)
        return upid

    def poll(self, upid: str) -> dict[str, Any]:
        """A task's status; looking at it is what lets it end."""
        task = self.tasks[upid]
        if task.exitstatus is None and task.polls <= 0:
            self._end(task)
        task.polls -= 1
        ended = {} if task.exitstatus is None else {"exitstatus": task.exitstatus}
        return {"upid": upid, "status": "running" if task.exitstatus is None else "stopped", **ended}

    def _end(self, task: Task) -> None:
        fault = self.task_faults.pop(task.kind, None)
        try:
            if fault is not None:
                raise ApiError(500, fault)
            task.effect()
            task.exitstatus = "OK"
            task.log.append("TASK OK")
        except ApiError as problem:
            task.exitstatus = problem.message
            task.log += [f"work on VM {task.vmid}", f"TASK ERROR: {problem.message}"]
            if task.kind == "qmcreate" and fault != "killed":
                self.vms.pop(task.vmid, None)  # Proxmox removes what a failed creation left

    # -- rules ---------------------------------------------------------------------------------
    def check_keys(self, caller: Caller, values: dict[str, str], vmid: int = 100) -> None:
        """Schema, formats and root-only options, as the API checks them before it does anything."""
        for key, value in values.items():
            stem, number = re.fullmatch(r"([a-z]+?)(\d*)", key).groups() if key.isalnum() else (key, "")
            if key not in KNOWN and not (number and int(number) < FAMILIES.get(stem, 0)):
                raise ApiError(
                    400, "Parameter verification failed.", {key: "property is not defined in schema"}
                )
            self._check_format(key, stem if number else key, value)
        removed = set(values.get("delete", "").split(",")) - {""}
        for key in sorted(ROOT_ONLY & ({*values} | removed)):
            if not caller.root:
                raise ApiError(500, f"only root can set '{key}' config")
        for key, value in values.items():
            if key.startswith("hostpci"):
                self._check_hostpci(caller, key, properties(value))
            if "import-from=/" in value and not caller.root:
                raise ApiError(500, "Only root can pass arbitrary filesystem paths")
            self._check_volume(caller, key, properties(value) if value else {})
        for key in ({*values} | removed) - {"vmid", "digest", "delete"}:
            stem = key if key in KNOWN else key.rstrip("0123456789")
            caller.need(f"/vms/{vmid}", KEY_PRIVILEGES.get(stem, "VM.Config.Options"))
        if "startup" in values:
            caller.need("/", "Sys.Modify")

    @staticmethod
    def _check_hostpci(caller: Caller, key: str, parts: dict[str, str]) -> None:
        if caller.root:
            return
        if "romfile" in parts:
            message = {key: "Only root@pam can set 'romfile'"}
            raise ApiError(400, "Parameter verification failed.", message)
        if "mapping" not in parts:
            raise ApiError(500, f"only root can set '{key}' config for non-mapped devices")
        caller.need(f"/mapping/pci/{parts['mapping']}", "Mapping.Use")

    @staticmethod
    def _check_volume(caller: Caller, key: str, parts: dict[str, str]) -> None:
        if re.fullmatch(r"(scsi|ide|efidisk)\d+", key) and re.search(r":(\d+|cloudinit)$", parts.get("", "")):
            caller.need(f"/storage/{parts[''].partition(':')[0]}", "Datastore.AllocateSpace")
        if key.startswith("net") and re.fullmatch(r"vmbr\w+", parts.get("bridge", "")):
            caller.need(f"/sdn/zones/localnetwork/{parts['bridge']}", "SDN.Use")

    @staticmethod
    def _check_format(key: str, stem: str, value: str) -> None:
        bad = ""
        parts = properties(value)
        if stem == "hostpci":
            names = {name or "host" for name in parts}
            bad = "invalid format" if names - HOSTPCI or not names & {"host", "mapping"} else ""
        elif stem == "cpu" and key == "cpu":
            bad = "" if parts.get("", parts.get("cputype", "")) in CPUS else "unknown CPU model"
        elif stem == "numa" and key != "numa":
            bad = "" if re.fullmatch(r"\d+(-\d+)?(;\d+(-\d+)?)*", parts.get("cpus", "")) else "invalid format"
        elif key in {"onboot", "protection", "numa", "ciupgrade"}:
            bad = "" if value in {"0", "1"} else "type check ('boolean') failed"
        elif stem == "ipconfig" and key != stem:
            bad = State._ipconfig(parts)
        elif key == "sshkeys" and re.search(r"\s", value):
            bad = "invalid urlencoded string"
        if bad:
            raise ApiError(400, "Parameter verification failed.", {key: bad})

    @staticmethod
    def _ipconfig(parts: dict[str, str]) -> str:
        kinds = {"ip": ipaddress.IPv4Interface, "ip6": ipaddress.IPv6Interface}
        kinds |= {"gw": ipaddress.IPv4Address, "gw6": ipaddress.IPv6Address}
        try:
            for name, value in parts.items():
                if value not in {"ip": ["dhcp"], "ip6": ["dhcp", "auto"]}.get(name, []):
                    kinds[name](value)
        except (KeyError, ValueError):
            return "invalid format"
        return ""

    def _mac(self) -> str:
        self.macs += 1
        return f"BC:24:11:00:00:{self.macs:02X}"

    def _allocate(self, vmid: int, key: str, value: str, old: str | None, config: dict[str, str]) -> str:
        """A value with ``STORAGE:SIZE`` makes a new volume; the old one stays behind, detached."""
        parts = properties(value)
        storage, _, rest = parts.pop("").partition(":")
        if not re.fullmatch(r"\d+|cloudinit", rest):
            return value  # an existing volume
        if storage not in self.storages:
            raise ApiError(500, f"storage '{storage}' does not exist")
        if old is not None:
            number = next(n for n in range(9) if f"unused{n}" not in config)
            config[f"unused{number}"] = properties(old)[""]
        source = parts.pop("import-from", None)
        if source is not None and source not in self.images:
            raise ApiError(500, f"volume '{source}' does not exist")
        number = sum(1 for name in self.volumes if f"vm-{vmid}-disk" in name)
        volume = f"{storage}:vm-{vmid}-{'cloudinit' if rest == 'cloudinit' else f'disk-{number}'}"
        size = (
            self.images[source]
            if source
            else 0.004
            if rest == "cloudinit" or key == "efidisk0"
            else float(rest)
        )
        self.volumes[volume] = size
        if rest == "cloudinit":
            return f"{volume},media=cdrom,size=4M"
        options = "".join(f",{name}={parts[name]}" for name in sorted(parts))
        return f"{volume}{options},size={'4M' if key == 'efidisk0' else self._size(size)}"

    @staticmethod
    def _size(gib: float) -> str:
        return f"{int(gib)}G" if gib == int(gib) else f"{int(gib * 1024)}M"

    def apply(self, vmid: int, values: dict[str, str]) -> None:
        """Store values as the API does; on a running VM most of them wait."""
        vm = self.vms[vmid]
        for key in filter(None, values.get("delete", "").split(",")):
            self._store(vm, key, None)
        for key, value in values.items():
            if key in {"delete", "digest", "vmid"}:
                continue
            old = vm.merged().get(key)
            if re.fullmatch(r"(scsi|ide|efidisk)\d+", key):
                value = self._allocate(vmid, key, value, old, vm.config)
            elif re.fullmatch(r"net\d+", key) and re.match(r"(model=)?virtio(,|$)", value):
                given = re.search(r",macaddr=([^,]+)", value)
                value = re.sub(r",macaddr=[^,]+", "", value)
                value = re.sub(r"^(model=)?virtio", f"virtio={given[1] if given else self._mac()}", value)
            elif key == "tags":
                value = ";".join(sorted({tag for tag in re.split(r"[;, ]+", value.lower()) if tag}))
            self._store(vm, key, value)

    @staticmethod
    def _store(vm: Machine, key: str, value: str | None) -> None:
        if vm.status == "running" and key not in LIVE:
            vm.pending[key] = value
            return
        vm.pending.pop(key, None)
        if value is None:
            vm.config.pop(key, None)
        else:
            vm.config[key] = value

    def start(self, vmid: int) -> None:
        """What the start of a VM checks."""
        vm = self.vms[vmid]
        vm.config, vm.pending = vm.merged(), {}
        config = vm.config
        nodes = [properties(value) for key, value in config.items() if re.fullmatch(r"numa\d+", key)]
        if "hugepages" in config and not all("hostnodes" in node for node in nodes or [{}]):
            raise ApiError(500, "numa hostnodes need to be defined to use hugepages")
        if nodes and sum(int(node["memory"]) for node in nodes) != int(config["memory"]):
            raise ApiError(500, "total memory for NUMA nodes must be equal to vm static memory")
        count = int(config.get("vcpus", int(config.get("cores", 1)) * int(config.get("sockets", 1))))
        if count > self.cpus:
            raise ApiError(500, f"MAX {self.cpus} vcpus allowed per VM on this node")
        held = {path: other for other in self.vms if other != vmid for path in self.held_by(other)}
        for key, value in config.items():
            parts = properties(value) if key.startswith("hostpci") else {}
            name = parts.get("mapping")
            if name is not None and name not in self.mappings:
                raise ApiError(500, f"PCI device mapping not found for '{name}'")
            if parts.get("pcie") == "1" and not re.match(r"(pc-)?q35", config.get("machine", "pc")):
                raise ApiError(500, "q35 machine model is not enabled")
            for path in self._paths(value) if parts else ():
                if path in held:
                    raise ApiError(500, f"PCI device '{path}' already in use by VMID '{held[path]}'")
        vm.status = "running"

    def _paths(self, value: str) -> list[str]:
        """The PCI addresses that one hostpci value takes."""
        parts = properties(value)
        mapped = self.mappings.get(parts.get("mapping", ""), {"map": []})["map"]
        listed = ";".join(
            [*[properties(text)["path"] for text in mapped], parts.get("host", parts.get("", ""))]
        )
        return [f"0000:{path}" if path.count(":") == 1 else path for path in listed.split(";") if path]

    def held_by(self, vmid: int) -> list[str]:
        """What a running VM took at its start: its configuration without what is pending."""
        vm = self.vms[vmid]
        values = [value for key, value in vm.config.items() if key.startswith("hostpci")]
        return [path for value in values for path in self._paths(value)] if vm.status == "running" else []

    def resize(self, vmid: int, disk: str, size: str) -> None:
        """Grow a disk."""
        vm = self.vms[vmid]
        if disk not in vm.config:
            raise ApiError(500, f"disk '{disk}' does not exist")
        value = vm.config[disk]
        volume, wanted = properties(value)[""], float(size.rstrip("G"))
        if wanted < self.volumes[volume]:
            raise ApiError(500, "shrinking disks is not supported")
        self.volumes[volume] = wanted
        vm.config[disk] = re.sub(r"size=[^,]+", f"size={self._size(wanted)}", value)

    def destroy(self, vmid: int) -> None:
        """Remove a VM and its volumes."""
        if self.vms[vmid].status == "running":
            raise ApiError(500, f"VM {vmid} is running - destroy failed")
        del self.vms[vmid]
        self.volumes = {name: size for name, size in self.volumes.items() if f":vm-{vmid}-" not in name}

    def mapping_checks(self, item: dict[str, Any]) -> list[dict[str, str]]:
        """What ``check-node`` says about a mapping."""
        found: list[dict[str, str]] = []
        for entry in (properties(text) for text in item["map"]):
            message = self.mapping_problem(item["id"], entry)
            found += [{"severity": "error", "message": message}] if message else []
        return found

    def mapping_problem(self, name: str, entry: dict[str, str]) -> str:
        """What does not fit between a mapping's entry and its device; empty when all does."""
        device = next((pci for pci in self.pci if pci["id"].startswith(entry["path"])), None)
        if device is None:
            return f"pci device '{entry['path']}' not found"
        wanted = {"id": f"{device['vendor'][2:]}:{device['device'][2:]}"}
        if device["iommugroup"] >= 0:
            wanted["iommugroup"] = str(device["iommugroup"])
        if "subsystem_vendor" in device:
            wanted["subsystem-id"] = f"{device['subsystem_vendor'][2:]}:{device['subsystem_device'][2:]}"
        for key, value in wanted.items():
            if key not in entry:
                return f"missing expected property '{key}' for '{name}'"
            if entry[key] != value:
                return f"'{key}' does not match for '{name}' ({entry[key]} != {value})"
        return ""

    def add_mappings(self, count: int = 8) -> None:
        """gpu0, gpu1, ... for the GPUs in order."""
        cards = [item for item in self.pci if item["class"].startswith("0x03")]
        for index, card in enumerate(cards[:count]):
            text = f"node={NODE},path={card['id']},id=10de:{card['device'][2:]},subsystem-id=10de:204e"
            text += f",iommugroup={card['iommugroup']}"
            self.mappings[f"gpu{index}"] = {"id": f"gpu{index}", "map": [text]}

    def keys_of(self, vmid: int) -> list[str]:
        """The SSH keys of a VM, decoded."""
        return unquote(self.vms[vmid].merged().get("sshkeys", "")).splitlines()
