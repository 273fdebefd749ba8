#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sm120_gates_info
short_description: The state of every SM120 gate in an installed SGLang and FlashInfer
description:
  - Finds the packages without importing them, classifies every gate by the hashes of its files, and
    plans the edits that bring the wanted features about.
  - Never changes anything. What stands in the way of a plan is in RV(problems); then RV(edits) is empty.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
options:
  python:
    description: The interpreter that runs the server; its import path is searched for the packages.
    type: path
  sglang_root:
    description: SGLang's package folder, ending in C(/sglang). Give it together with O(flashinfer_root).
    type: path
  flashinfer_root:
    description: FlashInfer's package folder, ending in C(/flashinfer).
    type: path
  state_dir:
    description: Folder on the host that holds the manifest and the delivered bytes of edited files.
    type: path
    default: /var/lib/sglang-sm120/gates
  features:
    description: Features to open, each as a whole.
    type: list
    elements: str
    choices: [allreduce_fusion, moe_autotune]
    default: [allreduce_fusion, moe_autotune]
  want:
    description: V(present) plans to open O(features) and close the rest, V(absent) to close all.
    type: str
    choices: [present, absent]
    default: present
  scan:
    description: >-
      Whether to look for conditions on the compute capability with no help from the catalogue too. Takes some
      seconds.
    type: bool
    default: false
  capability:
    description: Compute capability of the GPUs, C(major.minor).
    type: str
    default: "12.0"
"""

EXAMPLES = r"""
- name: Read the state of the gates
  sm120_gates_info:
    python: /opt/sglang-sm120/venv/bin/python
  register: gates

- name: Read it from package folders, and plan the way back
  sm120_gates_info:
    sglang_root: /opt/sglang-sm120/venv/lib/python3.12/site-packages/sglang
    flashinfer_root: /opt/sglang-sm120/venv/lib/python3.12/site-packages/flashinfer
    want: absent
"""

RETURN = r"""
packages:
  description: The packages found, by name; each with C(version), C(root) and C(source) (V(wheel) or V(git)).
  returned: always
  type: dict
gates:
  description: >-
    Every gate, bottom layer first: C(id), C(label), C(feature) (null: listed only), C(layer), C(package),
    C(path), C(line), C(state) (closed, open, partial, native, absent, drifted, unknown), C(found),
    C(expected), C(why), C(note).
  returned: always
  type: list
  elements: dict
features:
  description: State of each feature, V(open), V(closed), V(partial), V(drifted) or V(unknown).
  returned: always
  type: dict
consistent:
  description: Whether no upper gate passes over a closed lower one and no feature is half open.
  returned: always
  type: bool
crossed:
  description: >-
    What makes RV(consistent) false: C(feature), C(open) and C(closed) (ids of the gates that do not agree), and
    C(text), which says what a server started now would do.
  returned: always
  type: list
  elements: dict
edits:
  description: >-
    Calls of builtin modules still needed, in order: C(gate), C(module), C(path), C(args), C(validate).
  returned: always
  type: list
  elements: dict
plan:
  description: What sm120_gates_state needs; empty when there are problems.
  returned: always
  type: dict
needed:
  description: Whether the plan has anything left to do.
  returned: always
  type: bool
purge:
  description: Whether compiled kernels have to be purged after the plan.
  returned: always
  type: bool
digest:
  description: Identifies the state of all edited files; V(pristine) where none is edited.
  returned: always
  type: str
wanted_digest:
  description: What the digest is after the plan.
  returned: always
  type: str
settled:
  description: Whether bytecode and compiled kernels were purged for the files as they are.
  returned: always
  type: bool
lock:
  description: Who is at work on these gates, or null.
  returned: always
  type: dict
units:
  description: Names of systemd units whose ExecStart lies in the same virtual environment.
  returned: always
  type: list
  elements: str
caches:
  description: >-
    Folders below which these units may keep what FlashInfer compiles: E(FLASHINFER_WORKSPACE_BASE) and the home
    folder, as their files name them.
  returned: always
  type: list
  elements: str
conditions:
  description: >-
    With O(scan), every condition found: C(path), C(line), C(form), C(text), C(within) (its function), C(admits)
    (capabilities that it can be true for, or that a guard does not turn away), C(sm120), C(on_path) and C(gate)
    (its gate, or null).
  returned: always
  type: list
  elements: dict
unlisted:
  description: >-
    Those of RV(conditions) on the path of the fusion or of the fused MoE that shut SM120 out, that no gate covers
    and that nobody has judged harmless.
  returned: always
  type: list
  elements: dict
notes:
  description: What an operator should know; it stops nothing.
  returned: always
  type: list
  elements: str
problems:
  description: What forbids the plan, each with what was expected, what was found and what to do.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.catalogue import FEATURES
from ansible.module_utils.sm120.report import Request, gates_report


def argument_spec() -> dict[str, Any]:
    return {
        "python": {"type": "path"},
        "sglang_root": {"type": "path"},
        "flashinfer_root": {"type": "path"},
        "state_dir": {"type": "path", "default": "/var/lib/sglang-sm120/gates"},
        "features": {
            "type": "list",
            "elements": "str",
            "choices": list(FEATURES),
            "default": list(FEATURES),
        },
        "want": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "capability": {"type": "str", "default": "12.0"},
        "scan": {"type": "bool", "default": False},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_one_of=[("python", "sglang_root")],
        required_together=[("sglang_root", "flashinfer_root")],
        supports_check_mode=True,
    )
    given = module.params
    roots = {name: given[f"{name}_root"] for name in ("flashinfer", "sglang")}
    request = Request(
        python=given["python"],
        roots={name: Path(root) for name, root in roots.items() if root},
        state_dir=Path(given["state_dir"]),
        features=given["features"],
        want=given["want"],
        capability=given["capability"],
        scan=given["scan"],
    )
    module.exit_json(changed=False, **gates_report(request))


if __name__ == "__main__":
    main()
