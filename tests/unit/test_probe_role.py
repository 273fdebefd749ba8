"""What the roles fusion_probe and sglang_server make of an inventory and of a stored verdict, by ansible-playbook here.

Nothing is changed but a file of answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from local_play import HOST_PYTHON

GATES = {
    "digest": "d1",
    "features": {"allreduce_fusion": "open"},
    "wanted": ["allreduce_fusion", "moe_autotune"],
}
RUNTIME = {"versions": {"sglang": "0.5.23", "torch": "2.11.0"}, "device": "cuda", "site_packages": "/site"}
COMMON = {
    "ansible_connection": "local",
    "ansible_python_interpreter": HOST_PYTHON,
    "sm120_gates_facts": GATES,
    "sglang_runtime_facts": RUNTIME,
    "cuda_toolkit_home": "/usr/local/cuda-13.0",
}


def play(folder: Path, text: str, hosts: dict[str, Any]) -> None:
    (folder / "play.yml").write_text(text.replace("ROOT", str(ROOT)))
    defaults = yaml.safe_load((ROOT / "roles/fusion_probe/defaults/main.yml").read_text())
    inventory = {"all": {"hosts": hosts, "vars": {**defaults, **COMMON, "answers": str(folder)}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [str(program), "-i", str(folder / "hosts.yml"), str(folder / "play.yml")],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- what is probed, and as whom -------------------------------------------------------------------------------------
TWO = [
    {"instance": "big", "profile": "glm5-nvfp4", "allreduce_fusion": "off"},
    {
        "instance": "own",
        "profile": "glm5-nvfp4-tp4-pp2",
        "user": "other",
        "flashinfer_workspace_base": "/srv/jit",
        "extra_environment": {"NCCL_P2P_LEVEL": "PHB", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "HF_TOKEN": "x"},
    },
]
INVENTORIES: dict[str, tuple[dict[str, Any], Any]] = {
    # host: (its variables, what of it is probed as (instance, ranks, groups), or a word of why nothing is)
    "six": ({"sglang_server_profile": "glm5-nvfp4-tp2-pp3"}, ("main", 2, 3)),
    "halves": ({"sglang_server_profile": "glm5-nvfp4-tp4-pp2"}, ("main", 4, 2)),
    "eight": ({"sglang_server_profile": "glm5-nvfp4-mtp"}, ("main", 8, 1)),
    "typed": (
        {"sglang_server_profile": "glm5-nvfp4", "sglang_server_tensor_parallel_size": 4},
        ("main", 4, 1),
    ),
    "said": ({"sglang_server_extra_arguments": {"tp-size": 2, "pp-size": 2}}, ("main", 2, 2)),
    "dense": ({"sglang_server_profile": "dense"}, "tensor parallel size 1"),
    "bare": ({}, "tensor parallel size 1"),
    "asked": ({"fusion_probe_ranks": 2}, ("main", 2, 1)),
    "closed": (
        {"sglang_server_profile": "glm5-nvfp4", "sm120_gates_facts": {**GATES, "wanted": ["moe_autotune"]}},
        "sm120_gates_features",
    ),
    "forbidden": (
        {"sglang_server_profile": "glm5-nvfp4", "sglang_server_allreduce_fusion": "off"},
        "sglang_server_allreduce_fusion",
    ),
    "several": ({"sglang_server_instances": TWO, "asked_of": "own"}, ("own", 4, 2)),
    # Whether these verdicts are about the server:
    "same": ({"sglang_server_profile": "glm5-nvfp4", "fusion_probe_ranks": 8}, ("main", 8, 1)),
    "fewer": ({"sglang_server_profile": "glm5-nvfp4", "fusion_probe_ranks": 2}, ("main", 2, 1)),
    "half": ({"sglang_server_profile": "glm5-nvfp4-tp4-pp2", "fusion_probe_ranks": 4}, ("main", 4, 1)),
    "without-gpus": (
        {"sglang_server_profile": "glm5-nvfp4", "fusion_probe_ranks": 2, "sglang_server_facts": {"gpus": []}},
        ("main", 2, 1),
    ),
    "without-p2p": (
        {
            "sglang_server_profile": "glm5-nvfp4",
            "fusion_probe_environment": {"NCCL_P2P_DISABLE": "1"},
            "sglang_server_extra_environment": {},
        },
        ("main", 8, 1),
    ),
}
OF_SOMETHING_ELSE = {"asked", "fewer", "half", "without-p2p"}
PROBED = """
- hosts: all
  gather_facts: false
  vars_files: [ROOT/roles/fusion_probe/vars/main.yml]
  tasks:
    - ansible.builtin.include_role: {name: sglang_server, tasks_from: planned, public: true}
    - ansible.builtin.copy: {content: "{{ asked | to_json }}", dest: "{{ answers }}/{{ inventory_hostname }}.json"}
      vars:
        server: "{{ __sglang_server_values }}"
        __sglang_server_name: "{{ asked_of | default('main') }}"
        asked:
          needless: "{{ __fusion_probe_needless }}"
          ranks: "{{ fusion_probe_ranks | int or __fusion_probe_server.tensor }}"
          groups: "{{ __fusion_probe_groups }}"
          server: "{{ __fusion_probe_server }}"
          probe: "{{ __fusion_probe_environment }}"
          unit: "{{ lookup('ansible.builtin.template', 'ROOT/roles/sglang_server/templates/environment.j2') }}"
          capability: "{{ fusion_probe_capability }}"
          of_server: "{{ __fusion_probe_of_server }}"
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probed")
    hosts = {name: dict(variables) for name, (variables, _) in INVENTORIES.items()}
    hosts["six"]["sm120_gates_capability"] = "12.1"
    for variables in hosts.values():
        variables.setdefault("sglang_server_facts", {"gpus": ["GPU-0, 580"]})
    play(folder, PROBED, hosts)
    return {host: json.loads((folder / f"{host}.json").read_text()) for host in hosts}


@pytest.mark.parametrize("host", INVENTORIES)
def test_what_is_probed(probed: dict[str, Any], host: str) -> None:
    found, wanted = probed[host], INVENTORIES[host][1]
    if isinstance(wanted, str):
        assert wanted in found["needless"]
    else:
        assert found["needless"] == ""
        assert (found["server"]["instance"], found["ranks"], found["groups"]) == wanted


@pytest.mark.parametrize("host", INVENTORIES)
def test_the_probe_has_the_environment_of_the_unit(probed: dict[str, Any], host: str) -> None:
    lines = [line.split("=", 1) for line in probed[host]["unit"].splitlines() if not line.startswith("#")]
    unit = {name: json.loads(value) for name, value in lines}
    assert unit.pop("HF_TOKEN", "x") == "x"
    alone = INVENTORIES[host][0].get("fusion_probe_environment", {})
    assert {name: str(value) for name, value in probed[host]["probe"].items()} == unit | alone
    assert {"HOME", "PATH", "CUDA_HOME"} <= set(unit)


@pytest.mark.parametrize("host", INVENTORIES)
def test_which_verdict_is_about_the_server(probed: dict[str, Any], host: str) -> None:
    assert probed[host]["of_server"] == (host not in OF_SOMETHING_ELSE)


def test_an_instances_own_values_reach_the_probe(probed: dict[str, Any]) -> None:
    found = probed["several"]
    assert (found["server"]["user"], found["server"]["home"]) == ("other", "/var/lib/other")
    environment = found["probe"]
    assert "HF_TOKEN" not in environment
    assert "HF_TOKEN" not in found["server"]["environment"]  # a fact, which is shown
    for name, value in {
        "HOME": "/var/lib/other",
        "CUDA_HOME": "/usr/local/cuda-13.0",
        "FLASHINFER_WORKSPACE_BASE": "/srv/jit",
        "NCCL_P2P_LEVEL": "PHB",
        "NCCL_MIN_NCHANNELS": "8",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }.items():
        assert environment[name] == value


def test_the_capability_is_that_of_the_gates(probed: dict[str, Any]) -> None:
    assert (probed["six"]["capability"], probed["eight"]["capability"]) == ("12.1", "12.0")


# --- a stored verdict ------------------------------------------------------------------------------------------------
FAILED: dict[str, Any] = {
    "verdict": "failed",
    "cause": "wrong_numbers",
    "gates": "d1",
    "packages": {"sglang": "0.5.23", "torch": "2.11.0"},
    "gpus": ["GPU-0, 580"],
}
OLD = {**FAILED, "packages": {"sglang": "0.5.9"}}
# (the stored verdict, the instance's value, the policy, kept by promotion, release, insisted): (fusion is on, refused)
DECISIONS: dict[str, tuple[tuple[Any, ...], tuple[bool, bool]]] = {
    "no-probe-forced": (({"verdict": ""}, "auto", "forced", False, "0.5.23", False), (True, False)),
    "no-probe-on": (({"verdict": ""}, "on", "measured", False, "0.5.23", False), (True, False)),
    "no-probe-kept": (({"verdict": ""}, "auto", "measured", True, "0.5.23", False), (True, False)),
    "failed-forced": ((FAILED, "auto", "forced", False, "0.5.23", False), (False, True)),
    "failed-on": ((FAILED, "on", "measured", False, "0.5.23", False), (False, True)),
    "failed-kept": ((FAILED, "auto", "measured", True, "0.5.23", False), (False, False)),
    "failed-off": ((FAILED, "off", "forced", False, "0.5.23", False), (False, False)),
    "failed-insisted": ((FAILED, "on", "measured", False, "0.5.23", True), (True, False)),
    "passed": (({**FAILED, "verdict": "passed"}, "auto", "forced", False, "0.5.23", False), (True, False)),
    "other-gates": (({**FAILED, "gates": "d2"}, "auto", "forced", False, "0.5.23", False), (True, False)),
    "other-cards": (
        ({**FAILED, "gpus": ["GPU-1, 580"]}, "auto", "forced", False, "0.5.23", False),
        (True, False),
    ),
    "other-packages": ((OLD, "auto", "forced", False, "0.5.23", False), (True, False)),
    "memory-taken": (
        ({**FAILED, "cause": "memory"}, "auto", "forced", False, "0.5.23", False),
        (True, False),
    ),
    "cannot-be-told": ((OLD, "off", "measured", False, "0.5.9", False), (False, True)),
}
DECIDED = """
- hosts: all
  gather_facts: false
  vars_files: [ROOT/roles/sglang_server/vars/main.yml]
  tasks:
    - ansible.builtin.set_fact:
        decided: "{{ (decided | default({})) | combine({case.name: [__sglang_server_fusion_on | bool,
                                                                    __sglang_server_refused_by_probe | bool]}) }}"
      loop: "{{ cases }}"
      loop_control: {loop_var: case}
      vars:
        __sglang_server_examined: {stdout: "{{ {'probe': case.probe, 'gpus': ['GPU-0, 580']} | to_json }}"}
        sglang_server_facts: {probe_failed: "{{ __sglang_server_probe_failed | bool }}"}
        server: {allreduce_fusion: "{{ case.value }}", insist: "{{ case.insist }}"}
        sm120_gates_policy: "{{ case.policy }}"
        __sglang_server_kept: "{{ case.kept }}"
        sglang_runtime_facts: {device: cuda, versions: {sglang: "{{ case.release }}", torch: 2.11.0}}
    - ansible.builtin.copy: {content: "{{ decided | to_json }}", dest: "{{ answers }}/decided.json"}
"""


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("decided")
    cases = [
        {
            **dict(zip(("probe", "value", "policy", "kept", "release"), given, strict=False)),
            "insist": ["fusion-probe-failed"] if given[-1] else [],
            "name": name,
        }
        for name, (given, _) in DECISIONS.items()
    ]
    play(folder, DECIDED, {"here": {"cases": cases}})
    answers: dict[str, Any] = json.loads((folder / "decided.json").read_text())
    return answers


@pytest.mark.parametrize("case", DECISIONS)
def test_a_failed_probe_keeps_fusion_off(decided: dict[str, Any], case: str) -> None:
    assert tuple(decided[case]) == DECISIONS[case][1]


# --- after a failed probe --------------------------------------------------------------------------------------------
DEPLOYED = {
    name: {"unit": f"sglang-{name}.service", "active": active, "fusion": fusion}
    for name, active, fusion in (
        ("fused", "active", True),
        ("insisting", "active", True),
        ("plain", "active", False),
        ("edited", "inactive", True),
        ("replaced", "inactive", True),
        ("insisting-too", "inactive", True),
        ("down", "inactive", True),
        ("unlisted", "inactive", True),
    )
}
SERVED = """
- hosts: all
  gather_facts: false
  vars_files: [ROOT/roles/sglang_server/vars/main.yml]
  vars:
    sglang_server_insist: []
    sglang_server_instances: "{{ listed }}"
    sm120_gates_stopped_units: [sglang-edited.service, sglang-insisting-too.service, sglang-unlisted.service]
    sglang_runtime_stopped_units: [sglang-replaced.service, sglang-edited.service]
  tasks:
    - ansible.builtin.set_fact:
        served: "{{ (served | default({})) | combine({__sglang_server_name: __sglang_server_after_probe}) }}"
      loop: "{{ __sglang_server_without_fusion }}"
      loop_control: {loop_var: __sglang_server_name}
    - ansible.builtin.copy: {content: "{{ served | to_json }}", dest: "{{ answers }}/{{ inventory_hostname }}.json"}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("served")
    insist = {"insist": ["fusion-probe-failed"]}
    listed = [
        {"instance": name, **(insist if name.startswith("insisting") else {})}
        for name in DEPLOYED
        if name != "unlisted"
    ]
    hosts: dict[str, Any] = {
        name: {"listed": listed, "sglang_server_facts": {"deployed": DEPLOYED, "probe_failed": failed}}
        for name, failed in (("wrong", True), ("taken", False), ("closed", True))
    }
    hosts["closed"]["sm120_gates_facts"] = {**GATES, "features": {"allreduce_fusion": "closed"}}
    play(folder, SERVED, hosts)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in hosts}


def test_what_a_failed_probe_leaves_running(served: dict[str, Any]) -> None:
    off = {"allreduce_fusion": "off"}
    stopped = {"edited": off, "replaced": off, "insisting-too": {}}
    assert served["taken"] == stopped
    assert served["wrong"] == {"fused": off, **stopped}
    assert served["closed"] == {"fused": off, **stopped, "insisting-too": off}


def test_the_report_is_read_from_where_the_module_writes_it() -> None:
    server, probe = (
        yaml.safe_load((ROOT / f"roles/{role}/vars/main.yml").read_text())
        for role in ("sglang_server", "fusion_probe")
    )
    assert server["__sglang_server_probe_report"] == probe["__fusion_probe_evidence_dir"] + "/report.json"
