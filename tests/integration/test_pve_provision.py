"""playbooks/provision.yml as users run it, through ansible-runner: the API is the stub, the new VM a lab host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from pve_stub import PASSWORD, SECRET, Stub, make_certificate  # noqa: E402

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
    subprocess.run([*LAB, "down", LAB_HOST], check=True)
    try:
        subprocess.run([*LAB, "up", LAB_HOST, "--port", str(LAB_PORT)], check=True)
        yield ROOT / ".cache/lab"
    finally:
        subprocess.run([*LAB, "down", LAB_HOST], check=True)


@dataclass
class Result:
    """How a run ended."""

    code: int
    events: list[dict[str, Any]]

    def failures(self) -> list[Any]:
        return [event["event_data"]["res"] for event in self.events if event["event"] == "runner_on_failed"]


class Run:
    """One controller: an inventory, and a known_hosts file of its own."""

    def __init__(self, folder: Path, stub: Stub, key: Path) -> None:
        self.folder, self.stub, self.count = folder, stub, 0
        self.node: dict[str, Any] | None = None
        self.others: dict[str, dict[str, Any]] = {}
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
            "pve_gpu_vm_check_guest": False,  # the lab host has no GPUs
        }
        (folder / "runner").mkdir()
        (folder / "play.yml").write_text(PLAYBOOK.format(root=ROOT))

    def __call__(self, *arguments: str, playbook: str = "", **changes: Any) -> Result:
        others = {name: {**self.variables, **values} for name, values in self.others.items()}
        hosts = {"gpu_hosts": {"hosts": {"llm1": {**self.variables, **changes}, **others}}}
        if self.node is not None:
            hosts["proxmox"] = {"hosts": {"pve1": self.node}}
        inventory = self.folder / "hosts.yml"
        inventory.write_text(yaml.safe_dump(hosts))
        inventory.chmod(0o600)
        self.stub.requests.clear()
        self.count += 1
        # A process of its own: the stub's threads and the runner's forks do not mix.
        command = [sys.executable, "-m", "ansible_runner", "run", str(self.folder / "runner")]
        command += [
            f"--project-dir={ROOT}",
            f"--playbook={playbook or self.folder / 'play.yml'}",
            f"--inventory={inventory}",
        ]
        command += [f"--ident={self.count}", f"--cmdline={' '.join(['-vvv', '--diff', *arguments])}"]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        events = [
            json.loads(path.read_text())
            for path in (self.folder / "runner/artifacts" / str(self.count) / "job_events").glob("*.json")
            if not path.stem.endswith("-partial")
        ]
        assert events, done.stderr
        return Result(done.returncode, events)

    def artifacts(self) -> str:
        """Everything that the runs left behind."""
        files = [path for path in (self.folder / "runner").rglob("*") if path.is_file()]
        assert files
        return "\n".join(path.read_text(errors="replace") for path in files)


@pytest.fixture
def run(tmp_path: Path, stub: Stub, lab: Path) -> Run:
    return Run(tmp_path, stub, lab / "id_ed25519")


def changed(result: Result) -> int:
    assert result.code == 0, result.failures()
    stats = next(event["event_data"] for event in result.events if event["event"] == "playbook_on_stats")
    return sum(stats["changed"].values())


def test_a_new_vm_is_made_reached_and_used_in_one_run(run: Run) -> None:
    assert changed(run("--check", "--limit", "llm1", "--tags", "provision")) == 1
    assert run.stub.writes == []

    first = run()
    assert changed(first) == 1
    assert len(run.stub.writes) == 3
    answers = [event["event_data"] for event in first.events if event["event"] == "runner_on_ok"]
    assert [item["res"]["stdout"] for item in answers if item["task"] == "Who is there"] == ["root"]
    assert len(run.known_hosts.read_text().splitlines()) >= 1

    second = run()
    assert changed(second) == 0
    assert run.stub.writes == []
    assert SECRET not in run.artifacts()


def test_the_secret_as_a_variable_stays_out_of_everything(run: Run) -> None:
    given = {"pve_gpu_vm_api_token_secret_file": None, "pve_gpu_vm_api_token_secret": SECRET}
    assert changed(run("--check", "--tags", "provision", **given)) == 1
    failing = run("--tags", "provision", pve_gpu_vm_vmid=99, **given)
    assert failing.code == 2
    assert SECRET not in run.artifacts()


def test_host_keys(run: Run, lab: Path) -> None:
    """Unknown: taken once, or not at all; changed: never."""
    slow = {"pve_gpu_vm_ssh_timeout_seconds": 8}
    assert run("--tags", "provision", pve_gpu_vm_host_keys="known", **slow).code == 2
    assert not run.known_hosts.exists()

    other = (lab / "id_ed25519.pub").read_text().split()[:2]
    run.known_hosts.write_text(f"[127.0.0.1]:{LAB_PORT} {' '.join(other)}\n")
    before = run.known_hosts.read_bytes()
    assert run("--tags", "provision", **slow).code == 2
    assert run.known_hosts.read_bytes() == before

    run.known_hosts.unlink()
    assert changed(run("--tags", "provision")) == 0
    assert changed(run("--tags", "provision", pve_gpu_vm_host_keys="known")) == 0


def test_a_guest_without_its_gpus_is_not_handed_on(run: Run) -> None:
    failing = run(pve_gpu_vm_check_guest=True)
    assert failing.code == 2
    assert all(event.get("event_data", {}).get("task") != "Who is there" for event in failing.events)
    assert run.stub.state.vms[200].status == "running"


QM = """\
#!/usr/bin/python3
# A stand-in for qm on the node: does by root's ticket what "qm set" does, and writes its arguments down.
import json, ssl, sys, urllib.parse, urllib.request
def call(method, path, values, headers):
    data = urllib.parse.urlencode(values).encode()
    request = urllib.request.Request("https://127.0.0.1:{port}/api2/json" + path, data, headers, method=method)
    context = ssl._create_unverified_context()
    return json.load(urllib.request.urlopen(request, context=context))["data"]
assert sys.argv[1] == "set"
words = sys.argv[3:]
values = {{name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}}
login = call("POST", "/access/ticket", {{"username": "root@pam", "password": "{password}"}}, {{}})
cookie = {{"Cookie": "PVEAuthCookie=" + login["ticket"], "CSRFPreventionToken": login["CSRFPreventionToken"]}}
call("PUT", "/nodes/pve1/qemu/" + sys.argv[2] + "/config", values, cookie)
"""


@pytest.fixture
def node(run: Run, lab: Path) -> dict[str, Any]:
    """The lab host as the Proxmox node too: variables of the inventory host pve1."""
    script = QM.format(port=run.stub.port, password=PASSWORD)
    options = ["-o", f"UserKnownHostsFile={lab}/known_hosts", "-i", f"{lab}/id_ed25519", "-p", str(LAB_PORT)]
    install = "cat > /usr/local/sbin/qm && chmod 755 /usr/local/sbin/qm"
    subprocess.run(["ssh", *options, "root@127.0.0.1", install], input=script, text=True, check=True)
    return {name: value for name, value in run.variables.items() if name.startswith("ansible_")}


def test_root_only_options_by_ssh_on_the_node(run: Run, node: dict[str, Any]) -> None:
    options = {"pve_gpu_vm_root_path": "ssh", "pve_gpu_vm_affinity": "0-63", "pve_gpu_vm_mmio64_mib": 4194304}
    run.node = {**node, "ansible_host": "127.0.0.1", "ansible_ssh_common_args": "-o StrictHostKeyChecking=no"}
    assert changed(run("--tags", "provision", **options)) == 3  # made; qm set; started
    config = run.stub.state.vms[200].config
    assert config["affinity"] == "0-63"
    assert config["args"] == "-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=4194304"
    assert run.stub.state.vms[200].status == "running"
    assert changed(run("--tags", "provision", **options)) == 0
    assert run.stub.writes == []
    assert changed(run("--tags", "provision", pve_gpu_vm_root_path="ssh", pve_gpu_vm_affinity="0-63")) == 2
    assert run.stub.state.vms[200].merged().get("args") is None


def test_root_only_options_without_the_node_in_the_inventory(run: Run) -> None:
    failing = run("--tags", "provision", pve_gpu_vm_root_path="ssh", pve_gpu_vm_affinity="0-63")
    assert failing.code == 2
    assert (run.stub.writes, run.stub.state.vms) == ([], {})


def test_two_hosts_do_not_share_gpus_and_words_of_the_command_line_have_types(run: Run) -> None:
    address = {"pve_gpu_vm_ipconfig": "ip=127.0.0.2/8"}
    run.others = {"llm2": {"pve_gpu_vm_vmid": 201, "pve_gpu_vm_mapping_prefix": "other"}}
    refused = run("--tags", "provision")
    assert (refused.code, len(refused.failures()), run.stub.requests) == (2, 2, [])
    run.others = {"llm2": {"pve_gpu_vm_vmid": 201, **address}}
    refused = run("--tags", "provision")
    assert (refused.code, len(refused.failures()), run.stub.requests) == (2, 2, [])

    words = ["-e pve_gpu_vm_wait_for_ssh=false", "-e pve_gpu_vm_gpu_count=4"]
    run.others = {"llm2": {"pve_gpu_vm_vmid": 201, "pve_gpu_vm_mapping_prefix": "other", **address}}
    mappings = run.stub.state.mappings
    mappings.update(
        {f"other{index}": {**mappings.pop(f"gpu{index + 4}"), "id": f"other{index}"} for index in range(4)}
    )
    assert changed(run("--tags", "provision", *words)) == 2
    configs = [run.stub.state.vms[vmid].config for vmid in (200, 201)]
    assert [config["hostpci3"] for config in configs] == ["mapping=gpu3,pcie=1", "mapping=other3,pcie=1"]
    assert [sum(key.startswith("hostpci") for key in config) for config in configs] == [4, 4]


def test_a_vm_goes_when_host_and_vm_are_named_and_not_before(run: Run) -> None:
    assert changed(run("--tags", "provision", pve_gpu_vm_wait_for_ssh=False)) == 1
    made = run.stub.state.vms[200].config.copy()

    def teardown(**named: str) -> Result:
        return run("--tags", "provision", playbook="playbooks/teardown.yml", **named)

    assert changed(teardown()) == 0
    for host, vm in (("", "llm1"), ("llm2", "llm1"), ("llm1", "llm2")):
        refused = teardown(teardown_confirm=host, pve_gpu_vm_confirm_destroy=vm)
        assert (refused.code, len(refused.failures()), run.stub.writes) == (2, 1, [])
    assert run.stub.state.vms[200].config == made

    both = {"teardown_confirm": "llm1", "pve_gpu_vm_confirm_destroy": "llm1"}
    assert changed(teardown(**both)) == 1
    assert run.stub.state.vms == {}
    assert changed(teardown(**both)) == 0
    assert run.stub.writes == []
