"""Failures in mid-work: one clear error, and the next run converges without a second disk."""

from __future__ import annotations

import pytest
from ansible.module_utils.sm120 import pve_apply, pve_client
from pve_kit import Vm, certificate, stub, vm
from pve_stub import Fault

__all__ = ["certificate", "stub", "vm"]

TASK = "/nodes/pve1/tasks/.*/status"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pve_client, "LOST_CONNECTION_SECONDS", 0.5)
    monkeypatch.setattr(pve_client, "POLL_MOST_SECONDS", 0.2)


def failed(vm: Vm, **args: object) -> str:
    answer = vm(**args)
    assert answer.get("failed") is True
    return str(answer["msg"])


def converges(vm: Vm) -> None:
    """The next run ends with a running VM of three volumes, the one after it writes nothing."""
    vm.ok()
    state = vm.stub.state
    assert state.vms[200].status == "running"
    assert len(state.volumes) == 3
    assert not any(key.startswith("unused") for key in state.vms[200].config)
    assert vm.ok()["writes_seen"] == []


def test_task_that_fails_tells_its_exit_status_and_log(vm: Vm) -> None:
    vm.stub.state.task_faults["qmcreate"] = "unable to create image: out of space"
    message = failed(vm)
    assert "unable to create image: out of space" in message
    assert "TASK ERROR" in message
    converges(vm)


def test_start_that_fails_leaves_the_vm_made(vm: Vm) -> None:
    vm.stub.state.task_faults["qmstart"] = "got timeout"
    assert "got timeout" in failed(vm)
    converges(vm)


def test_resize_that_fails_is_made_good(vm: Vm) -> None:
    vm.stub.state.task_faults["resize"] = "zfs error: cannot set property"
    failed(vm)
    converges(vm)
    assert "size=200G" in vm.stub.state.vms[200].config["scsi0"]


def test_lock_that_stays(vm: Vm) -> None:
    vm.stub.state.task_faults["qmcreate"] = "killed"
    failed(vm)
    assert vm.stub.state.vms[200].config == {"lock": "create"}
    answer = vm.refused("lock")
    assert "qm unlock 200" in answer["msg"]
    del vm.stub.state.vms[200]  # qm unlock; qm destroy
    converges(vm)


def test_lock_of_a_backup(vm: Vm) -> None:
    vm.ok()
    vm.stub.state.vms[200].config["lock"] = "backup"
    upid = vm.stub.state.task("vzdump", 200, "root@pam", lambda: None)
    answer = vm.refused("lock", memory_mib=262144)
    assert f"vzdump {upid}" in answer["findings"][0]["found"]
    assert answer["findings"][0]["fix"].startswith("wait until the backup is done")
    vm.stub.state.vms[200].config["lock"] = "suspended"
    assert vm.refused("lock")["findings"][0]["fix"].startswith("qm resume 200")
    del vm.stub.state.vms[200].config["lock"]
    assert vm.ok(memory_mib=262144)["changed"] is True


def test_short_loss_of_connection_is_ridden_out(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pve_client, "LOST_CONNECTION_SECONDS", 30)
    vm.stub.faults += [
        Fault("GET", TASK, times=2),
        Fault("GET", TASK, status=596, message="timeout", times=1),
    ]
    assert vm.ok()["vm"]["status"] == "running"


def test_connection_lost_in_mid_task_is_picked_up_by_the_next_run(vm: Vm) -> None:
    vm.stub.state.task_polls = 3
    lost = Fault("GET", TASK, times=10_000)
    vm.stub.faults.append(lost)
    message = failed(vm)
    assert "UPID:pve1:" in message
    assert vm.stub.state.vms[200].config == {"lock": "create"}
    lost.times = 0
    converges(vm)
    creations = [task for task in vm.stub.state.tasks.values() if task.kind == "qmcreate"]
    assert len(creations) == 1


def test_answer_to_the_creation_lost(vm: Vm) -> None:
    """The node does the work, we never learn of it: the next run finds it and does not do it twice."""
    vm.stub.faults.append(Fault("POST", "/nodes/pve1/qemu", after=True))
    failed(vm)
    converges(vm)
    assert sum(1 for task in vm.stub.state.tasks.values() if task.kind == "qmcreate") == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/nodes/pve1/qemu"),
        ("PUT", "/nodes/pve1/qemu/200/resize"),
        ("POST", "/nodes/pve1/qemu/200/status/start"),
        ("GET", "/cluster/resources"),
        ("GET", "/nodes/pve1/hardware/pci"),
    ],
)
def test_500_from_the_api(vm: Vm, method: str, path: str) -> None:
    vm.stub.faults.append(Fault(method, path, status=500, message="cfs-lock 'file-replication_cfg' error"))
    message = failed(vm)
    assert f"{method} {path}" in message
    assert "cfs-lock" in message
    converges(vm)


def test_writes_are_never_repeated(vm: Vm) -> None:
    vm.stub.faults.append(Fault("POST", "/nodes/pve1/qemu", times=5))
    failed(vm)
    assert vm.stub.faults[0].times == 4


def test_changed_meanwhile_by_someone_else(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    vm.ok(state="present")
    original = vm.stub.state.vms[200].digest
    monkeypatch.setattr(vm.stub.state.vms[200], "digest", iter(["0" * 40, original()]).__next__)
    assert "modified configuration" in failed(vm, state="present", cores=32)
    assert vm.stub.state.vms[200].config["cores"] == "64"


def test_open_console_is_not_waited_for(vm: Vm) -> None:
    vm.ok(state="present")
    vm.stub.state.task_polls = 10_000
    upid = vm.stub.state.task("vncproxy", 200, "ansible@pve!gpu", lambda: None)
    assert vm.ok(state="present", task_timeout_seconds=0)["writes_seen"] == []
    assert vm.stub.state.tasks[upid].polls == 10_000


def test_protection_stays_until_the_vm_is_down(vm: Vm) -> None:
    vm.ok()
    gone = {"state": "absent", "confirm_destroy": "llm1"}
    vm.stub.state.task_faults["qmshutdown"] = "VM quit/powerdown failed - got timeout"
    assert "got timeout" in failed(vm, **gone)
    assert vm.stub.state.vms[200].config["protection"] == "1"
    vm.ok(memory_mib=262144)  # pending: the shutdown applies it, which changes the digest
    vm.ok(**gone)
    put, delete = vm.stub.writes[1:]
    assert (put[0], sorted(put[2]), delete[0]) == ("PUT", ["digest", "protection"], "DELETE")
    assert vm.stub.state.vms == {}


DHCP = {"ipconfig": "ip=dhcp", "address_timeout_seconds": 1}


def test_address_by_the_guest_agent(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pve_apply, "ADDRESS_POLL_SECONDS", 0.1)
    assert vm.ok(**DHCP)["vm"]["address"] is None
    vm.stub.state.vms[200].addresses = ["fe80::1", "192.0.2.77"]
    assert vm.ok(**DHCP)["vm"]["address"] == "192.0.2.77"


def test_address_that_may_not_be_asked_for(vm: Vm) -> None:
    """Before anything is made; and at once, when it comes to light only then."""
    granted = vm.stub.permissions["/"]
    vm.stub.permissions["/"] = {name: 1 for name in granted if not name.startswith("VM.GuestAgent")}
    assert "VM.GuestAgent.Audit on /vms/200" in vm.refused("privileges", **DHCP)["msg"]
    vm.stub.state.version = "8.4.1"
    assert "VM.Monitor on /vms/200" in vm.refused("privileges", **DHCP)["msg"]
    assert vm.ok(**{**DHCP, "address_timeout_seconds": 0})["vm"]["status"] == "running"
    vm.stub.permissions["/"] = granted | {"VM.Monitor": 1}
    path = "/nodes/pve1/qemu/200/agent/network-get-interfaces"
    vm.stub.faults.append(Fault("GET", path, status=403, message="Permission check failed", times=9))
    assert "Permission check failed" in failed(vm, **{**DHCP, "address_timeout_seconds": 300})
    assert vm.stub.faults[0].times == 8


def test_task_that_takes_too_long(vm: Vm) -> None:
    vm.stub.state.task_polls = 10_000
    assert "still runs after" in failed(vm, task_timeout_seconds=0)
