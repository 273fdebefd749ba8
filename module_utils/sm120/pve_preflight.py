"""Checks of the request against what the cluster says: every one before the first write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from .pve_desired import ROOT_ONLY
from .pve_facts import Facts, Pci, Use
from .pve_finding import Finding
from .pve_spec import VmSpec, owner_line
from .pve_text import same

__all__ = [
    "allowed",
    "check_cluster",
    "check_destroy",
    "check_devices",
    "check_owner",
    "check_place",
    "check_privileges",
    "check_root",
]

OLDEST_VERSION = (8, 0)
NODE_RESERVE_MIB = 2048
ROLE = "SglangSm120"  # as docs/proxmox.md makes it
# What ends a lock, by its name; all others are left by a task that broke off.
_LOCK_FIXES = {
    "backup": "wait until the backup is done, then run again; when none runs any more: qm unlock {vmid}",
    "create": "see the node's task log; qm unlock {vmid} and qm destroy {vmid} (left by a creation)",
    "suspended": "qm resume {vmid}, then run again",
    "suspending": "wait until it is suspended, qm resume {vmid}, then run again",
}
Permissions = Mapping[str, Mapping[str, int]]


def allowed(permissions: Permissions, path: str, privilege: str) -> bool:
    """Whether the permissions (path -> privilege -> propagates) grant a privilege on a path.

    The nearest path that is listed decides; one above ours only with what it hands down.
    """
    probe = path
    while True:
        if probe in permissions:
            grants = permissions[probe]
            return privilege in grants and (probe == path or bool(grants[privilege]))
        if probe == "/":
            return False
        probe = probe.rpartition("/")[0] or "/"


def check_privileges(facts: Facts, needed: Iterable[tuple[str, str]]) -> list[Finding]:
    """One finding for everything the caller lacks, with the command that grants it."""
    if facts.is_root:
        return []
    missing = sorted({(path, name) for path, name in needed if not allowed(facts.permissions, path, name)})
    if not missing:
        return []
    names = ",".join(sorted({name for _, name in missing}))
    paths = sorted({path for path, _ in missing})
    grants = "; ".join(f"pveum acl modify {path} --users {facts.user} --roles {ROLE}" for path in paths)
    if facts.caller != facts.user:
        grants += f" (and --tokens '{facts.caller}' when the token's privileges are separated)"
    listed = ", ".join(f"{name} on {path}" for path, name in missing)
    return [
        Finding(
            "privileges",
            f"{facts.caller} to have what this plan needs",
            f"missing: {listed}",
            f"pveum role modify {ROLE} --append --privs {names}; {grants}",
        )
    ]


def check_root(spec: VmSpec, facts: Facts, keys: Iterable[str]) -> list[Finding]:
    """Options that only root@pam may set, against how we are logged in."""
    root_keys = sorted(ROOT_ONLY & set(keys))
    if not root_keys or spec.root_path == "ssh" or (spec.root_path == "password" and facts.is_root):
        return []
    return [
        Finding(
            "root-only options",
            f"root@pam with a password (root's API tokens are not root) to change {', '.join(root_keys)}",
            f"{facts.caller}, root_path: {spec.root_path}",
            "root_path: password with api_user root@pam, api_password and no api_token_id; or root_path: ssh "
            "(qm set on the node); or remove the options, or set them to what the VM has",
        )
    ]


def check_cluster(spec: VmSpec, facts: Facts) -> Iterator[Finding]:
    """Version and node."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.version)[:2])
    if numbers < OLDEST_VERSION:
        yield Finding("version", "Proxmox VE 8.0 or later", facts.version or "nothing", "upgrade the cluster")
    if facts.nodes.get(spec.node) != "online":
        known = ", ".join(f"{name} ({status})" for name, status in sorted(facts.nodes.items()))
        yield Finding("node", f"{spec.node} online", known or "no nodes", "correct node, or bring it up")


def check_owner(spec: VmSpec, facts: Facts) -> Iterator[Finding]:
    """The VMID is free or ours, on our node and under our name."""
    for item in facts.resources:
        if item.get("name") == spec.name and int(item.get("vmid", 0)) != spec.vmid:
            yield Finding(
                "name",
                f"{spec.name} to be VM {spec.vmid}",
                f"VM {item['vmid']} has that name",
                f"set vmid to {item['vmid']} if that VM is meant, otherwise choose another name",
            )
    here = facts.resource(spec.vmid)
    if here is None:
        return
    if here.get("type") != "qemu" or here.get("node") != spec.node or facts.vm is None:
        yield Finding(
            "vmid",
            f"{spec.vmid} free, or our VM on {spec.node}",
            f"a {here.get('type')} named {here.get('name')} on {here.get('node')}",
            "choose a free VMID, or correct node",
        )
        return
    config = facts.vm.config
    if facts.vm.lock:
        yield Finding(
            "lock",
            f"VM {spec.vmid} unlocked",
            f"lock '{facts.vm.lock}'; at work on it: {', '.join(facts.tasks) or 'no task of its own'}",
            _LOCK_FIXES.get(facts.vm.lock, "see the node's task log; qm unlock {vmid}").format(
                vmid=spec.vmid
            ),
        )
    wrong = _not_ours(spec, config)
    if wrong and facts.vm.lock != "create":
        yield Finding(
            "owner",
            f"VM {spec.vmid} free, or ours: tag {spec.owner_tag} and in the description "
            f"'{owner_line(spec.owner_id)}'",
            f"VM named {config.get('name', '?')} without {' and '.join(wrong)}",
            "choose a free VMID; to hand the VM over, add both by hand",
        )
    elif not wrong and config.get("name") != spec.name:
        yield Finding(
            "name",
            f"VM {spec.vmid} named {spec.name}",
            f"it is {config.get('name')}, one of ours",
            f"correct vmid or name; to rename it: qm set {spec.vmid} --name {spec.name}",
        )
    if config.get("template"):
        yield Finding("vmid", "a VM", f"{spec.vmid} is a template", "choose a free VMID")


def _not_ours(spec: VmSpec, config: Mapping[str, object]) -> list[str]:
    wrong: list[str] = []
    if spec.owner_tag.lower() not in re.split(r"[;, ]+", str(config.get("tags", "")).lower()):
        wrong.append(f"the tag {spec.owner_tag}")
    if owner_line(spec.owner_id) not in str(config.get("description", "")).splitlines():
        wrong.append(f"the line '{owner_line(spec.owner_id)}'")
    return wrong


def check_room(spec: VmSpec, facts: Facts, *, freed_mib: int = 0) -> Iterator[Finding]:
    """Memory for a start; `freed_mib` is what the same VM gives back before it."""
    available_mib = facts.node_available_mib + freed_mib
    if facts.node_memory_mib and spec.hugepages is None and spec.memory_mib > available_mib:
        yield Finding(
            "memory_mib",
            f"{spec.memory_mib} MiB available on {spec.node} for the start",
            f"{available_mib} MiB",
            "stop other VMs, shrink the ZFS ARC, or lower memory_mib",
        )


def check_place(spec: VmSpec, facts: Facts, *, starts: bool, creates: bool) -> Iterator[Finding]:
    """Processors, memory, storages and the image."""
    cpus = spec.cores * spec.sockets
    if facts.node_cpus and cpus > facts.node_cpus:
        yield Finding("cores", f"at most {facts.node_cpus} (the node's)", str(cpus), "lower cores or sockets")
    limit = facts.node_memory_mib - NODE_RESERVE_MIB
    if facts.node_memory_mib and spec.memory_mib > limit:
        yield Finding(
            "memory_mib",
            f"at most {limit} MiB (the node's {facts.node_memory_mib} less {NODE_RESERVE_MIB} for itself)",
            str(spec.memory_mib),
            "lower memory_mib: passthrough pins all of it",
        )
    elif starts:
        yield from check_room(spec, facts)
    needed = {spec.storage: "images", spec.efi_storage: "images", spec.cloudinit_storage: "images"}
    for name, content in sorted(needed.items()):
        storage = facts.storages.get(name)
        contents = [] if storage is None else str(storage.get("content", content)).split(",")
        if storage is None or content not in contents or not int(storage.get("active", 1)):
            known = ", ".join(sorted(facts.storages)) or "none visible"
            found = f"storages: {known}" if storage is None else f"content {','.join(contents)}"
            yield Finding(
                "storage", f"{name} active with content {content}", found, "correct the name or its content"
            )
    if creates:
        yield from _check_image(spec, facts)
        avail = int(facts.storages.get(spec.storage, {}).get("avail", spec.disk_gib << 30)) >> 30
        if avail < spec.disk_gib:
            yield Finding(
                "disk_gib",
                f"{spec.disk_gib} GiB free on {spec.storage}",
                f"{avail} GiB; a thin disk is made all the same and fails when the storage is full",
                "lower disk_gib, or free space",
                severity="warning",
            )


def _check_image(spec: VmSpec, facts: Facts) -> Iterator[Finding]:
    if spec.image_volid is None:
        if spec.state == "started":
            yield Finding(
                "image_volid",
                "an image for a VM that is made and started",
                "none: its disk would be empty",
                "set image_volid; or make it with state: present and install it by hand",
            )
        return
    if spec.image_volid in facts.images:
        gib = facts.images[spec.image_volid] / (1 << 30)
        if gib > spec.disk_gib:
            yield Finding(
                "disk_gib",
                f"{math.ceil(gib)} or more, for {spec.image_volid}",
                f"{spec.disk_gib}",
                "set disk_gib",
            )
        return
    storage = spec.image_volid.partition(":")[0]
    if storage not in facts.storages:
        yield Finding("image_volid", f"storage {storage}", "no such storage", "correct image_volid")
    elif spec.image_url is None:
        yield Finding(
            "image_volid",
            f"{spec.image_volid} on the node (an .img renamed to .qcow2)",
            ", ".join(facts.images) or "no images there",
            "set image_url and image_checksum, or upload the image with content type import",
        )


def check_devices(spec: VmSpec, facts: Facts, targets: Mapping[str, str]) -> Iterator[Finding]:
    """``targets``: mapping -> PCI address, those that will be made included."""
    if not spec.gpus:
        return
    cards = [item for item in facts.pci if item.device_id in spec.gpu_ids and item.is_display]
    if len(cards) < len(spec.gpus):
        found = ", ".join(item.address for item in cards) or "none"
        yield Finding(
            "gpus",
            f"{len(spec.gpus)} GPUs with ids {', '.join(spec.gpu_ids)} on {spec.node}",
            f"{len(cards)} ({found})",
            "lower the number, correct gpu_ids, or look for a card that fell off (lspci -nn, dmesg)",
        )
    running = facts.vm is not None and facts.vm.running  # then it has its GPUs, whatever others do
    for other in () if running else facts.unsettled:
        yield Finding(
            "gpus",
            f"all VMs of {spec.node} made, to know their GPUs",
            f"VM {other} is being made (lock 'create')",
            "run again when it is there; if its creation broke off, see the node's task log",
        )
    for gpu in spec.gpus:
        yield from _check_mapping(spec, facts, gpu.mapping, targets)
    by_path: dict[str, list[str]] = {}
    for name, path in targets.items():
        by_path.setdefault(path.partition(".")[0], []).append(name)
    for path, names in sorted(by_path.items()):
        if len(names) > 1:
            yield Finding(
                "mappings", "one GPU each", f"{', '.join(sorted(names))} all mean {path}", "correct them"
            )
    mine = [item for item in facts.pci if item.slot in by_path and item.is_display]
    outside = [item.address for item in mine if item.iommu_group < 0]
    if outside:
        yield Finding(
            "iommu",
            f"{', '.join(outside)} in an IOMMU group each",
            "no group: the IOMMU is off",
            "enable it in the firmware and the kernel (role pve_host), then reboot the node",
        )
    for item in mine:
        yield from _check_group(spec, facts.pci, item, set(by_path))
    for use in facts.uses:
        yield from _check_use(spec, facts, use, targets)


def _check_mapping(spec: VmSpec, facts: Facts, name: str, targets: Mapping[str, str]) -> Iterator[Finding]:
    mapped = facts.mappings.get(name)
    if mapped is None and name not in targets:
        known = ", ".join(sorted(facts.mappings)) or "none visible to " + facts.caller
        if spec.manage_mappings and facts.uses:
            known += "; in use: " + ", ".join(
                f"{use.device} by VM {use.vmid} ({use.name})" for use in facts.uses
            )
        yield Finding(
            "mappings",
            f"a resource mapping {name}" + (", or a free GPU to make it for" if spec.manage_mappings else ""),
            f"mappings: {known}",
            "set manage_mappings: true, or make it in Datacenter > Resource Mappings",
        )
    for problem in mapped.problems if mapped is not None else ():
        yield Finding(
            "mappings",
            f"mapping {name} to fit node {spec.node}",
            problem,
            "correct the mapping, or delete it",
        )
    path = targets.get(name)
    if path is None or (mapped is not None and mapped.problems):
        return
    functions = [item for item in facts.pci if path in (item.address, item.slot)]
    if not any(item.device_id in spec.gpu_ids for item in functions):
        found = ", ".join(item.device_id for item in functions) or "no device"
        yield Finding(
            "mappings", f"{name} to be a GPU ({', '.join(spec.gpu_ids)})", f"{path}: {found}", "correct it"
        )


def _check_group(spec: VmSpec, devices: list[Pci], gpu: Pci, wanted: set[str]) -> Iterator[Finding]:
    strangers = [
        item.address
        for item in devices
        if item.iommu_group == gpu.iommu_group >= 0 and not item.is_bridge and item.slot not in wanted
    ]
    if strangers:
        yield Finding(
            "iommu",
            f"group {gpu.iommu_group} of {gpu.address} with bridges and our GPUs only",
            f"{', '.join(strangers)} too, which the node would lose",
            "use another slot, or accept_group_members: true when the node can do without them",
            severity="warning" if spec.accept_group_members else "error",
        )


def _check_use(spec: VmSpec, facts: Facts, use: Use, targets: Mapping[str, str]) -> Iterator[Finding]:
    for name, path in sorted(targets.items()):
        mapped = facts.mappings.get(use.device.removeprefix("mapping="))
        device = mapped.path if use.device.startswith("mapping=") and mapped is not None else use.device
        same_slot = device is not None and device.partition(".")[0] == path.partition(".")[0]
        if use.device == f"mapping={name}" or same_slot:
            yield Finding(
                "gpus",
                f"{name} ({path}) free",
                f"VM {use.vmid} ({use.name}, {use.status} on {spec.node}) has {use.device}",
                f"take it from VM {use.vmid}, or choose another mapping",
            )


def check_destroy(spec: VmSpec, facts: Facts) -> Iterator[Finding]:
    """Everything that must agree before a VM is destroyed."""
    if facts.vm is None:
        return
    if not spec.confirm_destroy or spec.confirm_destroy != spec.name:
        yield Finding(
            "confirm_destroy",
            f"the VM's name, {spec.name}",
            repr(spec.confirm_destroy),
            "give it when you are sure",
        )
    if not same("protection", "0", facts.vm.config.get("protection")) and not spec.protection:
        yield Finding(
            "protection",
            "a VM that nobody else protected",
            "protection is on, and not by us (protection: false)",
            f"qm set {spec.vmid} --protection 0",
        )
    if facts.snapshots and not spec.destroy_with_snapshots:
        yield Finding(
            "snapshots", "none", ", ".join(facts.snapshots), "remove them, or destroy_with_snapshots: true"
        )
