"""What is documented is what there is: modules, roles, and every use of our modules in playbooks and roles."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "library").glob("*.py"))
ROLES = sorted(path.parents[1] for path in ROOT.glob("roles/*/meta/argument_specs.yml"))
WITHOUT_A_DEFAULT = {"nvidia_driver_kernel_headers"}  # left out, the host says which
COMPARED = ("type", "default", "choices", "elements", "required")


class Caught(Exception):
    """Carries the argument spec out of a module's main()."""


def argument_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = importlib.import_module(name)

    def caught(*_args: Any, **given: Any) -> None:
        raise Caught(given["argument_spec"])

    monkeypatch.setattr(module, "AnsibleModule", caught)
    with pytest.raises(Caught) as spec:
        module.main()
    return dict(spec.value.args[0])


def documentation(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(importlib.import_module(name).DOCUMENTATION))


def differences(documented: dict[str, Any], spec: dict[str, Any], path: str = "") -> list[str]:
    found = [f"{path}{name}" for name in set(documented) ^ set(spec)]
    for name in set(documented) & set(spec):
        for key in COMPARED:
            theirs, ours = documented[name].get(key), spec[name].get(key)
            if key in ("type", "required"):
                theirs, ours = (
                    theirs or ("str" if key == "type" else False),
                    ours or ("str" if key == "type" else False),
                )
            if theirs != ours:
                found.append(f"{path}{name}.{key}: documented {theirs!r}, taken {ours!r}")
        found += differences(
            documented[name].get("suboptions", {}), spec[name].get("options", {}), f"{path}{name}."
        )
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_what_it_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(documentation(name)["options"], argument_spec(name, monkeypatch)) == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_documents_itself_fully(name: str) -> None:
    module = importlib.import_module(name)
    documented = documentation(name)
    assert documented["module"] == name
    assert {"check_mode", "diff_mode"} <= set(documented["attributes"])
    assert all(option["description"] for option in documented["options"].values())
    for returned in yaml.safe_load(module.RETURN).values():
        assert all(returned[key] for key in ("description", "type", "returned"))
    examples = yaml.safe_load(module.EXAMPLES)
    assert name in examples[0]
    for task in examples:
        assert set(task.get(name) or {}) <= set(documented["options"])


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_defaults_are_those_of_its_spec(role: Path) -> None:
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text()) or {}
    options = specs["main"].get("options", {})
    given = {name: option["default"] for name, option in options.items() if "default" in option}
    assert given == defaults
    required = {name for name, option in options.items() if option.get("required")}
    assert set(options) - set(given) - required <= WITHOUT_A_DEFAULT
    assert all(option["description"] and option["type"] for option in options.values())
    assert all(name.startswith(f"{role.name}_") for name in options)
    for entry_point in set(specs) - {"main"}:
        assert (role / f"tasks/{entry_point}.yml").exists(), entry_point


def test_the_readmes_of_roles_are_current() -> None:
    script = [sys.executable, str(ROOT / "tools/role_readme.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def tasks_below(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [task for item in node for task in tasks_below(item)]
    if isinstance(node, dict):
        return [node, *(task for value in node.values() for task in tasks_below(value))]
    return []


def test_every_use_of_a_module_keeps_to_its_options() -> None:
    wrong = []
    files = [
        *ROOT.glob("playbooks/*.yml"),
        *ROOT.glob("roles/*/tasks/*.yml"),
        *ROOT.glob("tests/molecule/**/*.yml"),
    ]
    for path in files:
        for task in tasks_below(list(yaml.safe_load_all(path.read_text()))):
            for name in set(task) & set(MODULES):
                if isinstance(task[name], dict):
                    extra = set(task[name]) - set(documentation(name)["options"])
                    wrong += [f"{path.relative_to(ROOT)}: {name}.{option}" for option in sorted(extra)]
    assert wrong == []


@pytest.mark.parametrize("folder", ROLES, ids=lambda path: path.name)
def test_a_result_does_not_take_the_place_of_a_variable(folder: Path) -> None:
    variables = {
        name
        for place in ("defaults", "vars")
        for path in (folder / place).glob("*.yml")
        for name in yaml.safe_load(path.read_text()) or {}
    }
    registered = {
        name
        for path in folder.glob("tasks/*.yml")
        for name in re.findall(r"^\s+register: (\w+)$", path.read_text(), re.MULTILINE)
    }
    assert registered & variables == set()


# Calls without a limit of their own, and what ends them instead. (file, command)
ENDED_OTHERWISE = {
    ("module_utils/sm120/apt_packages.py", "argv"): "the role's async task",
    (
        "module_utils/sm120/gpu_power.py",
        "[self._program, *query, f'--loop-ms={PERIOD_MILLISECONDS}']",
    ): "stop() waits five seconds, then kills",
    (
        "module_utils/sm120/probe_run.py",
        "[*job.command, str(rank)]",
    ): "run_group() ends all ranks at the job's limit",
    ("module_utils/sm120/unit_log.py", "command"): "killed when it has been silent for too long",
    ("roles/fusion_probe/files/program/build.py", "[str(nvcc), '--version']"): "the probe's own limit",
    ("roles/sglang_server/files/stop.py", "argv"): "communicate() has a limit, then kill()",
    ("roles/sglang_server/files/stop.py", "['systemctl', 'stop', *running]"): "the unit's own limit",
}


def test_no_program_is_waited_for_without_end() -> None:
    places = [
        path
        for pattern in ("library/*.py", "module_utils/**/*.py", "roles/*/files/**/*.py")
        for path in ROOT.glob(pattern)
    ]
    endless = {
        (str(path.relative_to(ROOT)), ast.unparse(call.args[0]))
        for path in places
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and re.fullmatch(
            r"subprocess\.(run|call|check_call|check_output|Popen)|.*\.run_command", ast.unparse(call.func)
        )
        and not any(given.arg == "timeout" for given in call.keywords)
    }
    assert len(places) > 100
    assert endless == set(ENDED_OTHERWISE)
