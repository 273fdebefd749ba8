#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: own_files
short_description: Small files of our own, put on a host and taken away again without a trace
description:
  - Writes drop-in files and the folders that they need, and keeps a record (mode 0600) of both.
  - V(absent) removes what the record names, and the folders that were made for it when they are empty.
  - A file that is there already and not in the record is refused, whatever is in it; nothing is written then.
  - A file that somebody has changed since is theirs. It is not removed; a warning names it.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Says what would change, also where folders are missing yet.
    support: full
  diff_mode:
    description: Shows each file before and after.
    support: full
options:
  files:
    description: Content of each file by its path. What the record has and this has not is removed.
    type: dict
    default: {}
  record:
    description: Path of the record. Its folder is made, for root alone.
    type: path
    required: true
  mode:
    description: Mode of the files, in octal.
    type: str
    default: "0644"
  state:
    description: V(present) writes, V(absent) takes away.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Block a module
  own_files:
    files:
      /etc/modprobe.d/sglang-sm120.conf: "blacklist nouveau\n"
    record: /var/lib/sglang-sm120/example/files.json
"""

RETURN = r"""
written:
  description: Paths written.
  returned: success
  type: list
  elements: str
replaced:
  description: Those of them that were there already.
  returned: success
  type: list
  elements: str
removed:
  description: Paths removed.
  returned: success
  type: list
  elements: str
left:
  description: Paths that were to be removed and were not, because somebody else has changed them since.
  returned: success
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import own_files


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "default": {}},
            "record": {"type": "path", "required": True},
            "mode": {"type": "str", "default": "0644"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    kept = Path(module.params["record"])
    wanted = {path: str(text).encode() for path, text in module.params["files"].items()}
    begun = False
    try:
        mode = int(module.params["mode"], 8)
        record = own_files.load(kept)
        absent = module.params["state"] == "absent"
        if absent:
            change = own_files.plan({}, record or own_files.Record({}))
        else:
            change = own_files.plan(wanted, record, mode=mode)
        changed = record is not None if absent else change.changed
        if changed and not module.check_mode:
            begun = True
            if absent and record is not None:
                own_files.take_away(record, kept)
            else:
                own_files.apply(change, kept, mode)
    except (OSError, ValueError, KeyError, own_files.NotOurs) as problem:
        module.fail_json(
            msg=f"Wanted: {', '.join(wanted) or kept} written or removed by us alone. Found: {problem}. "
            + (
                f"Look at the disk and run this again: what was written is in the record {kept}."
                if begun
                else "Move that file away, or look at the disk; nothing was changed."
            )
        )
    if change.left:
        module.warn(own_files.left_message(change.left))
    paths = [*change.write, *change.remove]
    module.exit_json(
        changed=changed,
        written=list(change.write),
        replaced=[path for path in change.write if path in change.before],
        removed=list(change.remove),
        left=list(change.left),
        diff=[
            {
                "before": change.before.get(path, b"").decode(errors="replace"),
                "after": change.write.get(path, b"").decode(errors="replace"),
                "before_header": path,
                "after_header": path,
            }
            for path in paths
        ],
    )


if __name__ == "__main__":
    main()
