"""A second opinion: the module against fakepve, which others wrote, for flow, locks and faults.

fakepve is a program of its own here (AGPL-3.0) and spoken to over HTTPS only. It knows nothing of GPUs, mappings,
import and resize; those are the stub's.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pve_gpu_vm
import pytest
from pve_kit import certificate

__all__ = ["certificate"]

OURS = {"tags": "sglang-sm120", "description": "managed-by: sglang-sm120 owner=team"}
GUESTS = [
    {"vmid": 300, "name": "foreign", "config": {"memory": "2048"}},
    {"vmid": 301, "name": "locked", "lock": "backup", "config": OURS},
    {
        "vmid": 302,
        "name": "broken",
        "start_error": "no such disk",
        "config": {**OURS, "scsi0": "local-lvm:vm-302-disk-0"},
    },
    {
        "vmid": 303,
        "name": "deaf",
        "acpi": False,
        "status": "running",
        "config": {**OURS, "scsi0": "local-lvm:vm-303-disk-0"},
    },
]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[int]:
    """A running fakepve; its port."""
    guests = tmp_path_factory.mktemp("fakepve") / "guests.json"
    guests.write_text(json.dumps({"guests": GUESTS}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "fakepve", str(guests), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--time-scale", "0.02", "--cert", str(certificate[0]), "--key", str(certificate[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "listening" in process.stdout.readline()
            yield port
        finally:
            process.terminate()


@pytest.fixture
def call(
    fake: int, certificate: tuple[Path, Path], run_module: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    """Run the module by password ticket."""

    def run(*, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {
            "api_host": "127.0.0.1",
            "api_port": fake,
            "api_user": "root@pam",
            "api_password": "secret",
            "ca_path": str(certificate[0]),
            "node": "pve1",
            "vmid": 200,
            "name": "llm1",
            "owner_id": "team",
            "cores": 4,
            "memory_mib": 4096,
            "storage": "local-lvm",
            "disk_gib": 32,
            "protection": False,
            **args,
        }
        answer = dict(run_module(pve_gpu_vm.main, check=check, diff=True, **given)[1])
        print(answer.get("msg"), file=sys.stderr)  # shown when a test fails
        return answer

    return run


def test_life_of_a_vm(call: Callable[..., dict[str, Any]]) -> None:
    assert call(state="present", check=True)["writes"] == 0
    assert call(state="present")["changed"] is True
    made = call()
    assert (made.get("msg"), made["changed"], made["vm"]["status"]) == (None, True, "running")
    again = call()
    assert (again["changed"], again["writes"], again["restart_required"]) == (False, 0, False)
    changed = call(memory_mib=8192, affinity="0-3", root_path="password")
    assert (changed["changed"], changed["restart_required"]) == (True, True)
    assert {"affinity", "memory"} <= set(changed["vm"]["pending"])
    restarted = call(memory_mib=8192, affinity="0-3", root_path="password", allow_restart=True)
    assert (restarted["restart_required"], restarted["vm"]["pending"]) == (False, [])
    assert call(memory_mib=8192, affinity="0-3", root_path="password")["writes"] == 0
    assert call(state="absent", confirm_destroy="other")["failed"] is True
    gone = call(state="absent", confirm_destroy="llm1")
    assert (gone["changed"], gone["vm"]["status"]) == (True, "absent")
    assert call(state="absent", confirm_destroy="llm1")["writes"] == 0


def test_foreign_and_locked_vms(call: Callable[..., dict[str, Any]]) -> None:
    for vmid, name, subject in ((300, "foreign", "owner"), (301, "locked", "lock")):
        answer = call(vmid=vmid, name=name)
        assert [item["subject"] for item in answer["findings"]] == [subject]
        assert answer["writes"] == 0


def test_start_that_fails(call: Callable[..., dict[str, Any]]) -> None:
    answer = call(vmid=302, name="broken", disk_gib=1, storage="local-lvm")
    assert answer["failed"] is True
    assert "no such disk" in answer["msg"]


def test_guest_that_ignores_a_shutdown(call: Callable[..., dict[str, Any]]) -> None:
    begun = time.monotonic()
    answer = call(vmid=303, name="deaf", state="stopped", shutdown_timeout_seconds=5)
    assert answer["failed"] is True
    assert time.monotonic() - begun < 60
    forced = call(vmid=303, name="deaf", state="stopped", shutdown_timeout_seconds=5, force_stop=True)
    assert (forced.get("msg"), forced["vm"]["status"]) == (None, "stopped")
