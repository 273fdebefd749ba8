"""Documentation, arguments and defaults of the Proxmox modules and roles say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pve_gpu_vm
import pve_host_cmdline
import pve_host_info
import pytest
import yaml
from ansible.module_utils.sm120.pve_spec import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
MODULES = [pve_gpu_vm, pve_host_cmdline, pve_host_info]
ROLES = ["pve_gpu_vm", "pve_host"]


class Stop(Exception):
    """Raised in place of running the module."""


def arguments(module: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The argument_spec that main() hands to AnsibleModule."""
    caught: dict[str, Any] = {}

    def catch(**given: Any) -> None:
        caught.update(given)
        raise Stop

    monkeypatch.setattr(module, "AnsibleModule", catch)
    with pytest.raises(Stop):
        module.main()
    assert caught["supports_check_mode"] is True
    return dict(caught["argument_spec"])


def shape(option: dict[str, Any]) -> dict[str, Any]:
    """What documentation and argument_spec must agree on."""
    keys = ("type", "elements", "choices", "default", "required")
    found = {key: option[key] for key in keys if option.get(key) not in (None, False)}
    if option.get("default") is False:
        found["default"] = False
    nested = option.get("options") or option.get("suboptions")
    return {**found, "options": {name: shape(item) for name, item in nested.items()}} if nested else found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_documentation_is_the_argument_spec(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    real = arguments(module, monkeypatch)
    assert {name: shape(item) for name, item in documented.items()} == {
        name: shape(item) for name, item in real.items()
    }
    assert all(item["description"] for item in documented.values())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_use_only_what_there_is(module: Any) -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    tasks = yaml.safe_load(module.EXAMPLES)
    required = {name for name, item in documented.items() if item.get("required")}
    assert tasks
    for task in tasks:
        used = task[module.__name__]
        assert required <= used.keys() <= documented.keys()


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
