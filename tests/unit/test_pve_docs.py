"""The Proxmox roles: every argument of the module passed on, every variable in the example."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.module_utils.sm120.pve_spec import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
ROLES = ["pve_gpu_vm", "pve_host"]


@pytest.mark.parametrize("role", ROLES)
def test_a_teardown_takes_the_roles_options(role: str) -> None:
    specs = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())["argument_specs"]
    assert specs["teardown"]["options"] == specs["main"]["options"]


def test_role_passes_every_argument_on() -> None:
    task = yaml.safe_load((ROOT / "roles/pve_gpu_vm/tasks/vm.yml").read_text())[0]
    assert task["pve_gpu_vm"].keys() == ARGUMENTS.keys()
    options = yaml.safe_load((ROOT / "roles/pve_gpu_vm/meta/argument_specs.yml").read_text())
    types = {name: item["type"] for name, item in options["argument_specs"]["main"]["options"].items()}
    assert all(types[f"pve_gpu_vm_{name}"] == item["type"] for name, item in ARGUMENTS.items())


def test_example_inventory_names_every_variable_once() -> None:
    text = "".join(path.read_text() for path in (ROOT / "inventories/example").rglob("pve_*.yml"))
    for role in ROLES:
        options = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
        for name in options["argument_specs"]["main"]["options"]:
            lines = [line for line in text.splitlines() if line.removeprefix("# ").startswith(f"{name}:")]
            assert len(lines) == 1, name
