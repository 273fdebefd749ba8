#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver_info
short_description: Whose NVIDIA driver a host has, whether it will do, and what is left to do about it
description:
  - Looks at the loaded module, the one on disk, packages and GPUs, and judges them. Changes nothing.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
options:
  branch:
    description: Branch to have (V(580)), or an exact release (V(580.159.04)).
    type: str
    required: true
  packages:
    description: Packages that make up the driver. Empty for NVIDIA's compute-only set of this distribution.
    type: list
    elements: str
    default: []
  headers:
    description: Packages of kernel headers. Left out, those of the running kernel and of each image metapackage.
    type: list
    elements: str
  module_options:
    description: Options of kernel modules, by module and name.
    type: dict
    default: {}
  power_limit_watts:
    description: Power limit of every GPU; V(0) leaves the card's own.
    type: int
    default: 0
  adopt:
    description: Whether a driver that somebody else installed is held and set up, too.
    type: bool
    default: false
  digest:
    description: Digest of what the initramfs should have been made with.
    type: str
    default: ""
  free_mib:
    description: Room that an installation takes at each path, in MiB.
    type: dict
    default: {}
  state_dir:
    description: Folder of the records.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Look at the driver
  nvidia_driver_info:
    branch: "580"
    state_dir: /var/lib/sglang-sm120/nvidia_driver
"""

RETURN = r"""
owner:
  description: V(none), V(ours) or V(theirs).
  returned: always
  type: str
manage:
  description: Whether the driver is ours to set up.
  returned: always
  type: bool
problems:
  description: Findings of C(gpu_info)'s form that have to be put right before anything is written.
  returned: always
  type: list
  elements: dict
errors:
  description: What is wrong with the driver now, in the same form.
  returned: always
  type: list
  elements: dict
branch:
  description: Branch of the packages to hold.
  returned: always
  type: str
packages:
  description: Packages to have.
  returned: always
  type: list
  elements: str
missing:
  description: Those to be installed.
  returned: always
  type: list
  elements: str
packages_due:
  description: Whether packages are to be installed or held.
  returned: always
  type: bool
settings_due:
  description: Whether persistence or the power limit are not as set.
  returned: always
  type: bool
initramfs_due:
  description: Whether the initramfs was made with other module options.
  returned: always
  type: bool
loaded:
  description: Whether the module is loaded.
  returned: always
  type: bool
reboot:
  description: What only a reboot brings into effect.
  returned: always
  type: list
  elements: str
effect_due:
  description: Whether something that is installed or set is not in effect.
  returned: always
  type: bool
driver:
  description: As in C(gpu_info).
  returned: always
  type: dict
disk:
  description: C(version) and C(flavour) of the module on disk.
  returned: always
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import driver_facts, driver_state
from ansible.module_utils.sm120.gpu_facts import Host


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "branch": {"type": "str", "required": True},
            "packages": {"type": "list", "elements": "str", "default": []},
            "headers": {"type": "list", "elements": "str"},
            "module_options": {"type": "dict", "default": {}},
            "power_limit_watts": {"type": "int", "default": 0},
            "adopt": {"type": "bool", "default": False},
            "digest": {"type": "str", "default": ""},
            "free_mib": {"type": "dict", "default": {}},
            "state_dir": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    folder = Path(given["state_dir"])
    space = {path: int(mib) for path, mib in given["free_mib"].items()}
    wanted = driver_state.Wanted(
        branch=given["branch"],
        packages=tuple(given["packages"]),
        headers=None if given["headers"] is None else tuple(given["headers"]),
        options=given["module_options"],
        power_limit_watts=given["power_limit_watts"],
        adopt=given["adopt"],
        digest=given["digest"],
    )
    facts = driver_facts.gather(
        Host(), folder / "packages.json", folder / "initramfs.done", given["module_options"], space
    )
    judged = driver_state.judge(facts, wanted)
    module.exit_json(changed=False, **judged, driver=facts["driver"], disk=facts["disk"])


if __name__ == "__main__":
    main()
