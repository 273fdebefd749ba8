#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_packages
short_description: Packages by apt, whole or not at all, held, and taken away again exactly
description:
  - Asks apt first what it would do, and refuses before anything is touched when it cannot, when a package is on hold,
    when something else would be removed, or when a disk has not enough room.
  - Keeps a record (mode 0600) of what was not there before. When the installation fails, that is purged again.
  - V(absent) releases the holds and purges what the record has and nothing else needs by now. When that fails, what is
    left is held again and stays in the record.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Asks apt what it would do, with the package lists that are there.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
options:
  name:
    description: Packages to have. Those that are installed are left at their version.
    type: list
    elements: str
    default: []
  branch:
    description:
      - Beginning of the version (V(580) or V(580.159.04)) of packages to hold, those of O(name) and those that came
        with them. Packages held by us and of another branch are replaced. Empty holds nothing.
    type: str
    default: ""
  free_mib:
    description: Room that must be free at each path, in MiB. Paths on one file system are added up.
    type: dict
    default: {}
  update:
    description: Whether the package lists are fetched before something is installed.
    type: bool
    default: true
  record:
    description: Path of the record.
    type: path
    required: true
  fix:
    description: What to do about a refusal, for its message.
    type: str
    default: ""
  state:
    description: Install, or take away what the record has.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Install the driver and hold it
  apt_packages:
    name: [nvidia-driver-cuda, nvidia-kernel-open-dkms]
    branch: "580"
    free_mib: {/usr: 2048, /var: 1024}
    record: /var/lib/sglang-sm120/nvidia_driver/packages.json
"""

RETURN = r"""
installed:
  description: Version of each package that was installed (in check mode would be) and was not there before.
  returned: success
  type: dict
removed:
  description: Packages purged.
  returned: success
  type: list
  elements: str
held:
  description: Packages put on hold or, with V(absent), released.
  returned: success
  type: list
  elements: str
problem:
  description: Why nothing was done, or what failed, and whether it was taken back.
  returned: failure
  type: str
undone:
  description: Whether packages were installed and taken back.
  returned: failure
  type: bool
left:
  description:
    - Whether packages are left that could not be taken back. They stay in the record. V(true), too, where the record
      cannot be read.
  returned: failure
  type: bool
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.apt_packages import (
    Asked,
    Failed,
    Record,
    Refused,
    Undone,
    install,
    remove,
    run_apt,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "list", "elements": "str", "default": []},
            "branch": {"type": "str", "default": ""},
            "free_mib": {"type": "dict", "default": {}},
            "update": {"type": "bool", "default": True},
            "record": {"type": "path", "required": True},
            "fix": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params
    asked = Asked(
        names=tuple(given["name"]),
        record=Path(given["record"]),
        branch=given["branch"],
        free_mib={path: int(mib) for path, mib in given["free_mib"].items()},
        update=given["update"],
        check=module.check_mode,
    )
    absent = given["state"] == "absent"
    what = "what was installed removed" if absent else f"{', '.join(asked.names)} installed"
    try:
        done = (remove if absent else install)(run_apt, asked)
    except Refused as why:
        problem = f"Wanted: {what}. Found: {why}. Nothing was installed or removed. {given['fix']}".strip()
        module.fail_json(msg=problem, problem=problem, undone=False, left=False)
    except Undone as why:
        problem = f"Wanted: {what}. Found: apt-get failed and was taken back: {why}. {given['fix']}".strip()
        module.fail_json(msg=problem, problem=problem, undone=True, left=False)
    except Failed as why:
        problem = (
            f"Wanted: {what}. Found: apt failed: {why}. Packages are left, and recorded in {asked.record}. "
            f"Look at dpkg --audit, then run this again. {given['fix']}"
        ).strip()
        module.fail_json(msg=problem, problem=problem, undone=False, left=True)
    except (OSError, ValueError, KeyError, TypeError) as why:
        problem = f"Wanted: {what}, and a readable record {asked.record}. Found: {type(why).__name__}: {why}."
        module.fail_json(msg=problem, problem=problem, undone=False, left=Record.has_packages(asked.record))
    module.exit_json(
        changed=done.changed, installed=done.installed, removed=list(done.removed), held=list(done.held)
    )


if __name__ == "__main__":
    main()
