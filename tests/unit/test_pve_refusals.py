"""What pve_gpu_vm refuses, each time before the first write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pve_kit import PASSWORD, SECRET, Vm, certificate, stub, vm
from pve_state import PRIVILEGES, Machine, gpu
from pve_stub import Stub, make_certificate

__all__ = ["certificate", "stub", "vm"]

ROOT = {"api_user": "root@pam", "api_token_id": None, "api_token_secret": None, "api_password": PASSWORD}


def other(vm: Vm, vmid: int, **config: str) -> None:
    """A VM that is not ours."""
    vm.stub.state.vms[vmid] = Machine({"name": f"vm{vmid}", **config}, status="running")


def test_foreign_vmid(vm: Vm) -> None:
    other(vm, 200)
    vm.refused("owner")
    vm.refused("owner", state="absent", confirm_destroy="llm1")


def test_vmid_taken_by_a_container_of_another_node(vm: Vm) -> None:
    vm.stub.state.others.append(
        {"type": "lxc", "vmid": 200, "node": "pve2", "name": "dns", "status": "running"}
    )
    vm.refused("vmid")


def test_name_taken(vm: Vm) -> None:
    other(vm, 300, name="llm1")
    vm.refused("name")


@pytest.mark.parametrize(
    "lost", [{"tags": "blackwell"}, {"description": "managed-by: sglang-sm120 owner=else"}]
)
def test_missing_owner_tag_or_line(vm: Vm, lost: dict[str, str]) -> None:
    vm.ok(state="present")
    vm.stub.state.vms[200].config.update(lost)
    vm.refused("owner", state="present")
    vm.refused("owner", state="absent", confirm_destroy="llm1")


def test_vmid_of_another_host_of_ours(vm: Vm) -> None:
    """A VMID copied by mistake: same owner, another name."""
    vm.ok(state="present")
    before = dict(vm.stub.state.vms[200].config)
    assert "qm set 200 --name llm2" in vm.refused("name", name="llm2", ipconfig="ip=192.0.2.11/24")["msg"]
    assert vm.stub.state.vms[200].config == before


def test_template(vm: Vm) -> None:
    vm.ok(state="present")
    vm.stub.state.vms[200].config["template"] = "1"
    vm.refused("vmid", state="present")


NUMA = [{"cpus": "0-63", "memory_mib": 524288, "hostnodes": "0"}]
ROOT_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("hugepages", {"hugepages": "1024", "numa": True, "numa_nodes": NUMA}),
    ("affinity", {"affinity": "0-63"}),
    ("args", {"mmio64_mib": 4194304}),
    ("args", {"p2p_clique": 0}),
    ("args", {"extra_args": "-device pvpanic"}),
]


@pytest.mark.parametrize(("key", "options"), ROOT_OPTIONS)
def test_root_only_option_with_a_token_even_of_root(vm: Vm, key: str, options: dict[str, Any]) -> None:
    assert key in vm.refused("root-only options", **options)["msg"]
    vm.refused("root-only options", api_user="root@pam", api_token_id="automation", **options)
    vm.refused("root-only options", **options, **ROOT)  # root_path is still none


def test_root_only_options_by_password(vm: Vm) -> None:
    options = {"hugepages": "1024", "numa": True, "numa_nodes": NUMA, "affinity": "0-63", "p2p_clique": 3}
    vm.ok(root_path="password", **options, **ROOT)
    config = vm.stub.state.vms[200].config
    assert (config["hugepages"], config["affinity"]) == ("1024", "0-63")
    clique = [f"-set device.hostpci{index}.x-nv-gpudirect-clique=3" for index in range(8)]
    assert config["args"] == " ".join(clique)
    assert vm.ok(root_path="password", **options, **ROOT)["writes_seen"] == []
    assert PASSWORD not in str(vm.answers)


def test_root_only_options_by_ssh_are_handed_back_and_the_start_waits(vm: Vm) -> None:
    answer = vm.ok(affinity="0-63", root_path="ssh")
    assert answer["root_set"] == {"affinity": "0-63"}
    assert answer["vm"]["status"] == "stopped"
    vm.stub.state.vms[200].config["affinity"] = "0-63"  # qm set
    answer = vm.ok(affinity="0-63", root_path="ssh")
    assert (answer["root_set"], answer["vm"]["status"]) == ({}, "running")
    answer = vm.ok(root_path="ssh")
    assert (answer["root_delete"], answer["writes_seen"]) == (["affinity"], [])


def test_root_only_option_set_by_hand_is_not_dropped_silently(vm: Vm) -> None:
    vm.ok(state="present")
    vm.stub.state.vms[200].config["args"] = "-device pvpanic"
    vm.refused("root-only options", state="present")
    assert vm.ok(state="present", extra_args="-device pvpanic")["changed"] is False


@pytest.mark.parametrize(
    ("missing", "path"),
    [
        ("VM.Allocate", "/vms/200"),
        ("VM.Config.HWType", "/vms/200"),
        ("VM.PowerMgmt", "/vms/200"),
        ("Mapping.Use", "/mapping/pci/gpu3"),
        ("SDN.Use", "/sdn/zones/localnetwork/vmbr0"),
        ("Datastore.AllocateSpace", "/storage/local-zfs"),
        ("Sys.Audit", "/"),
    ],
)
def test_missing_privilege_is_named_with_its_path(vm: Vm, missing: str, path: str) -> None:
    kept = dict.fromkeys([name for name in PRIVILEGES if name != missing], 1)
    vm.stub.permissions.clear()
    vm.stub.permissions.update({"/": kept})
    assert f"{missing} on {path}" in vm.refused("privileges")["msg"]


def test_the_fix_of_a_missing_privilege_is_the_command(vm: Vm) -> None:
    vm.stub.permissions.clear()
    vm.stub.permissions["/"] = {name: 1 for name in PRIVILEGES if name not in ("Mapping.Use", "SDN.Use")}
    message = vm.refused("privileges")["msg"]
    assert "pveum role modify SglangSm120 --append --privs Mapping.Use,SDN.Use; pveum acl modify " in message
    assert "pveum acl modify /sdn/zones/localnetwork/vmbr0 --users ansible@pve --roles SglangSm120" in message
    assert "--tokens 'ansible@pve!gpu'" in message


def test_only_what_the_plan_needs_is_asked_for(vm: Vm) -> None:
    vm.ok()
    little = ["VM.Audit", "Datastore.Audit", "Mapping.Audit", "Sys.Audit"]
    vm.stub.permissions.clear()
    vm.stub.permissions.update({"/": dict.fromkeys(little, 1)})
    assert vm.ok()["changed"] is False
    vm.refused("privileges", memory_mib=262144)


def test_privilege_that_is_not_handed_down(vm: Vm) -> None:
    vm.stub.permissions["/vms"] = dict.fromkeys(PRIVILEGES, 0)
    vm.refused("privileges")


def test_unknown_mapping(vm: Vm) -> None:
    del vm.stub.state.mappings["gpu3"]
    vm.refused("mappings")


def test_mapping_that_no_longer_fits(vm: Vm) -> None:
    vm.stub.state.mappings["gpu3"]["map"] = ["node=pve1,path=0000:41:00.0,id=10de:2bb5,iommugroup=99"]
    assert "iommugroup" in vm.refused("mappings")["msg"]


def test_mapping_with_the_id_of_another_card(vm: Vm) -> None:
    entry = vm.stub.state.mappings["gpu3"]["map"][0]
    vm.stub.state.mappings["gpu3"]["map"] = [entry.replace("id=10de:2bb5", "id=10de:2bb1")]
    assert "'id' does not match" in vm.refused("mappings")["msg"]


def test_card_attached_raw_elsewhere_is_named_when_a_mapping_is_to_be_made(vm: Vm) -> None:
    vm.stub.state.mappings.clear()
    other(vm, 300, hostpci0="81:00")
    vm.stub.permissions["/mapping/pci"] = {**vm.stub.permissions["/"], "Mapping.Modify": 1}
    assert "0000:81:00 by VM 300" in vm.refused("mappings", manage_mappings=True)["msg"]


def test_mapping_to_something_else_than_a_gpu(vm: Vm) -> None:
    vm.stub.state.mappings["gpu3"]["map"] = ["node=pve1,path=0000:13:01.0,id=1022:14ab,iommugroup=23"]
    vm.refused("mappings")


def test_two_mappings_of_one_gpu(vm: Vm) -> None:
    vm.stub.state.mappings["gpu3"]["map"] = vm.stub.state.mappings["gpu2"]["map"]
    vm.refused("mappings")


@pytest.mark.parametrize(
    ("device", "others"), [("mapping=gpu4,pcie=1", 1), ("51:00,pcie=on", 1), ("0000:51:00.0", 1)]
)
def test_gpu_in_use_elsewhere(vm: Vm, device: str, others: int) -> None:
    other(vm, 300, hostpci0=device)
    answer = vm.refused("gpus")
    assert len(answer["findings"]) == others
    assert "VM 300" in answer["msg"]


def test_gpu_that_a_running_vm_gives_back_only_when_it_stops(vm: Vm) -> None:
    other(vm, 300, hostpci0="mapping=gpu4,pcie=1")
    vm.stub.state.vms[300].pending["hostpci0"] = None
    assert "VM 300" in vm.refused("gpus")["msg"]
    vm.stub.state.vms[300].pending["hostpci0"] = "mapping=gpu5,pcie=1"
    assert len(vm.refused("gpus")["findings"]) == 2


def test_vm_that_is_being_made_may_take_gpus(vm: Vm) -> None:
    """Its configuration shows none yet."""
    vm.stub.state.vms[300] = Machine({"lock": "create"})
    assert "VM 300" in vm.refused("gpus")["msg"]
    lock = vm.stub.state.vms.pop(300)
    vm.ok()
    vm.stub.state.vms[300] = lock
    assert vm.ok()["writes_seen"] == []  # ours has its own already


def test_fewer_gpus_than_wanted(vm: Vm) -> None:
    vm.stub.state.pci = [item for item in vm.stub.state.pci if item["id"] != "0000:81:00.0"]
    assert "7 (0000:11:00.0" in vm.refused("gpus", "mappings")["msg"]


def test_stranger_in_an_iommu_group(vm: Vm) -> None:
    nic = {
        "id": "0000:13:02.0",
        "class": "0x020000",
        "vendor": "0x15b3",
        "device": "0x101d",
        "iommugroup": 22,
    }
    vm.stub.state.pci.append(nic)
    assert "0000:13:02.0" in vm.refused("iommu")["msg"]
    assert vm.ok(accept_group_members=True)["changed"] is True


def test_second_function_and_second_gpu_in_the_group_are_no_strangers(vm: Vm) -> None:
    audio = {**gpu(0x31, 22), "id": "0000:31:00.1", "class": "0x040300", "device": "0x22e8"}
    vm.stub.state.pci.append(audio)
    assert vm.ok(state="present")["created"] is True


def test_iommu_off(vm: Vm) -> None:
    for item in vm.stub.state.pci:
        item["iommugroup"] = -1
    vm.stub.state.mappings.clear()
    vm.stub.permissions["/mapping/pci"] = {**vm.stub.permissions["/"], "Mapping.Modify": 1}
    assert len(vm.refused("iommu", manage_mappings=True)["findings"]) == 1


@pytest.mark.parametrize(
    "limit",
    [{"host_phys_bits": 40}, {"guest_phys_bits": 40}, {"cpu": "host,phys-bits=40"}, {"host_phys_bits": 43}],
)
def test_40_bit_guest_with_eight_bars_of_128_gib(vm: Vm, limit: dict[str, Any]) -> None:
    vm.refused("address space", **limit)


def test_named_cpu_model_shows_40_bits(vm: Vm) -> None:
    vm.refused("cpu", "address space", cpu="x86-64-v2-AES")


def test_46_bit_host_is_wide_enough(vm: Vm) -> None:
    assert vm.ok(host_phys_bits=46)["created"] is True


def test_window_larger_than_the_address_space_leaves(vm: Vm) -> None:
    vm.refused("address space", host_phys_bits=42, mmio64_mib=4_000_000, root_path="ssh")


def test_memory_of_the_node(vm: Vm) -> None:
    vm.refused("memory_mib", memory_mib=1_048_576)
    vm.stub.state.free_mib = 500_000
    vm.refused("memory_mib")
    assert vm.ok(state="present")["created"] is True


def test_memory_for_a_restart_counts_what_the_vm_gives_back(vm: Vm) -> None:
    vm.ok()
    vm.stub.state.free_mib = 100_000
    vm.refused("memory_mib", memory_mib=700_000, allow_restart=True)
    assert vm.stub.state.vms[200].status == "running"
    assert vm.ok(memory_mib=600_000, allow_restart=True)["vm"]["status"] == "running"


def test_cores_of_the_node(vm: Vm) -> None:
    vm.refused("cores", cores=129)


def test_storage_and_image(vm: Vm) -> None:
    vm.refused("storage", storage="ceph")
    vm.refused("storage", storage="local")  # holds no disks of VMs
    vm.refused("image_volid", image_volid="local:import/none.qcow2")
    vm.refused("image_volid", image_volid=None)  # an empty disk starts nothing


def test_storage_with_less_room_than_the_disk_may_be_thin(vm: Vm) -> None:
    vm.stub.state.avail_gib = 100
    answer = vm.ok(state="present", check=True)
    assert [(item["subject"], item["severity"]) for item in answer["findings"]] == [("disk_gib", "warning")]


def test_image_larger_than_the_disk(vm: Vm) -> None:
    """The listing tells the size of the file; what it unpacks to is known when the disk is there."""
    vm.stub.state.images["local:import/noble.qcow2"] = 50
    vm.refused("disk_gib", disk_gib=10)
    vm.stub.state.images["local:import/noble.qcow2"] = 30.5
    answer = vm.ok(disk_gib=10)
    assert (answer["created"], answer["vm"]["status"]) == (True, "running")
    assert [(item["severity"], item["fix"]) for item in answer["findings"]] == [
        ("warning", "set disk_gib to 31 or more")
    ]
    vm.refused("disk_gib", disk_gib=10)
    assert vm.ok(disk_gib=31)["vm"]["status"] == "running"


def test_wrong_confirm_string(vm: Vm) -> None:
    vm.ok()
    for text in ("", "yes", "LLM1", "llm2"):
        vm.refused("confirm_destroy", state="absent", confirm_destroy=text)


def test_wrong_name_or_node(vm: Vm) -> None:
    vm.ok()
    vm.refused("name", state="absent", name="llm2", confirm_destroy="llm2")
    vm.refused("node", state="absent", node="pve2", confirm_destroy="llm1")


def test_vm_that_someone_else_protected(vm: Vm) -> None:
    vm.ok(protection=False)
    vm.stub.state.vms[200].config["protection"] = "1"
    vm.refused("protection", state="absent", protection=False, confirm_destroy="llm1")
    vm.refused("confirm_destroy", state="absent")


def test_snapshots_hold_a_vm(vm: Vm) -> None:
    vm.ok(state="present")
    vm.stub.state.vms[200].snapshots.append("before-upgrade")
    vm.refused("snapshots", state="absent", confirm_destroy="llm1")
    vm.ok(state="absent", confirm_destroy="llm1", destroy_with_snapshots=True)
    assert vm.stub.state.vms == {}


def test_shrinking_disk(vm: Vm) -> None:
    vm.ok(state="present")
    vm.refused("disk_gib", state="present", disk_gib=100)


def test_disk_on_another_storage(vm: Vm) -> None:
    vm.ok(state="present")
    vm.stub.state.storages["ceph"] = "images"
    vm.refused("storage", state="present", storage="ceph", efi_storage="local-zfs")


def test_detached_boot_disk_is_not_replaced(vm: Vm) -> None:
    vm.ok(state="present")
    config = vm.stub.state.vms[200].config
    config["unused0"] = config.pop("scsi0").partition(",")[0]
    vm.refused("scsi0", state="present")


@pytest.mark.parametrize("place", ["virtio0", "sata1", "scsi4"])
def test_boot_disk_at_another_key_is_not_doubled(vm: Vm, place: str) -> None:
    vm.ok(state="present")
    config, volumes = vm.stub.state.vms[200].config, dict(vm.stub.state.volumes)
    config[place], config["boot"] = config.pop("scsi0"), f"order={place}"
    message = vm.refused("scsi0", state="present")["msg"]
    assert f"boot: order={place}, " in message
    assert f"{place}: {config[place]}" in message
    assert vm.stub.state.volumes == volumes
    del config[place]
    vm.refused("scsi0", state="present")


def test_cloud_init_drive_moved_to_another_key_counts(vm: Vm) -> None:
    vm.ok(state="present")
    config = vm.stub.state.vms[200].config
    config["ide0"] = config.pop("ide2")
    assert vm.ok(state="present")["writes_seen"] == []


def test_secure_boot_of_an_existing_vm(vm: Vm) -> None:
    vm.ok(state="present")
    vm.refused("secure_boot", state="present", secure_boot=True)


def test_old_version(vm: Vm) -> None:
    vm.stub.state.version = "7.4-17"
    vm.refused("version")


def test_bad_certificate(vm: Vm, tmp_path: Path) -> None:
    foreign, _ = make_certificate(tmp_path)
    answer = vm(ca_path=str(foreign))
    assert answer["failed"] is True
    assert vm.stub.requests == []


def test_fingerprint_pins_the_certificate(vm: Vm, certificate: tuple[Path, Path]) -> None:
    import hashlib
    import ssl

    text = certificate[0].read_text()
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest().upper()
    pretty = ":".join(digest[index : index + 2] for index in range(0, 64, 2))
    assert vm.ok(ca_path=None, fingerprint=pretty)["created"] is True
    wrong = pretty[:-2] + ("00" if pretty[-2:] != "00" else "01")
    assert vm(ca_path=None, fingerprint=wrong)["failed"] is True
    assert vm.stub.requests == []


def test_wrong_secret_is_named_by_its_token(vm: Vm) -> None:
    answer = vm(api_token_secret="22222222")
    assert answer["failed"] is True
    assert "ansible@pve!gpu" in answer["msg"]
    assert "22222222" not in str(answer)


def test_secret_by_file_and_by_environment(vm: Vm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    assert vm.ok(api_token_secret=None, api_token_secret_file=str(path))["created"] is True
    monkeypatch.setenv("PVE_API_TOKEN_SECRET", SECRET)
    assert vm.ok(api_token_secret=None)["changed"] is False
    monkeypatch.delenv("PVE_API_TOKEN_SECRET")
    answer = vm(api_token_secret=None)
    assert answer["failed"] is True
    assert vm.stub.requests == []


def test_stub_refuses_what_the_real_api_refuses(stub: Stub) -> None:
    """The rules above rest on the stub's, so those are checked too."""
    import pve_state

    caller = pve_state.Caller("ansible@pve!gpu", False, stub.permissions)
    root = pve_state.Caller("root@pam", True, stub.permissions)
    state = stub.state
    for values, status in [
        ({"hostpci0": "mapping=gpu0,pciee=1"}, 400),
        ({"hostpci0": "pcie=1"}, 400),
        ({"hostpci16": "mapping=gpu0"}, 400),
        ({"cpu": "hostt"}, 400),
        ({"numa0": "cpus=x"}, 400),
        ({"colour": "red"}, 400),
        ({"hostpci0": "0000:41:00"}, 500),
        ({"hugepages": "1024"}, 500),
        ({"delete": "args"}, 500),
        ({"hostpci0": "mapping=gpu0,romfile=x"}, 400),
        ({"startup": "order=1"}, 403),
        ({"ipconfig0": "ip=banana"}, 400),
        ({"ipconfig0": "ip=2001:db8::10/64"}, 400),
        ({"scsi0": "local-zfs:0,import-from=/root/noble.img"}, 500),
    ]:
        with pytest.raises(pve_state.ApiError) as refusal:
            state.check_keys(caller, values)
        assert refusal.value.status == status
    state.check_keys(root, {"hostpci0": "0000:41:00", "hugepages": "1024", "delete": "args"})
    state.vms[100] = Machine({"scsi0": "local-zfs:vm-100-disk-0,size=1G", "net0": "virtio=BC:24:11:00:00:99"})
    state.apply(100, {"scsi0": "local-zfs:2", "net0": "virtio,bridge=vmbr1"})
    assert state.vms[100].config["unused0"] == "local-zfs:vm-100-disk-0"
    assert "00:99" not in state.vms[100].config["net0"]
    state.apply(100, {"net0": "virtio,macaddr=BC:24:11:00:00:77,bridge=vmbr1"})
    assert state.vms[100].config["net0"] == "virtio=BC:24:11:00:00:77,bridge=vmbr1"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"machine": "pc"}, "q35 machine model is not enabled"),
        ({"cores": "999"}, "MAX 128 vcpus"),
        ({"hostpci0": "mapping=gone,pcie=1"}, "mapping not found"),
        ({"hostpci0": "mapping=gpu1,pcie=1"}, "already in use by VMID '300'"),
        ({"hostpci0": "21:00.0,pcie=1"}, "already in use by VMID '300'"),
    ],
)
def test_stub_starts_only_what_the_real_one_starts(stub: Stub, config: dict[str, str], message: str) -> None:
    import pve_state

    stub.state.vms[300] = Machine({"hostpci0": "mapping=gpu1"}, status="running")
    stub.state.vms[300].pending["hostpci0"] = None
    stub.state.vms[100] = Machine({"machine": "q35", "hostpci0": "mapping=gpu0,pcie=1", **config})
    with pytest.raises(pve_state.ApiError, match=message):
        stub.state.start(100)


def test_stub_asks_for_privileges_and_whole_mappings(vm: Vm) -> None:
    from ansible.module_utils.sm120.pve_client import Auth, Client, PveError, Tls
    from pve_stub import TOKEN

    vm.ok(state="present")
    client = Client(
        "127.0.0.1", vm.stub.port, Auth("ansible@pve", TOKEN, SECRET), Tls(ca_path=str(vm.certificate))
    )
    base, entry = "/nodes/pve1/qemu/200", "node=pve1,path=0000:11:00.0,id=10de:2bb5,subsystem-id=10de:204e"
    vm.stub.permissions["/"] = {"Mapping.Modify": 1}
    for method, path, params, status in (
        ("GET", f"{base}/config", {}, 403),
        ("PUT", f"{base}/config", {"cores": 4}, 403),
        ("PUT", f"{base}/resize", {"disk": "scsi0", "size": "300G"}, 403),
        ("DELETE", base, {}, 403),
        ("GET", f"{base}/agent/network-get-interfaces", {}, 403),
        ("POST", "/cluster/mapping/pci", {"id": "x", "map": [entry]}, 500),
        ("POST", "/cluster/mapping/pci", {"id": "x", "map": [entry.replace("2bb5", "2bb1")]}, 500),
        ("POST", "/cluster/mapping/pci", {"id": "x", "map": ["node=pve1"]}, 400),
        ("POST", "/cluster/mapping/pci", {"id": "x"}, 400),
    ):
        with pytest.raises(PveError) as refusal:
            client.request(method, path, params)
        assert (method, path, refusal.value.status) == (method, path, status)
