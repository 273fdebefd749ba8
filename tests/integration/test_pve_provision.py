"""playbooks/provision.yml as users run it, through ansible-runner: the API is the stub, the new VM a lab host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from pve_stub import SECRET, Stub, make_certificate  # noqa: E402

LAB = [sys.executable, str(ROOT / "tools/lab.py")]
LAB_HOST, LAB_PORT = "pve-vm", 22083
PLAYBOOK = """\
- name: Provide it
  ansible.builtin.import_playbook: {root}/playbooks/provision.yml
- name: Use it in the same run
  hosts: gpu_hosts
  gather_facts: false
  tasks:
    - name: Who is there
      ansible.builtin.command: id -un
      changed_when: false
      when: not ansible_check_mode
"""


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with Stub(*make_certificate(tmp_path)) as server:
        server.state.add_mappings()
        yield server


@pytest.fixture(scope="module")
def lab() -> Iterator[Path]:
    """A lab host that plays the new VM; the folder of its keys."""
    subprocess.run([*LAB, "up", LAB_HOST, "--port", str(LAB_PORT)], check=True)
    yield ROOT / ".cache/lab"
    subprocess.run([*LAB, "down", LAB_HOST], check=True)


class Run:
    """One controller: an inventory, and a known_hosts file of its own."""

    def __init__(self, folder: Path, stub: Stub, key: Path) -> None:
        self.folder, self.stub = folder, stub
        self.known_hosts = folder / "known_hosts"
        secret = folder / "token"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        self.variables: dict[str, Any] = {
            "ansible_port": LAB_PORT,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.known_hosts} -o ControlPath=none",
            "pve_gpu_vm_vmid": 200,
            "pve_gpu_vm_api_host": "127.0.0.1",
            "pve_gpu_vm_api_port": stub.port,
            "pve_gpu_vm_api_user": "ansible@pve",
            "pve_gpu_vm_api_token_id": "gpu",
            "pve_gpu_vm_api_token_secret_file": str(secret),
            "pve_gpu_vm_ca_path": str(folder / "cert.pem"),
            "pve_gpu_vm_node": "pve1",
            "pve_gpu_vm_owner_id": "team",
            "pve_gpu_vm_cores": 64,
            "pve_gpu_vm_memory_mib": 524288,
            "pve_gpu_vm_storage": "local-zfs",
            "pve_gpu_vm_image_volid": "local:import/noble.qcow2",
            "pve_gpu_vm_sshkeys": ["ssh-ed25519 AAAA ops"],
            "pve_gpu_vm_ipconfig": "ip=127.0.0.1/8",
            "pve_gpu_vm_ssh_timeout_seconds": 60,
        }
        (folder / "runner").mkdir()
        (folder / "play.yml").write_text(PLAYBOOK.format(root=ROOT))

    def __call__(self, *arguments: str, **changes: Any) -> ansible_runner.Runner:
        hosts = {"gpu_hosts": {"hosts": {"llm1": {**self.variables, **changes}}}}
        inventory = self.folder / "hosts.yml"
        inventory.write_text(yaml.safe_dump(hosts))
        inventory.chmod(0o600)
        self.stub.requests.clear()
        return ansible_runner.run(
            private_data_dir=str(self.folder / "runner"),
            project_dir=str(ROOT),
            playbook=str(self.folder / "play.yml"),
            inventory=str(inventory),
            cmdline=" ".join(["-vvv", "--diff", *arguments]),
            envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            quiet=True,
        )

    def artifacts(self) -> str:
        """Everything that the runs left behind."""
        files = [path for path in (self.folder / "runner").rglob("*") if path.is_file()]
        assert files
        return "\n".join(path.read_text(errors="replace") for path in files)


@pytest.fixture
def run(tmp_path: Path, stub: Stub, lab: Path) -> Run:
    return Run(tmp_path, stub, lab / "id_ed25519")


def changed(runner: ansible_runner.Runner) -> int:
    assert runner.status == "successful", runner.stdout.read()[-3000:]
    return sum(runner.stats["changed"].values())


def test_a_new_vm_is_made_reached_and_used_in_one_run(run: Run) -> None:
    assert changed(run("--check", "--limit", "llm1", "--tags", "provision")) == 1
    assert run.stub.writes == []

    first = run()
    assert changed(first) == 1
    assert len(run.stub.writes) == 3
    used = [event for event in first.events if event.get("event_data", {}).get("task") == "Who is there"]
    assert used[-1]["event_data"]["res"]["stdout"] == "root"
    assert len(run.known_hosts.read_text().splitlines()) >= 1

    second = run()
    assert changed(second) == 0
    assert run.stub.writes == []
    assert SECRET not in run.artifacts()


def test_the_secret_as_a_variable_stays_out_of_everything(run: Run) -> None:
    given = {"pve_gpu_vm_api_token_secret_file": None, "pve_gpu_vm_api_token_secret": SECRET}
    assert changed(run("--check", "--tags", "provision", **given)) == 1
    failing = run("--tags", "provision", pve_gpu_vm_vmid=99, **given)
    assert failing.status == "failed"
    assert SECRET not in run.artifacts()


def test_host_keys(run: Run, lab: Path) -> None:
    """Unknown: taken once, or not at all; changed: never."""
    slow = {"pve_gpu_vm_ssh_timeout_seconds": 8}
    assert run("--tags", "provision", pve_gpu_vm_host_keys="known", **slow).status == "failed"
    assert not run.known_hosts.exists()

    other = (lab / "id_ed25519.pub").read_text().split()[:2]
    run.known_hosts.write_text(f"[127.0.0.1]:{LAB_PORT} {' '.join(other)}\n")
    before = run.known_hosts.read_bytes()
    assert run("--tags", "provision", **slow).status == "failed"
    assert run.known_hosts.read_bytes() == before

    run.known_hosts.unlink()
    assert changed(run("--tags", "provision")) == 0
    assert changed(run("--tags", "provision", pve_gpu_vm_host_keys="known")) == 0


def test_root_only_options_without_the_node_in_the_inventory(run: Run) -> None:
    failing = run("--tags", "provision", pve_gpu_vm_root_path="ssh", pve_gpu_vm_affinity="0-63")
    assert failing.status == "failed"
    assert "affinity" not in json.dumps(run.stub.state.vms[200].config)
    assert run.stub.state.vms[200].status == "stopped"
