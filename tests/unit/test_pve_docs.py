"""The Proxmox roles: complete defaults, every argument of the module passed on, every variable in the example."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.module_utils.sm120.pve_spec import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
ROLES = ["pve_gpu_vm", "pve_host"]


@pytest.mark.parametrize("role", ROLES)
def test_role_defaults_are_the_argument_specs(role: str) -> None:
    defaults = yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text())
    specs = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())["argument_specs"]
    options = specs["main"]["options"]
    assert {name: item["default"] for name, item in options.items() if not item.get("required")} == defaults
    assert specs["teardown"]["options"] == options
    assert all(item["description"] and item["type"] for item in options.values())
    assert all(name.startswith(f"{role}_") for name in options)


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
