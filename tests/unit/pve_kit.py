"""What the tests of pve_gpu_vm share: the stub, and the arguments of a VM with eight GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pve_gpu_vm
import pytest
from pve_stub import PASSWORD, SECRET, TOKEN, Stub, make_certificate

__all__ = ["ARGUMENTS", "PASSWORD", "SECRET", "SSH_KEY", "Vm", "certificate", "stub", "vm"]

SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ+made/up ops@example.com"
ARGUMENTS: dict[str, Any] = {
    "api_host": "127.0.0.1",
    "api_user": TOKEN.partition("!")[0],
    "api_token_id": TOKEN.partition("!")[2],
    "api_token_secret": SECRET,
    "node": "pve1",
    "vmid": 200,
    "name": "llm1",
    "owner_id": "team",
    "gpus": [{"mapping": f"gpu{index}"} for index in range(8)],
    "cores": 64,
    "memory_mib": 524288,
    "storage": "local-zfs",
    "image_volid": "local:import/noble.qcow2",
    "sshkeys": [SSH_KEY],
    "ipconfig": "ip=192.0.2.10/24,gw=192.0.2.1",
}


class Vm:
    """Runs the module against the stub and keeps count of its writes."""

    def __init__(self, stub: Stub, certificate: Path, run_module: Callable[..., Any]) -> None:
        self.stub, self.certificate, self._run = stub, certificate, run_module
        self.answers: list[dict[str, Any]] = []

    def __call__(self, *, check: bool = False, diff: bool = True, **args: Any) -> dict[str, Any]:
        """Run; the answer, with ``writes_seen`` as the stub counted them."""
        given = {**ARGUMENTS, "api_port": self.stub.port, "ca_path": str(self.certificate), **args}
        given = {name: value for name, value in given.items() if value is not None}
        self.stub.requests.clear()
        code, answer = self._run(pve_gpu_vm.main, check=check, diff=diff, **given)
        self.answers.append(answer)
        assert code == (1 if answer.get("failed") else 0)
        assert SECRET not in str(answer)
        return {**answer, "writes_seen": [(method, path) for method, path, _ in self.stub.writes]}

    def ok(self, **args: Any) -> dict[str, Any]:
        """Run; it must not fail."""
        answer = self(**args)
        assert not answer.get("failed"), answer["msg"]
        return answer

    def refused(self, *subjects: str, **args: Any) -> dict[str, Any]:
        """Run; it must refuse for these reasons, before any write."""
        answer = self(**args)
        assert answer.get("failed") is True
        errors = {item["subject"] for item in answer["findings"] if item["severity"] == "error"}
        assert errors == set(subjects), answer["msg"]
        assert answer["writes_seen"] == []
        return answer

    def put(self) -> dict[str, Any]:
        """The parameters of the only PUT to the VM's configuration, digest left out."""
        found = [params for method, path, params in self.stub.writes if path.endswith("/config")]
        assert len(found) == 1
        return {key: value for key, value in found[0].items() if key != "digest"}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for the stub and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def stub(certificate: tuple[Path, Path]) -> Iterator[Stub]:
    """A node with eight GPUs, each with its mapping."""
    with Stub(*certificate) as server:
        server.state.add_mappings()
        yield server


@pytest.fixture
def vm(stub: Stub, certificate: tuple[Path, Path], run_module: Callable[..., Any]) -> Vm:
    """The module against the stub."""
    return Vm(stub, certificate[0], run_module)
