"""From the request and the facts to the requests that will be made, in order; nothing is sent here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import pve_preflight as preflight
from .pve_desired import ROOT_ONLY, privilege_for
from .pve_diff import LIVE_KEYS, Changes, conflicts, diff_config
from .pve_facts import Facts, Pci
from .pve_finding import Finding, errors
from .pve_spec import VmSpec, owner_line
from .pve_text import pci_address, same

__all__ = ["Plan", "Step", "make_plan", "read_privileges"]

START_MARGIN_SECONDS = 60


@dataclass(frozen=True)
class Step:
    """One request that changes something; ``wait_seconds`` when it starts a task."""

    method: str
    path: str
    params: dict[str, str | int | list[str]] = field(default_factory=dict)
    wait_seconds: float | None = None


@dataclass
class Plan:
    """What would be done, what forbids it, and how it looks before and after."""

    findings: list[Finding] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    root_set: dict[str, str] = field(default_factory=dict)
    root_delete: list[str] = field(default_factory=list)
    restart_required: bool = False
    first: list[Step] | None = None  # only after these can the rest be planned; None: all at once

    @property
    def refused(self) -> list[Finding]:
        """What forbids the plan."""
        return errors(self.findings)


def read_privileges(spec: VmSpec, facts: Facts, *, asks_agent: bool) -> list[tuple[str, str]]:
    """What a caller needs only to look, checked before the reads that need it."""
    needed = [(f"/vms/{spec.vmid}", "VM.Audit")]
    if spec.wants_vm:
        needed.append((f"/nodes/{spec.node}", "Sys.Audit"))
        needed += [(f"/storage/{name}", "Datastore.Audit") for name in sorted(_storages(spec))]
    if spec.gpus and (spec.wants_vm or spec.manage_mappings):
        needed.append(("/", "Sys.Audit"))
    if asks_agent:
        # Up to Proxmox VE 8 one privilege was for all that the agent can do
        # (https://pve.proxmox.com/wiki/Upgrade_from_8_to_9, https://pve.proxmox.com/pve-docs/chapter-pveum.html).
        names = ["VM.GuestAgent.Audit", "VM.GuestAgent.Unrestricted"]
        names = ["VM.Monitor"] if facts.version.startswith("8.") else names
        if not any(preflight.allowed(facts.permissions, f"/vms/{spec.vmid}", name) for name in names):
            needed.append((f"/vms/{spec.vmid}", names[0]))
    return needed


def _storages(spec: VmSpec) -> set[str]:
    names = {spec.storage, spec.efi_storage, spec.cloudinit_storage}
    if spec.image_volid is not None:
        names.add(spec.image_volid.partition(":")[0])
    return names


def _targets(spec: VmSpec, facts: Facts) -> dict[str, str]:
    """Which PCI address each mapping means; missing ones get the free GPUs in the order of addresses."""
    targets = {
        gpu.mapping: path for gpu in spec.gpus if (path := _known_path(facts, gpu.mapping)) is not None
    }
    if not spec.manage_mappings:
        return targets
    missing = [gpu for gpu in spec.gpus if gpu.mapping not in facts.mappings]
    for gpu in missing:
        if gpu.path is not None:
            targets[gpu.mapping] = _with_function(spec, pci_address(gpu.path).partition(".")[0])
    taken = {item.path.partition(".")[0] for item in facts.mappings.values() if item.path is not None}
    taken |= {path.partition(".")[0] for path in targets.values()}
    taken |= {use.device.partition(".")[0] for use in facts.uses if not use.device.startswith("mapping=")}
    free = sorted(
        {item.slot for item in facts.pci if item.device_id in spec.gpu_ids and item.is_display} - taken
    )
    for gpu, slot in zip([gpu for gpu in missing if gpu.path is None], free, strict=False):
        targets[gpu.mapping] = _with_function(spec, slot)
    return targets


def _known_path(facts: Facts, name: str) -> str | None:
    mapped = facts.mappings.get(name)
    return None if mapped is None else mapped.path


def _with_function(spec: VmSpec, slot: str) -> str:
    return slot if spec.gpu_function == "all" else f"{slot}.0"


def _mapping_step(spec: VmSpec, name: str, path: str, device: Pci) -> Step:
    entry = {
        "node": spec.node,
        "path": path,
        "id": device.device_id,
        "subsystem-id": device.subsystem_id,
        "iommugroup": str(device.iommu_group),
    }
    text = ",".join(f"{key}={value}" for key, value in entry.items() if value is not None)
    return Step(
        "POST", "/cluster/mapping/pci", {"id": name, "map": [text], "description": owner_line(spec.owner_id)}
    )


def _mapping_steps(spec: VmSpec, facts: Facts, targets: dict[str, str], plan: Plan) -> None:
    for gpu in spec.gpus:
        mapped, path = facts.mappings.get(gpu.mapping), targets.get(gpu.mapping)
        if mapped is not None and mapped.path is not None and gpu.path is not None:
            wanted = pci_address(gpu.path).partition(".")[0]
            if mapped.path.partition(".")[0] != wanted:
                plan.findings.append(
                    Finding(
                        "mappings",
                        f"{gpu.mapping} to mean {wanted}",
                        mapped.path,
                        "correct the mapping or path",
                    )
                )
        if mapped is not None or path is None:
            continue
        device = next((item for item in facts.pci if path in (item.address, item.slot)), None)
        if device is not None:
            plan.steps.append(_mapping_step(spec, gpu.mapping, path, device))
            plan.after[f"mapping {gpu.mapping}"] = path


def _image_step(spec: VmSpec, facts: Facts, plan: Plan) -> None:
    if spec.image_volid is None or spec.image_url is None or spec.image_volid in facts.images:
        return
    storage, _, volume = spec.image_volid.partition(":")
    params: dict[str, str | int | list[str]] = {
        "content": "import",
        "filename": volume.rpartition("/")[2],
        "url": spec.image_url,
    }
    if spec.image_checksum is not None:
        algorithm, _, digest = spec.image_checksum.partition(":")
        params.update({"checksum-algorithm": algorithm, "checksum": digest})
    path = f"/nodes/{spec.node}/storage/{storage}/download-url"
    plan.steps.append(Step("POST", path, params, wait_seconds=spec.task_timeout_seconds))
    plan.after[f"image {spec.image_volid}"] = f"downloaded from {spec.image_url}"


def _config_steps(spec: VmSpec, facts: Facts, changes: Changes, plan: Plan) -> None:
    base = f"/nodes/{spec.node}/qemu"
    if spec.root_path == "ssh":
        plan.root_set = {key: changes.set.pop(key) for key in sorted(ROOT_ONLY & changes.set.keys())}
        plan.root_delete = sorted(ROOT_ONLY & set(changes.delete))
        changes.delete = [key for key in changes.delete if key not in ROOT_ONLY]
    if facts.vm is None:
        plan.steps.append(
            Step("POST", base, {"vmid": spec.vmid, **changes.set}, wait_seconds=spec.task_timeout_seconds)
        )
        plan.first = []
        return
    if changes.keys:
        params: dict[str, str | int | list[str]] = dict(changes.set)
        if changes.delete:
            params["delete"] = ",".join(changes.delete)
        params["digest"] = str(facts.vm.config.get("digest", ""))
        plan.steps.append(Step("PUT", f"{base}/{spec.vmid}/config", params))
        plan.first = []
    if changes.grow_gib is not None:
        resize: dict[str, str | int | list[str]] = {"disk": "scsi0", "size": f"{changes.grow_gib}G"}
        path = f"{base}/{spec.vmid}/resize"
        plan.steps.append(Step("PUT", path, resize, wait_seconds=spec.task_timeout_seconds))


def _power_steps(spec: VmSpec, facts: Facts, plan: Plan) -> None:
    base = f"/nodes/{spec.node}/qemu/{spec.vmid}/status"
    running = facts.vm is not None and facts.vm.running
    held = bool(plan.root_set or plan.root_delete)
    start_params: dict[str, str | int | list[str]] = {}
    if spec.start_timeout_seconds is not None:
        start_params["timeout"] = spec.start_timeout_seconds
    start = Step("POST", f"{base}/start", start_params, spec.start_seconds + START_MARGIN_SECONDS)
    if spec.state == "started" and not running and not held:
        plan.steps.append(start)
        plan.before["status"], plan.after["status"] = "" if facts.vm is None else facts.vm.status, "running"
    elif spec.state == "started" and running and plan.restart_required and spec.allow_restart and not held:
        plan.steps += [_shutdown(spec), start]
        plan.before["status"], plan.after["status"] = "running", "running, restarted"
        plan.restart_required = False
    elif spec.state == "stopped" and running:
        plan.steps.append(_shutdown(spec))
        plan.before["status"], plan.after["status"] = "running", "stopped"
        plan.restart_required = False


def _shutdown(spec: VmSpec) -> Step:
    """A shutdown and a start, never a reboot: the reset of these GPUs is what must not be looped over."""
    seconds = spec.shutdown_timeout_seconds
    params: dict[str, str | int | list[str]] = {"timeout": seconds}
    if spec.force_stop:
        params["forceStop"] = 1
    path = f"/nodes/{spec.node}/qemu/{spec.vmid}/status/shutdown"
    return Step("POST", path, params, seconds + START_MARGIN_SECONDS)


def _write_privileges(spec: VmSpec, facts: Facts, plan: Plan) -> Iterator[tuple[str, str]]:
    vm = f"/vms/{spec.vmid}"
    for step in plan.steps:
        if step.path.startswith("/cluster/mapping/pci"):
            yield "/mapping/pci", "Mapping.Modify"
        elif step.path.endswith("/download-url"):
            yield f"/storage/{step.path.split('/')[4]}", "Datastore.AllocateTemplate"
            if not preflight.allowed(facts.permissions, "/", "Sys.Modify"):  # either will do
                yield f"/nodes/{spec.node}", "Sys.AccessNetwork"
        elif "/status/" in step.path:
            yield vm, "VM.PowerMgmt"
        elif step.method == "DELETE" or step.path.endswith("/qemu"):
            yield vm, "VM.Allocate"
        elif step.path.endswith("/resize"):
            yield vm, "VM.Config.Disk"
        keys = {*step.params, *str(step.params.get("delete", "")).split(",")} - {""}
        if step.path.endswith(("/qemu", "/config")):
            yield from _key_privileges(spec, step, keys - {"vmid", "digest", "delete"})


def _key_privileges(spec: VmSpec, step: Step, keys: set[str]) -> Iterator[tuple[str, str]]:
    for key in sorted(keys):
        yield f"/vms/{spec.vmid}", privilege_for(key)
        if key.startswith("hostpci") and key in step.params:
            name = re.search(r"mapping=([^,]+)", str(step.params[key]))
            if name is not None:
                yield f"/mapping/pci/{name[1]}", "Mapping.Use"
        # A bridge of another name may be a vnet, whose zone is not known here.
        if key == "net0" and re.fullmatch(r"vmbr\w+", spec.bridge):
            vlan = "" if spec.vlan is None else f"/{spec.vlan}"
            yield f"/sdn/zones/localnetwork/{spec.bridge}{vlan}", "SDN.Use"
        if key in {"efidisk0", "ide2", "scsi0"} and step.path.endswith("/qemu"):
            storage = {"efidisk0": spec.efi_storage, "ide2": spec.cloudinit_storage}.get(key, spec.storage)
            yield f"/storage/{storage}", "Datastore.AllocateSpace"


def _plan_present(spec: VmSpec, facts: Facts) -> Plan:
    plan = Plan()
    plan.findings += preflight.check_owner(spec, facts)
    if plan.findings:
        return plan  # whatever else is wrong with a VM that is not ours is not ours to say
    targets = _targets(spec, facts)
    creates = facts.vm is None
    running = facts.vm is not None and facts.vm.running
    plan.findings += preflight.check_place(
        spec, facts, starts=spec.state == "started" and not running, creates=creates
    )
    plan.findings += preflight.check_devices(spec, facts, targets)
    if facts.vm is not None:
        plan.findings += conflicts(spec, facts.vm.config, created=facts.created)
    if creates:
        _image_step(spec, facts, plan)
    _mapping_steps(spec, facts, targets, plan)
    changes = diff_config(spec, None if facts.vm is None else facts.vm.config)
    plan.findings += preflight.check_root(spec, facts, changes.keys)
    plan.before.update(changes.before)
    plan.after.update(changes.after)
    _config_steps(spec, facts, changes, plan)
    if facts.vm is not None and running:
        touched = {*changes.keys, *plan.root_set, *plan.root_delete, *facts.vm.pending}
        plan.restart_required = bool(touched - LIVE_KEYS)
        if plan.restart_required and spec.allow_restart and spec.state == "started":
            given_back_mib = int(re.sub(r"\D.*", "", str(facts.vm.config.get("memory", 0))) or 0)
            plan.findings += preflight.check_room(spec, facts, freed_mib=given_back_mib)
    if plan.first is not None:  # the power comes when the configuration is what it should be
        plan.first = list(plan.steps)
    _power_steps(spec, facts, plan)
    plan.findings += preflight.check_privileges(facts, _write_privileges(spec, facts, plan))
    return plan


def _plan_absent(spec: VmSpec, facts: Facts) -> Plan:
    plan = Plan()
    base = f"/nodes/{spec.node}/qemu/{spec.vmid}"
    plan.findings += preflight.check_owner(spec, facts)
    if plan.findings:
        return plan
    if facts.vm is not None:
        plan.findings += preflight.check_destroy(spec, facts)
        if facts.vm.running:
            plan.steps.append(_shutdown(spec))
        if not same("protection", "0", facts.vm.config.get("protection")):
            if facts.vm.running:  # a shutdown changes the digest, and may fail: protected until then
                plan.first = list(plan.steps)
            digest = str(facts.vm.config.get("digest", ""))
            plan.steps.append(Step("PUT", f"{base}/config", {"protection": 0, "digest": digest}))
        params: dict[str, str | int | list[str]] = {
            "purge": 1,
            "destroy-unreferenced-disks": int(spec.destroy_unreferenced),
        }
        plan.steps.append(Step("DELETE", base, params, wait_seconds=spec.task_timeout_seconds))
        plan.before["vm"], plan.after["vm"] = f"{spec.vmid} {spec.name}, {facts.vm.status}", "absent"
    if spec.manage_mappings:
        used = {use.device.removeprefix("mapping=") for use in facts.uses}
        for gpu in spec.gpus:
            mapped = facts.mappings.get(gpu.mapping)
            if mapped is None or mapped.description != owner_line(spec.owner_id):
                continue
            if gpu.mapping not in used and not mapped.other_nodes:
                plan.steps.append(Step("DELETE", f"/cluster/mapping/pci/{gpu.mapping}"))
                plan.before[f"mapping {gpu.mapping}"] = mapped.path or ""
                plan.after[f"mapping {gpu.mapping}"] = "absent"
    plan.findings += preflight.check_privileges(facts, _write_privileges(spec, facts, plan))
    return plan


def make_plan(spec: VmSpec, facts: Facts) -> Plan:
    """The whole plan; with findings of severity error it must not be carried out."""
    return _plan_present(spec, facts) if spec.wants_vm else _plan_absent(spec, facts)
