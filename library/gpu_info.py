#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: GPUs, their driver, the paths between them and what is wrong with any of it
description:
  - Reads C(nvidia-smi), C(/proc), C(/sys) and the kernel's log and changes nothing.
  - Judges what it finds. Each finding says what is wanted, what was found and what to do.
  - Works on a host without a driver or without a GPU; that is then a finding.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
options:
  wanted_gpus:
    description: Number of GPUs that the server needs. V(0) expects none in particular.
    type: int
    default: 0
  wanted_capability:
    description: Compute capability that the GPUs should have, for example V(12.0). Empty expects none in particular.
    type: str
    default: ""
  model_path:
    description: Folder of the model. It need not exist; the disk it will be on is what is looked at.
    type: path
  model_mib:
    description: Space that the model still needs there, in MiB. V(0) expects nothing.
    type: int
    default: 0
  own_units:
    description: Regular expression of the systemd services that may use the GPUs.
    type: str
    default: ^sglang-.*\.service$
"""

EXAMPLES = r"""
- name: Look at the GPUs before eight of them are asked for
  gpu_info:
    wanted_gpus: 8
    wanted_capability: "12.0"
    model_path: /srv/models/glm-5-nvfp4
  register: gpus

- name: Refuse errors
  ansible.builtin.assert:
    that: gpus.findings | selectattr('severity', 'eq', 'error') | length == 0
"""

RETURN = r"""
gpus:
  description:
    - One dict per GPU that C(nvidia-smi) sees, with C(index), C(bus_id), C(name), C(compute_capability), memory and
      BAR1 in MiB, PCIe generation and width now and at most, C(numa_node), ECC, persistence and power in watts.
    - What a card does not tell is V(null).
  returned: always
  type: list
  elements: dict
driver:
  description:
    - C(module_version) and C(flavour) (V(open) or V(proprietary)) of the loaded module, C(library_version),
      C(cuda_version), C(registry), C(uvm_hmm_disabled), C(nouveau_or_nova) (loaded rivals), C(smi_exit) and
      C(smi_error).
  returned: always
  type: dict
p2p:
  description:
    - For each ordered pair of GPUs C(from), C(to) and C(status), V(OK) where one can read the other's memory.
  returned: always
  type: list
  elements: dict
topology:
  description:
    - For each ordered pair of GPUs C(from), C(to) and C(status), the kind of path such as V(PHB), V(NODE) or
      V(SYS).
  returned: always
  type: list
  elements: dict
pci:
  description: NVIDIA's display devices on the PCI bus with C(bus_id), C(device), C(driver) and C(numa_node).
  returned: always
  type: list
  elements: dict
processes:
  description:
    - Programs that compute on a GPU with C(bus_id), C(pid), C(name), C(memory_mib) and C(unit), their systemd
      service.
  returned: always
  type: list
  elements: dict
xids:
  description:
    - Xid messages since boot with C(xid), C(bus_id) and C(text); V(null) where the kernel log may not be read.
  returned: always
  type: list
  elements: dict
host:
  description:
    - Memory, swap, C(/dev/shm), free disk for the model (in MiB), limits of services, NUMA nodes and their
      balancing.
  returned: always
  type: dict
findings:
  description:
    - What is wrong or remarkable, errors first. Each has C(severity) (V(error), V(warning) or V(note)), C(subject),
      C(wanted), C(found) and C(fix).
  returned: always
  type: list
  elements: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.gpu_facts import Host, gather
from ansible.module_utils.sm120.gpu_findings import Wanted, judge

ARGUMENTS: dict[str, dict[str, Any]] = {
    "wanted_gpus": {"type": "int", "default": 0},
    "wanted_capability": {"type": "str", "default": ""},
    "model_path": {"type": "path"},
    "model_mib": {"type": "int", "default": 0},
    "own_units": {"type": "str", "default": r"^sglang-.*\.service$"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    given = module.params
    facts = gather(Host(), given["model_path"])
    wanted = Wanted(given["wanted_gpus"], given["wanted_capability"], given["model_mib"], given["own_units"])
    module.exit_json(changed=False, **facts, findings=judge(facts, wanted))


if __name__ == "__main__":
    main()
