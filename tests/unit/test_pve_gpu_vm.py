"""pve_gpu_vm against the stub: create, leave alone, change, restart, destroy."""

from __future__ import annotations

from typing import Any

import pytest
from pve_kit import SSH_KEY, Vm, certificate, stub, vm

__all__ = ["certificate", "stub", "vm"]

CONFIG = "/nodes/pve1/qemu/200/config"


def test_creates_an_8_gpu_vm_by_token_with_mappings_from_nothing(vm: Vm) -> None:
    vm.stub.state.mappings.clear()
    vm.stub.permissions["/mapping/pci"] = {**vm.stub.permissions["/"], "Mapping.Modify": 1}

    answer = vm.ok(manage_mappings=True)

    assert answer["changed"] is True
    assert answer["created"] is True
    assert answer["vm"] == {
        "vmid": 200,
        "name": "llm1",
        "node": "pve1",
        "status": "running",
        "pending": [],
        "address": "192.0.2.10",
    }
    assert answer["writes_seen"] == [
        *[("POST", "/cluster/mapping/pci")] * 8,
        ("POST", "/nodes/pve1/qemu"),
        ("PUT", "/nodes/pve1/qemu/200/resize"),
        ("POST", "/nodes/pve1/qemu/200/status/start"),
    ]
    config = vm.stub.state.vms[200].config
    assert [config[f"hostpci{index}"] for index in range(8)] == [
        f"mapping=gpu{index},pcie=1" for index in range(8)
    ]
    assert vm.stub.state.mappings["gpu7"]["map"] == [
        "node=pve1,path=0000:81:00.0,id=10de:2bb5,subsystem-id=10de:204e,iommugroup=27"
    ]
    assert "size=200G" in config["scsi0"]
    assert vm.stub.state.keys_of(200) == [SSH_KEY]
    assert len(vm.stub.state.volumes) == 3


def test_second_run_writes_nothing(vm: Vm) -> None:
    vm.ok()
    answer = vm.ok()
    assert (answer["changed"], answer["created"], answer["writes_seen"]) == (False, False, [])
    assert answer["diff"] == {"before": {}, "after": {}}


def test_create_and_no_op_make_few_requests(vm: Vm) -> None:
    """What decides the time of a run, counted instead of measured."""
    assert len(vm.ok()["requests"]) <= 45
    assert len(vm.ok()["requests"]) <= 15


def test_check_mode_before_creation_writes_nothing_and_shows_everything(vm: Vm) -> None:
    vm.stub.state.mappings.clear()
    vm.stub.permissions["/mapping/pci"] = {**vm.stub.permissions["/"], "Mapping.Modify": 1}
    answer = vm.ok(check=True, manage_mappings=True)
    assert (answer["changed"], answer["writes_seen"]) == (True, [])
    assert vm.stub.state.vms == {}
    after = answer["diff"]["after"]
    wanted = {"name", "memory", "cores", "cpu", "net0", "scsi0", "efidisk0", "ide2", "status", "scsi0 size"}
    assert wanted | {f"hostpci{i}" for i in range(8)} | {f"mapping gpu{i}" for i in range(8)} <= after.keys()
    assert answer["diff"]["before"] == {"status": ""}


DRIFT: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("memory", {"memory": "262144"}, {"memory": "524288"}),
    ("cores", {"cores": "32"}, {"cores": "64"}),
    ("cpu", {"cpu": "host"}, {"cpu": "host,phys-bits=host"}),
    ("tags", {"tags": "other;sglang-sm120"}, {"tags": "sglang-sm120"}),
    (
        "hostpci swapped",
        {"hostpci2": "mapping=gpu5,pcie=1", "hostpci5": "mapping=gpu2,pcie=1"},
        {"hostpci2": "mapping=gpu2,pcie=1", "hostpci5": "mapping=gpu5,pcie=1"},
    ),
    (
        "description",
        {"description": "managed-by: sglang-sm120 owner=team\nmine"},
        {"description": "managed-by: sglang-sm120 owner=team"},
    ),
    ("ipconfig", {"ipconfig0": "ip=dhcp"}, {"ipconfig0": "ip=192.0.2.10/24,gw=192.0.2.1"}),
    ("one GPU too many", {"hostpci8": "mapping=gpu8,pcie=1"}, {"delete": "hostpci8"}),
    ("protection", {"protection": "0"}, {"protection": "1"}),
]


@pytest.mark.parametrize(("drift", "written"), [item[1:] for item in DRIFT], ids=[item[0] for item in DRIFT])
def test_drift_writes_exactly_the_keys_that_differ(
    vm: Vm, drift: dict[str, str], written: dict[str, str]
) -> None:
    vm.ok(state="present")
    vm.stub.state.vms[200].config.update(drift)
    before = dict(vm.stub.state.volumes)

    planned = vm.ok(state="present", check=True)
    assert planned["writes_seen"] == []
    answer = vm.ok(state="present")

    assert answer["writes_seen"] == [("PUT", CONFIG)]
    assert vm.put() == written
    assert planned["diff"] == answer["diff"]
    assert vm.stub.state.volumes == before
    assert vm.ok(state="present")["writes_seen"] == []


def test_disk_grows(vm: Vm) -> None:
    vm.ok(state="present")
    answer = vm.ok(state="present", disk_gib=300)
    assert answer["writes_seen"] == [("PUT", "/nodes/pve1/qemu/200/resize")]
    assert "size=300G" in vm.stub.state.vms[200].config["scsi0"]
    assert vm.ok(state="present", disk_gib=300)["writes_seen"] == []


def test_changed_bridge_keeps_the_mac_and_what_was_set_by_hand(vm: Vm) -> None:
    vm.ok(state="present")
    config = vm.stub.state.vms[200].config
    mac = config["net0"].partition(",")[0]
    config["net0"] += ",queues=8"
    assert vm.ok(state="present")["writes_seen"] == []
    vm.ok(state="present", bridge="vmbr7", vlan=12)
    parts = set(vm.put()["net0"].split(","))
    assert parts == {mac, "bridge=vmbr7", "tag=12", "queues=8"}


def test_disk_options_are_mended_on_the_same_volume(vm: Vm) -> None:
    vm.ok(state="present")
    config = vm.stub.state.vms[200].config
    volume = config["scsi0"].partition(",")[0]
    config["scsi0"] = f"{volume},cache=none,size=200G"
    vm.ok(state="present")
    assert set(vm.put()["scsi0"].split(",")) == {
        volume,
        "cache=none",
        "discard=on",
        "iothread=1",
        "ssd=1",
        "size=200G",
    }
    assert len(vm.stub.state.volumes) == 3
    assert not any(key.startswith("unused") for key in config)


@pytest.mark.parametrize(
    "spelling",
    [
        {"hostpci0": "pcie=on,mapping=gpu0"},
        {"hostpci0": "mapping=gpu0,pcie=1,rombar=1,x-vga=0"},
        {"cpu": "phys-bits=host,cputype=host"},
        {"tags": "SGLang-SM120"},
        {"memory": "current=524288"},
        {"agent": "enabled=1,fstrim_cloned_disks=0"},
        {"ipconfig0": "gw=192.0.2.1,ip=192.0.2.10/24"},
        {"sshkeys": "ssh-ed25519%20AAAAC3NzaC1lZDI1NTE5AAAAIJ%2Bmade%2Fup%20ops%40example.com%0A"},
        {"sshkeys": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ+made/up ops@example.com\n"},
        {"description": "managed-by: sglang-sm120 owner=team\n"},
        {"machine": "pc-q35-9.2"},
        {"machine": "type=pc-q35-9.2"},
        {"machine": "q35,viommu=intel"},
    ],
    ids=lambda spelling: str(next(iter(spelling.items()))),
)
def test_other_spellings_are_no_change(vm: Vm, spelling: dict[str, str]) -> None:
    vm.ok(state="present")
    vm.stub.state.vms[200].config.update(spelling)
    answer = vm.ok(state="present")
    assert (answer["changed"], answer["writes_seen"]) == (False, [])


def test_pending_change_on_a_running_vm_is_reported_and_not_forced(vm: Vm) -> None:
    vm.ok()
    planned = vm.ok(memory_mib=262144, check=True)
    answer = vm.ok(memory_mib=262144)
    assert planned["restart_required"] is True
    assert (answer["restart_required"], answer["vm"]["pending"]) == (True, ["memory"])
    assert answer["writes_seen"] == [("PUT", CONFIG)]
    again = vm.ok(memory_mib=262144)
    assert (again["changed"], again["restart_required"], again["writes_seen"]) == (False, True, [])
    assert vm.stub.state.vms[200].config["memory"] == "524288"


def test_restart_when_allowed_is_a_shutdown_and_a_start(vm: Vm) -> None:
    vm.ok()
    answer = vm.ok(memory_mib=262144, allow_restart=True)
    base = "/nodes/pve1/qemu/200/status"
    assert answer["writes_seen"] == [("PUT", CONFIG), ("POST", f"{base}/shutdown"), ("POST", f"{base}/start")]
    assert (answer["restart_required"], answer["vm"]["pending"]) == (False, [])
    assert vm.stub.state.vms[200].config["memory"] == "262144"
    assert vm.ok(memory_mib=262144, allow_restart=True)["writes_seen"] == []


def test_live_change_needs_no_restart(vm: Vm) -> None:
    vm.ok()
    key = {"sshkeys": [SSH_KEY, "ssh-ed25519 AAAA more"]}
    assert [vm.ok(check=check, **key)["restart_required"] for check in (True, False)] == [False, False]
    answer = vm.ok(tags=["blackwell"], allow_restart=True, **key)
    assert answer["writes_seen"] == [("PUT", CONFIG)]
    assert answer["restart_required"] is False


def test_stopped_shuts_down_once(vm: Vm) -> None:
    vm.ok()
    assert vm.ok(state="stopped")["writes_seen"] == [("POST", "/nodes/pve1/qemu/200/status/shutdown")]
    assert vm.ok(state="stopped")["writes_seen"] == []


def test_absent_destroys_ours_with_its_mappings_and_is_then_content(vm: Vm) -> None:
    vm.stub.state.mappings.clear()
    vm.stub.permissions["/mapping/pci"] = {**vm.stub.permissions["/"], "Mapping.Modify": 1}
    vm.ok(manage_mappings=True)
    gone = {"state": "absent", "manage_mappings": True, "confirm_destroy": "llm1"}
    assert vm.ok(check=True, **gone)["writes_seen"] == []
    answer = vm.ok(**gone)
    assert answer["writes_seen"] == [
        ("POST", "/nodes/pve1/qemu/200/status/shutdown"),
        ("PUT", CONFIG),
        ("DELETE", "/nodes/pve1/qemu/200"),
        *[("DELETE", f"/cluster/mapping/pci/gpu{index}") for index in range(8)],
    ]
    state = vm.stub.state
    assert (state.vms, state.volumes, state.mappings, answer["vm"]["status"]) == ({}, {}, {}, "absent")
    again = vm.ok(**gone)
    assert (again["changed"], again["writes_seen"]) == (False, [])


def test_absent_leaves_mappings_that_others_made(vm: Vm) -> None:
    vm.ok()
    vm.stub.permissions["/mapping/pci"] = {**vm.stub.permissions["/"], "Mapping.Modify": 1}
    vm.ok(state="absent", manage_mappings=True, confirm_destroy="llm1")
    assert len(vm.stub.state.mappings) == 8


def test_image_is_downloaded_once_with_its_checksum(vm: Vm) -> None:
    args = {
        "image_volid": "local:import/new.qcow2",
        "image_url": "https://example.com/new.img",
        "image_checksum": "sha256:" + "a" * 64,
        "state": "present",
    }
    vm.stub.permissions["/nodes/pve1"] = {**vm.stub.permissions["/"], "Sys.AccessNetwork": 1}
    planned = vm.ok(check=True, **args)
    assert (
        planned["diff"]["after"]["image local:import/new.qcow2"]
        == "downloaded from https://example.com/new.img"
    )
    assert vm.ok(**args)["writes_seen"][0] == ("POST", "/nodes/pve1/storage/local/download-url")
    assert vm.stub.writes[0][2] == {
        "content": "import",
        "filename": "new.qcow2",
        "url": "https://example.com/new.img",
        "checksum-algorithm": "sha256",
        "checksum": "a" * 64,
    }
    assert vm.ok(**args)["writes_seen"] == []
